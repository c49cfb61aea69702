"""The sampling kernels against `strobe.sampling.sampler`, and their edges by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strobe.kernels import gumbel_argmax, sampling
from strobe.sampling.noise import gumbel
from strobe.sampling.sampler import RowParams, best_two, sample_rows

# The interpreter's integer products wrap, as the noise needs, but not in silence.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

DTYPES = [torch.float32, torch.bfloat16]
INF = math.inf
OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
REAL = 151_936


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def rows_of(
    device: torch.device, count: int, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0
) -> RowParams:
    """`count` rows; each value is one for all of them or a list."""

    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype).expand(count).contiguous().to(device)

    return RowParams(
        temperature=column(temperature, torch.float32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        top_k=column(top_k, torch.int64),
        key=torch.arange(count, device=device) * -0x61C8864680B583EB,
        position=torch.arange(count, device=device) * 3 + 5,
    )


def sample(logits: Tensor, rows: RowParams) -> Tensor:
    return sampling.sample_rows(logits, *rows)


def agree(tokens: Tensor, logits: Tensor, rows: RowParams) -> None:
    """The tokens are those of the twin, of which compiled logarithms may flip one in a million."""
    assert (
        tokens.tolist() == sample_rows(logits.cpu(), RowParams(*[c.cpu() for c in rows])).tolist()
    )


# --- argmax ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # by the interpreter's NumPy
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("block", [1024, 8192])
def test_argmax(device, generator, monkeypatch, dtype, block) -> None:
    monkeypatch.setattr(sampling, "ARGMAX_BLOCK", block)
    wide = torch.randn(4, 3016, generator=generator).to(device, dtype)
    logits = wide[:, :3000]
    logits[1] = -INF
    logits[2, 700:] = 9
    assert sampling.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert sampling.argmax(logits)[1:3].tolist() == [0, 700]
    margins = torch.full((len(logits),), -1.0, device=device)
    assert sampling.argmax(logits, margins).tolist() == logits.argmax(-1).tolist()
    assert torch.equal(margins, best_two(logits)[1])


def test_argmax_of_nan(device, monkeypatch) -> None:
    """A NaN of either sign, also below inf, leaves its row without a token; zeros are equal."""
    monkeypatch.setattr(sampling, "ARGMAX_BLOCK", 64)
    logits = torch.full((4, 300), -1.0)
    logits[0, 5], logits[0, 200], logits[0, 290] = INF, math.nan, math.nan
    logits[1, 100] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN below 0
    logits[2, 70], logits[2, 250] = -0.0, 0.0
    logits[3, 250], logits[3, 251] = 0.0, -0.0
    assert sampling.argmax(logits.to(device)).tolist() == [-1, -1, 70, 250]
    margins = torch.empty(4, device=device)
    assert sampling.argmax(logits.to(device), margins).tolist() == [-1, -1, 70, 250]
    assert torch.equal(margins.cpu(), best_two(logits)[1])


# --- the same tokens as the twin ------------------------------------------------------------------

HOW = [
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.99, "min_p": 0.05},
    {"top_k": 150, "min_p": 0.01},
    {"top_k": 7, "top_p": 0.3},
    {"top_k": 10**6},
    {},
]


@pytest.mark.parametrize(
    ("size", "step", "dtype"),
    [(9001, 0.0, torch.float32), (9001, 0.0, torch.bfloat16), (1000, 0.5, torch.bfloat16)],
)
def test_tokens_match_torch_twin(device, generator, dtype, size, step) -> None:
    """Rows of all kinds, greedy ones among them; with `step`, logits that tie a lot."""
    count = len(HOW) + 1
    wide = torch.randn(count, size + 15, generator=generator).mul_(3)
    wide = (wide / step).round() * step if step else wide
    logits = wide.to(device, dtype)[:, :size]
    rows = rows_of(
        device,
        count,
        temperature=[0.7, 1.0, 1.3, 0.4, 1.0, 2.0, 0.9, 0.6, 0.0],
        top_k=[how.get("top_k", 0) for how in HOW] + [5],
        top_p=[how.get("top_p", 1.0) for how in HOW] + [0.5],
        min_p=[how.get("min_p", 0.0) for how in HOW] + [0.0],
    )
    tokens = sample(logits, rows)
    agree(tokens, logits, rows)
    assert tokens[-1] == logits[-1].argmax()
    alone = RowParams(*[column[1:2] for column in rows])
    assert sample(logits[1:2], alone) == tokens[1], "a row does not depend on its batch"


@pytest.mark.parametrize(
    ("scale", "temperature"), [(0.01, 1.0), (30.0, 1e-30), (30.0, 1e4), (1e30, 1e30)]
)
def test_any_range_of_logits(device, generator, scale, temperature) -> None:
    logits = torch.randn(4, 300, generator=generator).mul_(scale).to(device)
    rows = rows_of(
        device, 4, temperature=temperature, top_k=[0, 5, 0, 40], top_p=[0.9, 1.0, 1.0, 0.6]
    )
    agree(sample(logits, rows), logits, rows)


def test_the_noise_is_the_samplers(device) -> None:
    """Of equal tokens, the one with the most; at keys of any sign and positions of any size."""
    count, size = 24, 4096
    rows = rows_of(device, count)
    rows.key[0], rows.position[0] = 0, 0
    rows.key[1], rows.position[1] = -(2**63), 2**62
    rows.key[2], rows.position[2] = 2**63 - 1, 2**40
    tokens = sample(torch.full((count, size), 2.5, device=device), rows)
    noise = gumbel(rows.key.cpu(), rows.position.cpu(), size)
    assert tokens.tolist() == noise.argmax(-1).tolist()


@pytest.fixture(params=[(16, 128), (16, 1), (256, 1)], ids=["block", "blocks", "large"])
def parts(request, monkeypatch) -> None:
    """Races of 40 parts of a block, of 5 parts of several, the last not full, and of one part."""
    monkeypatch.setattr(gumbel_argmax, "BLOCK", request.param[0])
    monkeypatch.setattr(gumbel_argmax, "MANY_ROWS", request.param[1])


@pytest.mark.usefixtures("parts")
def test_any_part_may_win(device) -> None:
    """A row for each token that is far above the others, and one where all blocks but the last are
    empty; greedy rows lie between."""
    places = [0, 15, 16, 127, 128, 500, 623, 624, 630]
    count = 2 * len(places)
    logits = torch.full((count + 2, 631), -9.0)
    logits[torch.arange(count), torch.tensor(places).repeat_interleave(2)] = 90.0
    logits[count, :630] = -INF
    logits[count + 1] = torch.arange(631) / 100
    rows = rows_of(
        device,
        count + 2,
        temperature=[1.0, 0.0] * (count // 2 + 1),
        top_p=[1.0, 1.0, 0.9, 0.9] * (count // 4) + [1.0, 1.0] * (count % 4 // 2 + 1),
        min_p=[0.0] * count + [0.1, 0.0],
    )
    wanted = [place for place in places for _ in range(2)]
    assert sample(logits.to(device), rows).tolist() == [*wanted, 630, 630]
    agree(sample(logits.to(device), rows), logits, rows)


@pytest.mark.usefixtures("parts")
def test_of_equal_scores_the_first_token_wins(device) -> None:
    """Two tokens of the same noise, of other blocks, and nothing else."""
    size, positions = 631, torch.arange(8192)
    keys = torch.zeros_like(positions)
    found: list[tuple[int, int, int]] = []
    noise = gumbel(keys, positions, size)
    # Below -0.5 uniforms are coarser than noise, so that equal noise comes from equal uniforms.
    least = noise.sort(-1)
    for row, at in (least.values[:, 1:] == least.values[:, :-1]).nonzero().tolist():
        one, other = sorted(least.indices[row, at : at + 2].tolist())
        if one // 16 != other // 16 and noise[row, one] < -0.5:
            found.append((row, one, other))
    assert len(found) >= 8
    assert any(one // 128 != other // 128 for _, one, other in found)
    logits = torch.full((len(found), size), -INF)
    for i, pair in enumerate(found):
        logits[i, list(pair[1:])] = 3.0
    rows = rows_of(device, len(found))
    rows.key.zero_()
    rows.position[:] = torch.tensor([row for row, _, _ in found])
    assert sample(logits.to(device), rows).tolist() == [one for _, one, _ in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
def test_a_real_vocabulary(device, generator, spread, dtype) -> None:
    logits = torch.randn(5, REAL, generator=generator).mul_(spread).to(device, dtype)
    rows = rows_of(
        device,
        5,
        temperature=[1.0, 0.7, 1.0, 1.5, 0.0],
        top_k=[0, 20, 0, 0, 0],
        top_p=[1.0, 0.95, 0.9, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.02, 0.0],
    )
    agree(sample(logits, rows), logits, rows)


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({}, [0.1, 0.2, 0.05, 0.4, 0.25]),
        ({"top_k": 4, "top_p": 0.8}, [0, 0.2, 0, 0.4, 0.25]),
    ],
)
def test_frequencies(device, how, share) -> None:
    """Chi-square with a fixed seed: a right sampler fails one seed in a thousand."""
    scipy = pytest.importorskip("scipy.stats")
    count = 20000 if device.type == "cuda" else 60 if not how else 24
    logits = torch.tensor([0.1, 0.2, 0.05, 0.4, 0.25]).log().to(device)
    tokens = sample(logits.repeat(count, 1), rows_of(device, count, **how))
    seen = torch.bincount(tokens.cpu(), minlength=5).double()
    want = torch.tensor(share, dtype=torch.float64)
    assert (seen[want == 0] == 0).all()
    want = want[want > 0] / want.sum() * count
    assert scipy.chisquare(seen[torch.tensor(share) > 0], want).pvalue > 1e-3


# --- which tokens are kept ------------------------------------------------------------------------

LADDER = [5.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0]
"""Masses at temperature 1, of 1: 0.433, three times 0.159, 0.059, 0.022, 0.008."""

KEPT = [
    ({"top_k": 1}, 1),
    ({"top_k": 2}, 4),  # ties at the edge stay
    ({"top_k": 4}, 4),
    ({"top_k": 5}, 5),
    ({"top_k": 300}, 7),
    ({"top_p": 0.0}, 1),
    ({"top_p": 1e-6}, 1),
    ({"top_p": 0.43}, 1),
    ({"top_p": 0.44}, 4),
    ({"top_p": 0.90}, 4),
    ({"top_p": 0.92}, 5),
    ({"top_p": 0.999}, 7),
    ({"min_p": 1.0}, 1),
    ({"min_p": 0.36}, 4),  # exp(-1) is 0.368
    ({"min_p": 0.38}, 1),
    # The two of top-k have 0.592, of which the first is 0.731, though 0.476 of the four kept.
    ({"top_k": 2, "top_p": 0.73}, 1),
    ({"top_k": 2, "top_p": 0.74}, 4),
    ({"top_k": 6, "top_p": 0.9, "min_p": 0.1}, 4),
    ({"top_k": 3, "top_p": 0.999, "min_p": 0.36}, 4),
    ({"top_p": 0.44, "temperature": 1e-30}, 1),
    ({"top_p": 0.999, "temperature": 1e-30}, 1),
    ({"top_p": 0.43, "temperature": 1e4}, 300),  # the tokens left tie, so all of them
]


def check_kept(
    device: torch.device, logits: Tensor, cases: list[tuple[dict[str, float], int]], size: int
) -> None:
    """Each case says which token is one of the least that it keeps. Where the noise lets one of
    these win the race of all, it is sampled; where it lets a lesser one win, none lesser is. size:
    tokens that have a chance."""
    x, behind = logits.float(), 0
    positions = torch.arange(1 << 12)
    noise = gumbel(torch.zeros_like(positions), positions, size)
    chosen: list[list[int]] = [[], []]
    for how, least in cases:
        scores = (x[:size] - x.max()) / how.get("temperature", 1.0) + noise
        won = x[scores.argmax(1)]
        chosen[0].append(int(positions[won == x[least]][0]))
        lesser = positions[won < x[least]]
        behind += len(lesser) > 0
        chosen[1].append(int(lesser[0]) if len(lesser) else chosen[0][-1])
    assert behind > len(cases) / 2
    values = {name: [how.get(name, off) for how, _ in cases] for name, off in OFF.items()}
    rows = rows_of(device, len(cases), **values)
    rows.key.zero_()
    wanted = [x[least].item() for _, least in cases]
    for at_least, where in enumerate(chosen):
        rows.position[:] = torch.tensor(where)
        tokens = sample(logits.to(device).repeat(len(cases), 1), rows).cpu()
        for found, least in zip(x[tokens].tolist(), wanted, strict=True):
            assert found >= least if at_least else found == least


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_number_of_kept_tokens(device, dtype) -> None:
    logits = torch.full((300,), -60.0)
    logits[: len(LADDER)] = torch.tensor(LADDER)
    check_kept(device, logits.to(dtype), [(how, kept - 1) for how, kept in KEPT], 300)


def test_close_logits(device) -> None:
    """Masses, of 1: 0.405, 0.149, 0.149, 0.149, 0.149; each edge lies between two of them."""
    logits = torch.full((300,), -60.0)
    logits[:5] = torch.tensor([5.0, 4.0, 3.999, 3.998, 3.997])
    cases = [({"top_p": p}, n) for n, p in enumerate([0.40, 0.42, 0.56, 0.71, 0.86])]
    check_kept(device, logits, cases, 300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_within_a_lane(device, dtype) -> None:
    """The best tokens share a lane of the kernel, whose maximum says nothing of the others."""
    logits = torch.full((40000,), -60.0)
    logits[2000:2040] = 1.0
    logits[:1280:256] = torch.tensor([9.0, 8.0, 8.0, 6.0, 5.0])
    least = [0, 512, 512, 768, 1024, 2039]
    check_kept(device, logits.to(dtype), [({"top_k": k}, i) for k, i in enumerate(least, 1)], 2048)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_stay_together(device, dtype) -> None:
    logits = torch.full((8, 300), -0.75, dtype=dtype, device=device)
    rows = rows_of(device, 8, top_k=3, top_p=0.5, min_p=1.0)
    noise = gumbel(rows.key.cpu(), rows.position.cpu(), 300)
    assert sample(logits, rows).tolist() == noise.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_banned_tokens(device, dtype) -> None:
    """-inf is never sampled, and top-k may ask for more than there is."""
    logits = torch.full((5, 600), -INF, dtype=dtype, device=device)
    logits[:4, 417] = -3.0
    logits[3, 11] = 2.0
    logits[4, [3, 4]] = torch.finfo(dtype).min
    rows = rows_of(device, 5, top_k=[0, 2, 0, 50, 3], top_p=[1.0, 0.9, 0.3, 0.99, 0.9])
    tokens = sample(logits, rows).tolist()
    assert tokens[:3] == [417] * 3
    assert tokens[3] in (11, 417)
    assert tokens[4] in (3, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_weights_give_a_token(device, temperature) -> None:
    """Their first maximum; with a NaN they give none."""
    logits = torch.zeros(4, 300)
    logits[0, 7] = math.nan
    logits[1] = -INF
    logits[2, 9] = INF
    logits[3] = math.nan
    rows = rows_of(device, 4, temperature=temperature, top_k=[0, 5, 0, 1], top_p=[0.9, 1, 0.5, 1])
    assert sample(logits.to(device), rows).tolist() == [-1, 0, 9, -1]
