"""Filters and the Gumbel race against plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from strobe.sampling import sampler
from strobe.sampling.noise import noise_key
from strobe.sampling.sampler import RowParams, argmax, sample_rows
from tests.support.reference_sampling import (
    distribution,
    exponential,
    kept,
    params,
    row_word,
    softmax,
)

COUNT = 40_000

LOGITS = st.lists(
    st.sampled_from([-30.0, -3.0, -1.0, 0.0, 0.25, 1.0, 2.0, 9.0]), min_size=1, max_size=9
)
SPREAD = st.lists(st.integers(-20_000, 20_000).map(lambda n: n / 1000), min_size=1, max_size=9)
"""Multiples of 0.001, so that fp32 and fp64 agree on which of two logits is larger."""

TEMPERATURES = st.sampled_from([1e-6, 0.1, 0.7, 1.0, 3.0, 100.0])
TOP_K = st.sampled_from([0, 1, 2, 3, 5, 100])
TOP_P = st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
MIN_P = st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0])


def weights_of(logits: list[float], **fields: float) -> list[float]:
    scale = 1 / max(fields.pop("temperature", 1.0), 1e-30)
    weights = ((torch.tensor([logits]) - max(logits)) * scale).exp()
    return (weights * sampler.filter_mask(weights, params(1, **fields)))[0].tolist()


@settings(max_examples=600)
@given(st.one_of(LOGITS, SPREAD), TEMPERATURES, TOP_K, TOP_P, MIN_P)
def test_kept_tokens_match_plain_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
):
    weights = weights_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = softmax(logits, temperature)
    actual = {i for i, w in enumerate(weights) if w > 0}
    upper = kept(probs, top_k, top_p, min_p, slack=1e-5)
    lower = {i for i in kept(probs, top_k, top_p, min_p, slack=-1e-5) if probs[i] > 1e-36}
    assert lower <= actual <= upper
    assert logits.index(max(logits)) in actual
    total = sum(weights)
    for i in actual:
        share = probs[i] / sum(probs[j] for j in actual)
        assert math.isclose(weights[i] / total, share, rel_tol=1e-4, abs_tol=1e-30)


def test_nucleus_ends_exactly_at_full_mass():
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert weights_of(logits, top_p=0.5)[1:] == [0, 0, 0]
    assert weights_of(logits, top_p=0.51)[2:] == [0, 0]


def test_top_p_mass_is_within_top_k():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert weights_of(logits, top_k=2, top_p=0.56)[1:] == [0, 0, 0]
    assert weights_of(logits, top_p=0.56)[2:] == [0, 0]
    assert weights_of(logits, top_p=0.56)[1] > 0


@settings(max_examples=400)
@given(st.one_of(LOGITS, SPREAD), TEMPERATURES, TOP_P, MIN_P)
def test_passing_filters_implies_kept(
    logits: list[float], temperature: float, top_p: float, min_p: float
):
    scores = (torch.tensor(logits) - max(logits)) * (1 / temperature)
    rows = params(len(logits), top_p=top_p, min_p=min_p)
    sure = sampler._passes_filters(
        scores.repeat(len(logits), 1).numpy(),
        scores.numpy(),
        rows,
        np.arange(len(logits)),
    )
    in_mask = sampler.filter_mask(scores.exp()[None], params(1, top_p=top_p, min_p=min_p))[0]
    assert not (torch.from_numpy(sure) & ~in_mask).any()
    if (scores > -0.01).sum() == 1 and top_p > 0.01 and min_p < 1:
        assert sure[scores.argmax()]


def test_ties_at_the_edge_stay_together():
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    for filters in ({"top_k": 1}, {"top_k": 2}, {"top_p": 1e-9}, {"min_p": 1.0}):
        weights = weights_of(logits, **filters)
        assert [w > 0 for w in weights] == [False, True, True, True, False], filters


def test_disabled_filters_change_nothing_in_mixed_batch():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    mixed = params(64, temperature=0.9, top_k=[0, 3] * 32, top_p=[1.0, 0.5] * 32)
    alone = sample_rows(logits, params(64, temperature=0.9), filtered=False)
    assert torch.equal(sample_rows(logits, mixed)[::2], alone[::2])
    assert sampler.filter_mask((logits - 9).exp(), mixed)[::2].all()


@settings(max_examples=400)
@given(SPREAD, TEMPERATURES, TOP_K, TOP_P, MIN_P, st.integers(0, 2**32), st.integers(0, 5000))
def test_sampled_token_wins_gumbel_race(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
):
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    token = sample_rows(
        torch.tensor([logits]), params(1, seeds=[seed], positions=position, **fields)
    ).item()
    weights = weights_of(logits, **fields)
    assert weights[token] > 0
    word = row_word(noise_key(seed, 0) % 2**64, position)
    top = max(logits)
    scores = [
        (x - top) / temperature - math.log(exponential(word, i)) if weights[i] > 0 else -math.inf
        for i, x in enumerate(logits)
    ]
    assert scores[token] > max(scores) - 1e-4 / temperature - 1e-5


def test_row_gets_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 30, generator=generator) * 4
    all_rows = params(
        40,
        temperature=[0.0, 0.5, 1.0, 2.0] * 10,
        top_k=[0, 3, 7, 1, 0] * 8,
        top_p=[1.0, 0.3, 0.9, 0.99] * 10,
        min_p=[0.0, 0.2] * 20,
        positions=range(40),
    )
    together = sample_rows(logits, all_rows)
    order = torch.randperm(40, generator=generator)

    def select(index: Tensor) -> RowParams:
        return RowParams(*[column[index] for column in all_rows])

    assert torch.equal(sample_rows(logits[order], select(order)), together[order])
    for i in range(40):
        row = torch.tensor([i])
        assert sample_rows(logits[row], select(row)).item() == together[i]


def test_greedy_rows_take_first_maximum_in_mixed_batch():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]]).repeat(200, 1)
    tokens = sample_rows(logits, params(200, temperature=[0.0, 1.0] * 100))
    assert tokens[::2].tolist() == [1] * 100
    assert set(tokens[1::2].tolist()) >= {1, 2}
    assert argmax(logits).tolist() == [1] * 200


def test_greedy_and_sampled_rows_are_independent():
    logits = torch.randn(100, 20, generator=torch.Generator().manual_seed(2))
    mixed = sample_rows(logits, params(100, temperature=[0.0, 1.0] * 50))
    assert torch.equal(mixed[::2], logits.argmax(-1)[::2])
    assert torch.equal(mixed[1::2], sample_rows(logits, params(100))[1::2])


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 100.0])
def test_banned_tokens_are_never_sampled(temperature: float):
    logits = torch.tensor([[3.0, -math.inf, 1.0, 2.0, -math.inf]]).repeat(20_000, 1)
    tokens = sample_rows(logits, params(20_000, temperature=temperature, top_k=3))
    counts = torch.bincount(tokens, minlength=5).tolist()
    assert counts[1] == counts[4] == 0
    if temperature < 1:
        assert counts[0] == 20_000
        return
    expected = distribution([3.0, 1.0, 2.0], temperature)
    assert stats.chisquare([counts[0], *counts[2:4]], [p * 20_000 for p in expected]).pvalue > 0.001


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [1e-6, 1e-40])
def test_near_zero_temperature_is_greedy(temperature: float):
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(3)) * 3
    logits[:, 3], logits[:, 5] = -math.inf, -3e38
    logits[0] *= 1e37
    for top_p in (1.0, 0.9):
        rows = params(500, temperature=temperature, top_p=top_p)
        assert torch.equal(sample_rows(logits, rows), logits.argmax(-1))


def test_high_temperature_is_flat_without_overflow():
    logits = [-80.0, 0.0, 40.0, 80.0]
    tokens = sample_rows(torch.tensor([logits]).repeat(COUNT, 1), params(COUNT, temperature=100.0))
    expected = [p * COUNT for p in distribution(logits, 100.0)]
    assert stats.chisquare(torch.bincount(tokens, minlength=4).numpy(), expected).pvalue > 0.001


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_adding_a_constant_to_all_logits_changes_no_draw(shift: float):
    logits = torch.tensor([[0.0, 1.0, 2.0, 4.0]], dtype=torch.float64).repeat(1000, 1)
    moved = (logits + shift).float()
    assert torch.equal(sample_rows(moved, params(1000)), sample_rows(logits.float(), params(1000)))


def test_half_precision_logits_are_sampled_in_single_precision():
    logits = torch.randn(300, 20, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    assert torch.equal(sample_rows(logits, params(300)), sample_rows(logits.float(), params(300)))
    assert torch.equal(argmax(logits), logits.float().argmax(-1))


def test_no_rows_give_no_tokens():
    nothing = torch.zeros(0, 7)
    assert argmax(nothing).shape == (0,)
    assert sample_rows(nothing, params(0)).shape == (0,)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_degenerate_row_gives_its_first_maximum_or_no_token(filters: dict, temperature: float):
    out, nan = -math.inf, math.nan
    logits = torch.tensor(
        [[out] * 3, [nan] * 3, [1.0, out, 3.0], [0.0, math.inf, math.inf], [0.0, 1.0, nan]]
    )
    for filtered in (True, bool(filters)):
        tokens = sample_rows(
            logits, params(5, temperature=temperature, **filters), filtered=filtered
        )
        assert [tokens[i].item() for i in (0, 1, 3, 4)] == [0, -1, 1, -1]
        assert tokens[2] in (0, 2)


REAL = 151_936


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"temperature": 0.7}, marks=pytest.mark.full),
        pytest.param({"top_k": 6}, marks=pytest.mark.full),
        {"top_p": 0.8},
        pytest.param({"min_p": 0.02}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_frequencies_with_a_real_vocabulary(fields: dict):
    """A peaked distribution; the tail counts as one cell."""
    count, generator = 2_000, torch.Generator().manual_seed(6)
    row = torch.randn(REAL, generator=generator)
    peaks = torch.randperm(REAL, generator=generator)[:12]
    row[peaks] = torch.linspace(14.0, 9.0, 12)
    rows = params(count, seeds=[1] * count, positions=range(count), **fields)
    tokens = torch.cat(
        [
            sample_rows(row.repeat(100, 1), RowParams(*[c[i : i + 100] for c in rows]))
            for i in range(0, count, 100)
        ]
    )
    temperature = fields.get("temperature", 1.0)
    probs = (row.double() / temperature).softmax(0)
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | fields
    filters.pop("temperature", None)
    ids = kept(probs.tolist(), **filters)
    inside = torch.zeros(REAL, dtype=torch.float64)
    inside[list(ids)] = probs[list(ids)]
    cell_probs = [inside[i].item() for i in peaks]
    cell_probs.append(inside.sum().item() - sum(cell_probs))
    seen = [int((tokens == i).sum()) for i in peaks]
    seen.append(count - sum(seen))
    total, pairs = sum(cell_probs), list(zip(seen, cell_probs, strict=True))
    assert all(n == 0 for n, p in pairs if p < 1e-12)
    cells = [(n, p / total * count) for n, p in pairs if p >= 1e-12]
    assert stats.chisquare(*zip(*cells, strict=True)).pvalue > 0.001


def test_torch_implementation_samples_the_same(monkeypatch: pytest.MonkeyPatch):
    """The form for a GPU without triton: no NumPy, and no wait for the device."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(60, 300, generator=generator) * 3
    logits[5], logits[6, 3], logits[7, 4] = -math.inf, math.nan, math.inf
    rows = params(
        60,
        temperature=[0.0, 0.5, 1.0] * 20,
        top_k=[0, 3, 7, 1, 0] * 12,
        top_p=[1.0, 0.3, 0.9, 0.99] * 15,
        min_p=[0.0, 0.2] * 30,
        positions=range(60),
    )
    for filtered in (True, False):
        expected = sample_rows(logits, rows, filtered=filtered)
        assert torch.equal(sampler.sample_rows_torch(logits, rows, filtered), expected)
