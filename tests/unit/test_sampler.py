"""Filters, noise and draws against plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from slow_sampling import kept, law, rows, softmax, uniform

from strobe.sampling.noise import stream_key, uniforms
from strobe.sampling.rules import LogitEdits
from strobe.sampling.sampler import distribution, sample

LOGITS = st.lists(
    st.sampled_from([-30.0, -3.0, -1.0, 0.0, 0.25, 1.0, 2.0, 9.0]), min_size=1, max_size=9
)
SPREAD = st.lists(st.integers(-20_000, 20_000).map(lambda n: n / 1000), min_size=1, max_size=9)
"""Steps of 0.001, so that fp32 and fp64 agree on which of two logits is larger."""

TEMPERATURES = st.sampled_from([1e-6, 0.1, 0.7, 1.0, 3.0, 100.0])
TOP_K = st.sampled_from([0, 1, 2, 3, 5, 100])
TOP_P = st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
MIN_P = st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0])


def weights_of(logits: list[float], **how: float) -> list[float]:
    return distribution(torch.tensor([logits]), rows(1, **how))[0].tolist()


@settings(max_examples=600)
@given(st.one_of(LOGITS, SPREAD), TEMPERATURES, TOP_K, TOP_P, MIN_P)
def test_the_tokens_kept_are_those_of_the_plain_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
):
    weights = weights_of(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = softmax(logits, temperature)
    found = {i for i, w in enumerate(weights) if w > 0}
    most = kept(probs, top_k, top_p, min_p, slack=1e-5)
    least = {i for i in kept(probs, top_k, top_p, min_p, slack=-1e-5) if probs[i] > 1e-36}
    assert least <= found <= most
    assert logits.index(max(logits)) in found
    total = sum(weights)
    for i in found:
        share = probs[i] / sum(probs[j] for j in found)
        assert math.isclose(weights[i] / total, share, rel_tol=1e-4, abs_tol=1e-30)


def test_a_nucleus_that_is_full_exactly_at_a_token_stops_there():
    logits = [math.log(p) for p in (0.5, 0.25, 0.125, 0.125)]
    assert weights_of(logits, top_p=0.5)[1:] == [0, 0, 0]
    assert weights_of(logits, top_p=0.51)[2:] == [0, 0]


def test_top_p_counts_mass_within_what_top_k_left():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert weights_of(logits, top_k=2, top_p=0.56)[1:] == [0, 0, 0]
    assert weights_of(logits, top_p=0.56)[2:] == [0, 0]
    assert weights_of(logits, top_p=0.56)[1] > 0


def test_ties_at_the_edge_stay_together():
    logits = [1.0, 2.0, 2.0, 2.0, 0.0]
    for how in ({"top_k": 1}, {"top_k": 2}, {"top_p": 1e-9}, {"min_p": 1.0}):
        weights = weights_of(logits, **how)
        assert [w > 0 for w in weights] == [False, True, True, True, False], how


def test_filters_that_are_off_change_nothing_in_a_batch_where_another_row_filters():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0)) * 3
    mixed = rows(64, temperature=0.9, top_k=[0, 3] * 32, top_p=[1.0, 0.5] * 32)
    alone = rows(64, temperature=0.9, filtered=False)
    assert torch.equal(sample(logits, mixed)[::2], sample(logits, alone)[::2])
    assert torch.equal(distribution(logits, mixed)[::2], distribution(logits, alone)[::2])


@settings(max_examples=200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40))
def test_noise_is_splitmix64_to_the_bit(key: int, position: int):
    found = uniforms(torch.tensor([key]), torch.tensor([position]))
    assert found.tolist() == [uniform(key % 2**64, position)]
    assert 0 <= found.item() < 1


@settings(max_examples=300)
@given(SPREAD, TEMPERATURES, TOP_K, TOP_P, MIN_P, st.integers(0, 2**32), st.integers(0, 5000))
def test_a_draw_is_the_first_token_whose_cumulated_weight_exceeds_the_noise(
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
):
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given_rows = rows(1, seeds=[seed], positions=position, **how)
    weights = weights_of(logits, **how)
    goal = uniform(stream_key(seed, 0) % 2**64, position) * sum(weights)
    below = above = 0.0
    token = sample(torch.tensor([logits]), given_rows).item()
    below = sum(weights[:token])
    above = below + weights[token]
    assert weights[token] > 0
    assert below - 1e-9 <= goal <= above + 1e-9


@pytest.mark.parametrize(("noise", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_noise_draw_the_first_and_last_token_kept(
    monkeypatch: pytest.MonkeyPatch, noise: float, token: int
):
    monkeypatch.setattr(
        "strobe.sampling.sampler.uniforms",
        lambda keys, positions: torch.full(keys.shape, noise, dtype=torch.float64),
    )
    logits = (
        torch.tensor([[-9.0, 1.0, 1.5, 1.2, -9.0]]).repeat(20, 1) * torch.arange(1, 21)[:, None]
    )
    assert sample(logits, rows(20, top_k=3)).tolist() == [token] * 20


COUNT = 40_000


def noise(**how: object) -> torch.Tensor:
    given_rows = rows(COUNT, **how)  # pyright: ignore[reportArgumentType]
    return uniforms(given_rows.key, given_rows.position)


NEIGHBOURS = {
    "seeds": lambda i: {"seeds": range(i, COUNT + i)},
    "negative seeds": lambda i: {"seeds": range(-i - COUNT, -i)},
    "positions": lambda i: {"seeds": [5] * COUNT, "positions": range(i, COUNT + i)},
    "siblings": lambda i: {"siblings": i},
    "siblings of one seed": lambda i: {"seeds": [5] * COUNT, "siblings": range(i, COUNT + i)},
    "seed and sibling": lambda i: {"seeds": range(i, COUNT + i), "siblings": range(COUNT)},
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_noise_is_uniform_and_independent_between_neighbours(name: str):
    first, second = noise(**NEIGHBOURS[name](0)), noise(**NEIGHBOURS[name](1))
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean().item() - 0.5) < 4 * math.sqrt(1 / 12 / COUNT)
    assert stats.kstest(first.numpy(), "uniform").pvalue > 0.001
    together = (first * 8).long() * 8 + (second * 8).long()
    counts = torch.bincount(together, minlength=64).numpy()
    assert stats.chisquare(counts).pvalue > 0.001


def test_streams_of_one_request_are_independent():
    keys = [torch.tensor([stream_key(seed, 0, s) for seed in range(COUNT)]) for s in (0, 1)]
    first, second = (uniforms(key, torch.zeros_like(key)) for key in keys)
    counts = torch.bincount((first * 8).long() * 8 + (second * 8).long(), minlength=64)
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


def test_no_two_seeds_siblings_or_streams_nearby_share_a_key():
    keys = {stream_key(s, n, t) for s in range(-50, 50) for n in range(20) for t in range(3)}
    assert len(keys) == 100 * 20 * 3
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert stream_key(2**63 - 1, 0) != stream_key(-(2**63), 0)


def test_a_row_picks_the_same_token_in_any_batch():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 30, generator=generator) * 4
    all_rows = rows(
        40,
        temperature=[0.0, 0.5, 1.0, 2.0] * 10,
        top_k=[0, 3, 7, 1, 0] * 8,
        top_p=[1.0, 0.3, 0.9, 0.99] * 10,
        min_p=[0.0, 0.2] * 20,
        positions=range(40),
    )
    together = sample(logits, all_rows)
    order = torch.randperm(40, generator=generator)
    names = ("temperature", "top_p", "min_p", "top_k", "key", "position")

    def some(index: torch.Tensor):
        return replace(all_rows, **{name: getattr(all_rows, name)[index] for name in names})

    assert torch.equal(sample(logits[order], some(order)), together[order])
    for i in range(40):
        one = torch.tensor([i])
        assert sample(logits[one], some(one)).item() == together[i]


def test_greedy_rows_take_the_first_maximum_beside_sampled_ones():
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0]]).repeat(200, 1)
    picks = sample(logits, rows(200, temperature=[0.0, 1.0] * 100))
    assert picks[::2].tolist() == [1] * 100
    assert set(picks[1::2].tolist()) >= {1, 2}
    assert sample(logits, None).tolist() == [1] * 200


def test_greedy_and_sampled_rows_leave_each_other_alone():
    logits = torch.randn(100, 20, generator=torch.Generator().manual_seed(2))
    mixed = sample(logits, rows(100, temperature=[0.0, 1.0] * 50))
    assert torch.equal(mixed[::2], logits.argmax(-1)[::2])
    assert torch.equal(mixed[1::2], sample(logits, rows(100))[1::2])


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1.0, 100.0])
def test_banned_tokens_are_never_picked_and_the_rest_keep_their_law(temperature: float):
    logits = torch.tensor([[3.0, 9.0, 1.0, 2.0, 9.5]]).repeat(20_000, 1)
    banned = torch.zeros(20_000, 5, dtype=torch.bool)
    banned[:, [1, 4]] = True
    picks = sample(
        logits, rows(20_000, temperature=temperature, top_k=3), LogitEdits(banned=banned)
    )
    counts = torch.bincount(picks, minlength=5).tolist()
    assert counts[1] == counts[4] == 0
    if temperature < 1:
        assert counts[0] == 20_000
        return
    wanted = law([3.0, 1.0, 2.0], temperature)
    assert stats.chisquare([counts[0], *counts[2:4]], [p * 20_000 for p in wanted]).pvalue > 0.001


def test_a_ban_concerns_its_own_row_only():
    logits = torch.tensor([[1.0, 5.0, 3.0]] * 3)
    banned = torch.tensor([[False] * 3, [False, True, False], [False] * 3])
    assert sample(logits, None, LogitEdits(banned=banned)).tolist() == [1, 2, 1]
    assert sample(logits, rows(3, temperature=0.0), LogitEdits(banned=banned)).tolist() == [1, 2, 1]


def test_a_temperature_near_zero_is_greedy():
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(3)) * 3
    assert torch.equal(sample(logits, rows(500, temperature=1e-6)), logits.argmax(-1))


def test_a_high_temperature_follows_the_flat_law_without_overflow():
    logits = [-80.0, 0.0, 40.0, 80.0]
    picks = sample(torch.tensor([logits]).repeat(COUNT, 1), rows(COUNT, temperature=100.0))
    wanted = [p * COUNT for p in law(logits, 100.0)]
    assert stats.chisquare(torch.bincount(picks, minlength=4).numpy(), wanted).pvalue > 0.001


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_adding_a_constant_to_all_logits_changes_no_draw(shift: float):
    logits = torch.tensor([[0.0, 1.0, 2.0, 4.0]], dtype=torch.float64).repeat(1000, 1)
    moved = (logits + shift).float()
    assert torch.equal(sample(moved, rows(1000)), sample(logits.float(), rows(1000)))


def test_half_precision_logits_are_sampled_in_single_precision():
    logits = torch.randn(300, 20, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    assert torch.equal(sample(logits, rows(300)), sample(logits.float(), rows(300)))
    assert torch.equal(sample(logits, None), logits.float().argmax(-1))


def test_no_rows_give_no_tokens():
    nothing = torch.zeros(0, 7)
    assert sample(nothing, None).shape == (0,)
    assert sample(nothing, rows(0)).shape == (0,)


@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_row_without_any_weight_gives_a_token_and_leaves_other_rows_alone(filters: dict):
    logits = torch.tensor([[1.0, 5.0, 3.0], [math.nan] * 3, [1.0, 5.0, 3.0]])
    banned = torch.tensor([[True] * 3, [False] * 3, [False, True, False]])
    for temperature in (0.0, 1.0):
        picks = sample(
            logits, rows(3, temperature=temperature, **filters), LogitEdits(banned=banned)
        ).tolist()
        assert all(0 <= token < 3 for token in picks)
        assert picks[2] in (0, 2)
