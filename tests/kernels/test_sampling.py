"""The sampling kernels against `strobe.sampling.sampler`, and edge cases."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strobe.kernels import gumbel_argmax, sampling
from strobe.sampling.noise import gumbel
from strobe.sampling.sampler import RowParams, best_two, sample_rows
from strobe.sampling_params import OPTIONS
from tests.support.full_marks import full_where
from tests.support.reference_sampling import params

# Integer products wrap, as the noise requires, but the interpreter's NumPy warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

DTYPES = [torch.float32, torch.bfloat16]
SHORT_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]
"""For tests that `make test` runs in one dtype."""
INF = math.inf
OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
REAL_VOCAB = 151_936


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def rows_of(device: torch.device, count: int, **values: float | list[float]) -> RowParams:
    """Return the parameters of `count` rows; each value is a list, or one value for all rows."""
    rows = params(count, **values)._replace(
        key=torch.arange(count) * -0x61C8864680B583EB, position=torch.arange(count) * 3 + 5
    )
    return RowParams(*[column.to(device) for column in rows])


def sample(logits: Tensor, rows: RowParams) -> Tensor:
    return sampling.sample_rows(logits, rows)


def check_twin(tokens: Tensor, logits: Tensor, rows: RowParams) -> None:
    """Assert that the torch twin samples the same tokens; compiled logarithms may flip one in a
    million."""
    expected = sample_rows(logits.cpu(), RowParams(*[column.cpu() for column in rows]))
    assert tokens.tolist() == expected.tolist()


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
    """Rows with a NaN of either sign give no token, even with an inf; zeros of both signs tie."""
    monkeypatch.setattr(sampling, "ARGMAX_BLOCK", 64)
    logits = torch.full((4, 300), -1.0)
    logits[0, 5], logits[0, 200], logits[0, 290] = INF, math.nan, math.nan
    logits[1, 100] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a negative NaN
    logits[2, 70], logits[2, 250] = -0.0, 0.0
    logits[3, 250], logits[3, 251] = 0.0, -0.0
    assert sampling.argmax(logits.to(device)).tolist() == [-1, -1, 70, 250]
    margins = torch.empty(4, device=device)
    assert sampling.argmax(logits.to(device), margins).tolist() == [-1, -1, 70, 250]
    assert torch.equal(margins.cpu(), best_two(logits)[1])


# --- the same tokens as the twin ------------------------------------------------------------------

SETTINGS = [
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 0.4, "top_p": 0.99, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 150, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.3},
    {"temperature": 0.9, "top_k": 10**6},
    {"temperature": 0.6},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5},
]


@pytest.mark.parametrize(
    ("size", "step", "dtype"),
    [(9001, 0.0, torch.float32), (9001, 0.0, torch.bfloat16), (1000, 0.5, torch.bfloat16)],
)
def test_tokens_match_torch_twin(device, generator, dtype, size, step) -> None:
    """Sampled rows of all kinds and a greedy one; logits rounded to `step` have many ties."""
    count = len(SETTINGS)
    wide = torch.randn(count, size + 15, generator=generator).mul_(3)
    wide = (wide / step).round() * step if step else wide
    logits = wide.to(device, dtype)[:, :size]
    values = {
        option.name: [setting.get(option.name, option.default) for setting in SETTINGS]
        for option in OPTIONS
        if option.facts.column is not None
    }
    rows = rows_of(device, count, **values)
    tokens = sample(logits, rows)
    check_twin(tokens, logits, rows)
    assert tokens[-1] == logits[-1].argmax()
    single = RowParams(*[column[1:2] for column in rows])
    assert sample(logits[1:2], single) == tokens[1], "a row depends on its batch"


@pytest.mark.parametrize(
    ("scale", "temperature"), [(0.01, 1.0), (30.0, 1e-30), (30.0, 1e4), (1e30, 1e30)]
)
def test_extreme_logits_and_temperatures(device, generator, scale, temperature) -> None:
    logits = torch.randn(4, 300, generator=generator).mul_(scale).to(device)
    rows = rows_of(
        device, 4, temperature=temperature, top_k=[0, 5, 0, 40], top_p=[0.9, 1.0, 1.0, 0.6]
    )
    check_twin(sample(logits, rows), logits, rows)


def test_noise_matches_torch_twin(device) -> None:
    """Equal logits leave the choice to the noise, for keys of any sign and large positions."""
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
    """Split rows into 40 parts of one block, 5 parts of several blocks, or one part."""
    monkeypatch.setattr(gumbel_argmax, "BLOCK", request.param[0])
    monkeypatch.setattr(gumbel_argmax, "MANY_ROWS", request.param[1])


@pytest.mark.usefixtures("parts")
def test_largest_logit_wins_in_any_part(device) -> None:
    """Sampled and greedy rows whose largest logit is at each of some places, and rows in which the
    last token wins."""
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
    expected = [place for place in places for _ in range(2)]
    assert sample(logits.to(device), rows).tolist() == [*expected, 630, 630]
    check_twin(sample(logits.to(device), rows), logits, rows)


@pytest.mark.usefixtures("parts")
def test_first_token_wins_ties_across_blocks(device) -> None:
    """Rows with two finite logits, equal and with equal noise, in different blocks."""
    size, positions = 631, torch.arange(8192)
    keys = torch.zeros_like(positions)
    ties: list[tuple[int, int, int]] = []
    noise = gumbel(keys, positions, size)
    # Below -0.5 uniforms are coarser than noise, so that equal noise comes from equal uniforms.
    ascending = noise.sort(-1)
    for row, at in (ascending.values[:, 1:] == ascending.values[:, :-1]).nonzero().tolist():
        first, second = sorted(ascending.indices[row, at : at + 2].tolist())
        if first // 16 != second // 16 and noise[row, first] < -0.5:
            ties.append((row, first, second))
    assert len(ties) >= 8
    assert any(first // 128 != second // 128 for _, first, second in ties)
    logits = torch.full((len(ties), size), -INF)
    for i, tie in enumerate(ties):
        logits[i, list(tie[1:])] = 3.0
    rows = rows_of(device, len(ties))
    rows.key.zero_()
    rows.position[:] = torch.tensor([row for row, _, _ in ties])
    assert sample(logits.to(device), rows).tolist() == [first for _, first, _ in ties]


@full_where(lambda dtype, spread: (spread == 1.0) is (dtype is torch.bfloat16))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 4.0], ids=["flat", "peaked"])
def test_sampling_with_real_vocabulary_size(device, generator, spread, dtype) -> None:
    logits = torch.randn(5, REAL_VOCAB, generator=generator).mul_(spread).to(device, dtype)
    rows = rows_of(
        device,
        5,
        temperature=[1.0, 0.7, 1.0, 1.5, 0.0],
        top_k=[0, 20, 0, 0, 0],
        top_p=[1.0, 0.95, 0.9, 1.0, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.02, 0.0],
    )
    check_twin(sample(logits, rows), logits, rows)


@pytest.mark.parametrize(
    ("setting", "share"),
    [
        ({}, [0.1, 0.2, 0.05, 0.4, 0.25]),
        ({"top_k": 4, "top_p": 0.8}, [0, 0.2, 0, 0.4, 0.25]),
    ],
)
def test_frequencies_match_probabilities(device, setting, share) -> None:
    """Chi-square with a fixed seed: a correct sampler fails one seed in a thousand."""
    scipy = pytest.importorskip("scipy.stats")
    count = 20000 if device.type == "cuda" else 60 if not setting else 24
    logits = torch.tensor([0.1, 0.2, 0.05, 0.4, 0.25]).log().to(device)
    tokens = sample(logits.repeat(count, 1), rows_of(device, count, **setting))
    observed = torch.bincount(tokens.cpu(), minlength=5).double()
    expected = torch.tensor(share, dtype=torch.float64)
    assert (observed[expected == 0] == 0).all()
    expected = expected[expected > 0] / expected.sum() * count
    assert scipy.chisquare(observed[torch.tensor(share) > 0], expected).pvalue > 1e-3


# --- which tokens are kept ------------------------------------------------------------------------

LADDER = [5.0, 4.0, 4.0, 4.0, 3.0, 2.0, 1.0]
"""Probabilities at temperature 1: 0.433, three times 0.159, 0.059, 0.022, 0.008."""

NUM_KEPT = [
    ({"top_k": 1}, 1),
    ({"top_k": 2}, 4),  # ties at the threshold stay
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
    # The top 2 have 0.592, of which the first one is 0.731 (of the four with ties, 0.476).
    ({"top_k": 2, "top_p": 0.73}, 1),
    ({"top_k": 2, "top_p": 0.74}, 4),
    ({"top_k": 6, "top_p": 0.9, "min_p": 0.1}, 4),
    ({"top_k": 3, "top_p": 0.999, "min_p": 0.36}, 4),
    ({"top_p": 0.44, "temperature": 1e-30}, 1),
    ({"top_p": 0.999, "temperature": 1e-30}, 1),
    ({"top_p": 0.43, "temperature": 1e4}, 300),  # all other tokens tie at the threshold
]


def check_kept(
    device: torch.device, logits: Tensor, cases: list[tuple[dict[str, float], int]], size: int
) -> None:
    """Check the threshold of each case (setting, token), where the token has the smallest logit
    that the setting keeps. At a position where the noise lets this logit win among all tokens, it
    is sampled; where a smaller logit would win, none smaller is. size: tokens that can win."""
    x, num_below = logits.float(), 0
    positions = torch.arange(1 << 12)
    noise = gumbel(torch.zeros_like(positions), positions, size)
    at_threshold: list[int] = []
    below: list[int] = []
    for setting, last in cases:
        scores = (x[:size] - x.max()) / setting.get("temperature", 1.0) + noise
        winners = x[scores.argmax(1)]
        at_threshold.append(int(positions[winners == x[last]][0]))
        smaller = positions[winners < x[last]]
        num_below += len(smaller) > 0
        below.append(int(smaller[0]) if len(smaller) else at_threshold[-1])
    assert num_below > len(cases) / 2
    values = {name: [setting.get(name, off) for setting, _ in cases] for name, off in OFF.items()}
    rows = rows_of(device, len(cases), **values)
    rows.key.zero_()
    thresholds = torch.tensor([x[last].item() for _, last in cases])
    for chosen in (at_threshold, below):
        rows.position[:] = torch.tensor(chosen)
        sampled = x[sample(logits.to(device).repeat(len(cases), 1), rows).cpu()]
        equal = chosen is at_threshold
        assert (sampled == thresholds if equal else sampled >= thresholds).all()


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)]
)
def test_number_of_kept_tokens(device, dtype) -> None:
    logits = torch.full((300,), -60.0)
    logits[: len(LADDER)] = torch.tensor(LADDER)
    check_kept(device, logits.to(dtype), [(setting, n - 1) for setting, n in NUM_KEPT], 300)


def test_top_p_separates_close_logits(device) -> None:
    """Probabilities 0.405, 0.149, 0.149, 0.149, 0.149; each threshold is between two logits."""
    logits = torch.full((300,), -60.0)
    logits[:5] = torch.tensor([5.0, 4.0, 3.999, 3.998, 3.997])
    cases = [({"top_p": p}, n) for n, p in enumerate([0.40, 0.42, 0.56, 0.71, 0.86])]
    check_kept(device, logits, cases, 300)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
def test_top_k_within_a_lane(device, dtype) -> None:
    """The top tokens share a lane of the kernel, which starts from the lanes' maxima."""
    logits = torch.full((40000,), -60.0)
    logits[2000:2040] = 1.0
    logits[:1280:256] = torch.tensor([9.0, 8.0, 8.0, 6.0, 5.0])
    last = [0, 512, 512, 768, 1024, 2039]
    check_kept(device, logits.to(dtype), [({"top_k": k}, i) for k, i in enumerate(last, 1)], 2048)


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
def test_filters_keep_ties(device, dtype) -> None:
    logits = torch.full((8, 300), -0.75, dtype=dtype, device=device)
    rows = rows_of(device, 8, top_k=3, top_p=0.5, min_p=1.0)
    noise = gumbel(rows.key.cpu(), rows.position.cpu(), 300)
    assert sample(logits, rows).tolist() == noise.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", SHORT_DTYPES)
def test_banned_tokens_are_never_sampled(device, dtype) -> None:
    """Tokens with -inf, also if top-k exceeds the number of other tokens."""
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
def test_rows_without_probabilities_take_first_argmax(device, temperature) -> None:
    """Rows with a NaN give -1."""
    logits = torch.zeros(4, 300)
    logits[0, 7] = math.nan
    logits[1] = -INF
    logits[2, 9] = INF
    logits[3] = math.nan
    rows = rows_of(device, 4, temperature=temperature, top_k=[0, 5, 0, 1], top_p=[0.9, 1, 0.5, 1])
    assert sample(logits.to(device), rows).tolist() == [-1, 0, 9, -1]
