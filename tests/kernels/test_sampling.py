"""The sampling kernels against `strobe.sampling.sampler`, and their edges by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from strobe.kernels import sampling
from strobe.sampling import sampler
from strobe.sampling.noise import uniforms
from strobe.sampling.sampler import SamplingRows

# The interpreter's 64-bit products wrap, as the noise needs, but not in silence.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

DTYPES = [torch.float32, torch.bfloat16]
INF = math.inf
OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
COLUMNS = ("temperature", "top_p", "min_p", "top_k", "key", "position")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def rows_of(
    device: torch.device, count: int, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0
) -> SamplingRows:
    """`count` rows; each value is one for all of them or a list."""

    def column(value: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype).expand(count).contiguous().to(device)

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        top_k=column(top_k, torch.int64),
        key=torch.arange(count, device=device) * -0x61C8864680B583EB,
        position=torch.arange(count, device=device) * 3 + 5,
        filtered=True,
    )


def draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    return sampling.sample_rows(
        logits, rows.temperature, rows.top_p, rows.min_p, rows.top_k, rows.key, rows.position
    )


def agree(drawn: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """The draws are torch's, but for a uniform that rounding puts on either side of a boundary:
    within 1e-6 of the mass (measured 1.2e-8, one row of 100)."""
    want = sampler.sample(logits, rows)
    reached = sampler.distribution(logits.float(), rows).cumsum(-1, dtype=torch.float64)
    share = uniforms(rows.key, rows.position)
    for row in (drawn != want).nonzero()[:, 0].tolist():
        assert rows.temperature[row] > 0
        first, last = sorted((int(drawn[row]), int(want[row])))
        between = reached[row, first:last] / reached[row, -1]
        assert (between - share[row]).abs().max() < 1e-6, f"row {row}: {drawn[row]}, {want[row]}"


# --- argmax ---------------------------------------------------------------------------------------


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


def test_argmax_of_what_is_no_number(device, monkeypatch) -> None:
    """A NaN is the maximum, of either sign and above inf; both zeros are equal."""
    monkeypatch.setattr(sampling, "ARGMAX_BLOCK", 64)
    logits = torch.full((4, 300), -1.0)
    logits[0, 5], logits[0, 200], logits[0, 290] = INF, math.nan, math.nan
    logits[1, 100] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN below 0
    logits[2, 70], logits[2, 250] = -0.0, 0.0
    logits[3, 250], logits[3, 251] = 0.0, -0.0
    assert sampling.argmax(logits.to(device)).tolist() == [200, 100, 70, 250]


# --- the same draws as torch ----------------------------------------------------------------------

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
def test_draws_are_those_of_torch(device, generator, dtype, size, step) -> None:
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
    drawn = draw(logits, rows)
    agree(drawn, logits, rows)
    assert drawn[-1] == logits[-1].argmax()
    alone = dataclasses.replace(rows, **{n: getattr(rows, n)[1:2] for n in COLUMNS})
    assert draw(logits[1:2], alone) == drawn[1], "a row does not depend on its batch"


@pytest.mark.parametrize(
    ("scale", "temperature"), [(0.01, 1.0), (30.0, 1e-30), (30.0, 1e4), (1e30, 1e30)]
)
def test_any_range_of_logits(device, generator, scale, temperature) -> None:
    logits = torch.randn(4, 300, generator=generator).mul_(scale).to(device)
    rows = rows_of(
        device, 4, temperature=temperature, top_k=[0, 5, 0, 40], top_p=[0.9, 1.0, 1.0, 0.6]
    )
    agree(draw(logits, rows), logits, rows)


def test_the_noise_is_the_samplers(device) -> None:
    """Of n equal tokens, the one at floor(n u)."""
    count, size = 24, 4096
    rows = rows_of(device, count)
    rows.key[0], rows.position[0] = 0, 0
    rows.key[1], rows.position[1] = -(2**63), 2**62
    rows.key[2], rows.position[2] = 2**63 - 1, 2**40
    drawn = draw(torch.full((count, size), 2.5, device=device), rows)
    u = uniforms(rows.key.cpu(), rows.position.cpu())
    assert drawn.tolist() == (u * size).long().tolist()


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
    drawn = draw(logits.repeat(count, 1), rows_of(device, count, **how))
    seen = torch.bincount(drawn.cpu(), minlength=5).double()
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


def greatest_uniform() -> tuple[float, int]:
    """The greatest of key 0 below position 2^20, which draws the last token that is kept."""
    u = uniforms(torch.zeros(1 << 20, dtype=torch.int64), torch.arange(1 << 20))
    return u.max().item(), int(u.argmax())


def last_drawn(logits: Tensor, cases: list[tuple[dict[str, float], int]]) -> list[int]:
    """The last token of the row that can be drawn, by case. Logits that fall with the token make
    it tell how many are kept."""
    values = {name: [how.get(name, off) for how, _ in cases] for name, off in OFF.items()}
    rows = rows_of(logits.device, len(cases), **values)
    rows.key.zero_()
    share, rows.position[:] = greatest_uniform()
    assert share > 1 - 1e-5
    return draw(logits.repeat(len(cases), 1), rows).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_how_many_are_kept(device, dtype) -> None:
    logits = torch.full((300,), -60.0)
    logits[: len(LADDER)] = torch.tensor(LADDER)
    last = last_drawn(logits.to(device, dtype), KEPT)
    assert [token + 1 for token in last] == [kept for _, kept in KEPT]


def test_close_logits(device) -> None:
    """Masses, of 1: 0.405, 0.149, 0.149, 0.149, 0.149; each edge lies between two of them."""
    logits = torch.full((300,), -60.0)
    logits[:5] = torch.tensor([5.0, 4.0, 3.999, 3.998, 3.997])
    cases = [({"top_p": p}, n) for n, p in enumerate([0.40, 0.42, 0.56, 0.71, 0.86], 1)]
    assert [token + 1 for token in last_drawn(logits.to(device), cases)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_within_a_lane(device, dtype) -> None:
    """The best tokens share a lane of the kernel, whose maximum says nothing of the others."""
    logits = torch.full((40000,), -60.0)
    logits[2000:2040] = 1.0
    logits[:1280:256] = torch.tensor([9.0, 8.0, 8.0, 6.0, 5.0])
    cases: list[tuple[dict[str, float], int]] = [({"top_k": k}, k) for k in range(1, 7)]
    assert last_drawn(logits.to(device, dtype), cases) == [0, 512, 512, 768, 1024, 2039]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_stay_together(device, dtype) -> None:
    logits = torch.full((8, 300), -0.75, dtype=dtype, device=device)
    rows = rows_of(device, 8, top_k=3, top_p=0.5, min_p=1.0)
    want = (uniforms(rows.key, rows.position) * 300).long()
    assert draw(logits, rows).tolist() == want.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_banned_tokens(device, dtype) -> None:
    """-inf is never drawn, and top-k may ask for more than there is."""
    logits = torch.full((5, 600), -INF, dtype=dtype, device=device)
    logits[:4, 417] = -3.0
    logits[3, 11] = 2.0
    logits[4, [3, 4]] = torch.finfo(dtype).min
    rows = rows_of(device, 5, top_k=[0, 2, 0, 50, 3], top_p=[1.0, 0.9, 0.3, 0.99, 0.9])
    drawn = draw(logits, rows).tolist()
    assert drawn[:3] == [417] * 3
    assert drawn[3] in (11, 417)
    assert drawn[4] in (3, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_weights_give_a_token(device, temperature) -> None:
    """Their first maximum, a NaN above all."""
    logits = torch.zeros(4, 300)
    logits[0, 7] = math.nan
    logits[1] = -INF
    logits[2, 9] = INF
    logits[3] = math.nan
    rows = rows_of(device, 4, temperature=temperature, top_k=[0, 5, 0, 1], top_p=[0.9, 1, 0.5, 1])
    assert draw(logits.to(device), rows).tolist() == [7, 0, 9, 0]
