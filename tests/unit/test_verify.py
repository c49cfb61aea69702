"""Verification: the drafts accepted, the sequence's new position, and the output's distribution,
which must be the target's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from scipy import stats

from strobe.config import Limits
from strobe.runner.decode_state import DecodeState
from strobe.runner.layout import Layout, exact_shape, lay_out
from strobe.runner.step_ops.numpy_step_ops import NumpyStepOps
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.sampling.sampler import sample_rows
from strobe.step import TAIL, Span
from tests.support.full_marks import full_where
from tests.support.reference_sampling import distribution, params

CPU = torch.device("cpu")
LIMIT = 1000


@cache
def layout_by_device(starts: tuple[int, ...], lengths: tuple[int, ...], spare_slot: int) -> Layout:
    """Lay out spans whose drafts only the device knows."""
    spans = [
        Span(i, start, start, (TAIL,), n, "dflash" if n else None, 1 + n)
        for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
    ]
    return lay_out(spans, CPU, exact_shape(spans), padded=False, spare_slot=spare_slot)


def verify(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    lengths: list[int] | None = None,
    *,
    by_host: bool = False,
    starts: list[int] | None = None,
    simulated: float | None = None,
) -> torch.Tensor:
    """Verify drafts [S, K] with tokens [S, 1 + K], in NumPy and in torch, and return accepted [S];
    check the slots' cursors. by_host: the spans carry the drafts as tokens."""
    by_numpy, by_torch = [
        _verify(tokens, drafts, ops, lengths, by_host=by_host, starts=starts, simulated=simulated)
        for ops in (NumpyStepOps(), StepOps())
    ]
    assert torch.equal(by_numpy, by_torch)
    return by_numpy


def _verify(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    ops: StepOps,
    lengths: list[int] | None,
    *,
    by_host: bool,
    starts: list[int] | None,
    simulated: float | None,
) -> torch.Tensor:
    count, width = drafts.shape
    lengths = [width] * count if lengths is None else lengths
    starts = list(range(count)) if starts is None else starts
    state = DecodeState(Limits(LIMIT, count, 64, 18, 16), CPU, ops)
    state.cursor[:count, 0] = torch.tensor(starts)
    state.cursor[:count, 1] = 77
    if by_host:
        draft_tokens = drafts.tolist()
        spans = [
            Span(i, start, start, (77, *draft_tokens[i][:n]), n, None, 1 + n)
            for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
        ]
        layout = lay_out(spans, CPU, exact_shape(spans), padded=False, spare_slot=state.spare_slot)
    else:
        layout = layout_by_device(tuple(starts), tuple(lengths), state.spare_slot)
    placed = state.place(layout, None if by_host else drafts)
    batch = state.make_batch(layout, placed)
    tokens = tokens[:, : layout.shape.max_logits]
    accepted = state.accept(layout, batch, tokens, simulated)
    rows = torch.arange(count)
    assert torch.equal(state.cursor[:count, 0], torch.tensor(starts) + 1 + accepted)
    assert torch.equal(state.cursor[:count, 1], tokens[rows, accepted])
    return accepted


def verdict(sampled: list[list[int]], drafts: list[list[int]], lengths: list[int] | None = None):
    tokens, draft_tokens = torch.tensor(sampled), torch.tensor(drafts).view(len(sampled), -1)
    accepted = verify(tokens, draft_tokens, lengths).tolist()
    assert verify(tokens, draft_tokens, lengths, by_host=True).tolist() == accepted
    return accepted


def test_all_matching_drafts_are_accepted():
    assert verdict([[1, 2, 3, 9]], [[1, 2, 3]]) == [3]


def test_no_draft_is_accepted_when_the_first_differs():
    assert verdict([[7, 2, 3, 9]], [[1, 2, 3]]) == [0]


def test_drafts_are_accepted_up_to_the_first_mismatch():
    sampled = [[1, 7, 3, 9], [1, 2, 7, 9], [7, 7, 7, 9], [1, 2, 3, 1]]
    assert verdict(sampled, [[1, 2, 3]] * 4) == [1, 2, 0, 3]


def test_last_sampled_token_is_never_compared():
    assert verdict([[1, 2]], [[1]]) == [1]
    assert verdict([[1, 1]], [[2]]) == [0]


def test_drafts_past_row_length_are_not_accepted():
    sampled = [[1, 2, 3, 9]] * 4
    assert verdict(sampled, [[1, 2, 3]] * 4, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert verdict(sampled, [[1, 7, 3]] * 4, [0, 1, 2, 3]) == [0, 1, 1, 1]


def test_without_drafts_nothing_is_accepted():
    assert verdict([[4], [5]], [[], []]) == [0, 0]
    assert verdict([[4], [5]], [[], []], [0, 0]) == [0, 0]


def test_draft_matching_a_later_position_is_not_accepted():
    assert verdict([[1, 2, 3, 9]], [[2, 3, 9]]) == [0]


def test_drafts_at_context_end_are_not_accepted():
    """LIMIT - 1 is a token's last possible position."""
    sampled, drafts = torch.tensor([[1, 2, 3, 9]] * 4), torch.tensor([[1, 2, 3]] * 4)
    starts = [LIMIT - n for n in (5, 4, 3, 1)]
    assert verify(sampled, drafts, starts=starts).tolist() == [3, 3, 2, 0]


def test_prefill_chunks_advance_with_drafts():
    state = DecodeState(Limits(LIMIT, 3, 64, 2, 16), CPU, NumpyStepOps())
    state.cursor[:3] = torch.tensor([[4, 0], [8, 77], [0, 0]])
    spans = [
        Span(0, 4, 4, (5, 6, 7)),
        Span(1, 8, 8, (TAIL,), 2, "dflash", 3),
        Span(2, 0, 0, (3, 3), num_logits=1),
    ]
    layout = lay_out(spans, CPU, exact_shape(spans), padded=False, spare_slot=state.spare_slot)
    placed = state.place(layout, torch.tensor([[0, 0], [1, 2], [0, 0]]))
    batch = state.make_batch(layout, placed)
    tokens = torch.tensor([[9, 9, 9], [1, 2, 4], [6, 6, 6]])
    assert state.accept(layout, batch, tokens, None).tolist() == [0, 2, 0]
    assert state.cursor[:3].tolist() == [[7, 9], [11, 4], [2, 6]]


@pytest.mark.parametrize("simulated", [1.0, 2.0, 2.25, 3.5, 9.0])
def test_simulated_acceptance_reaches_its_average(
    simulated: float,
):
    count, width = 900, 3
    drafts, tokens = torch.zeros(count, width).long(), torch.ones(count, width + 1).long()
    accepted = verify(tokens, drafts, simulated=simulated)
    assert accepted.min() >= min(int(simulated), width + 1) - 1
    mean = 1 + accepted.double().mean().item()
    assert abs(mean - min(simulated, width + 1)) < 0.01


DRAWS = 20_000
VOCAB = 4
FIRST = [0.3, 1.4, -0.2, 1.1]
"""The target's logits for the first token."""
SECOND = [[0.0, 2.0, 1.0, -1.0], [1.5, 0.2, 0.1, 1.0], [0.0, 0.0, 0.0, 3.0], [2.0, 2.0, 0.5, 0.0]]
"""The target's logits for the second token, by the first."""

SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.35},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}


@cache
def plain(**filters: float) -> torch.Tensor:
    """Sample two tokens per seed, one after another: [DRAWS, 2]."""
    first = sample_rows(
        torch.tensor([FIRST]).repeat(DRAWS, 1), params(DRAWS, positions=5, **filters)
    )
    second = sample_rows(torch.tensor(SECOND)[first], params(DRAWS, positions=6, **filters))
    return torch.stack([first, second], 1)


def speculative(draft: int, **filters: float) -> torch.Tensor:
    """Sample the same with one draft for the first token: some seeds need one step, some two."""
    logits = torch.tensor([FIRST, SECOND[draft]]).repeat(DRAWS, 1)
    seeds = [i for i in range(DRAWS) for _ in range(2)]
    sampled = sample_rows(
        logits, params(2 * DRAWS, seeds=seeds, positions=[5, 6] * DRAWS, **filters)
    )
    sampled = sampled.view(DRAWS, 2)
    accepted = verify(sampled, torch.full((DRAWS, 1), draft), starts=[5] * DRAWS)
    first = sampled[:, 0]
    again = sample_rows(torch.tensor(SECOND)[first], params(DRAWS, positions=6, **filters))
    second = torch.where(accepted == 1, sampled[:, 1], again)
    assert 0 < accepted.sum() < DRAWS or distribution(FIRST, **filters)[draft] == 0
    return torch.stack([first, second], 1)


def check_distribution(tokens: torch.Tensor, probabilities: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    possible = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in possible) == len(tokens), "a token that was filtered out appears"
    if len(possible) > 1:
        expected = [probabilities[i] * len(tokens) for i in possible]
        assert stats.chisquare([counts[i] for i in possible], expected).pvalue > 0.001


@full_where(lambda name, draft: (list(SETTINGS).index(name) + draft) % 2 == 1)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("draft", range(VOCAB))
def test_one_draft_keeps_distribution_and_seeded_tokens(name: str, draft: int):
    filters = SETTINGS[name]
    tokens = speculative(draft, **filters)
    assert torch.equal(tokens, plain(**filters))
    first = distribution(FIRST, **filters)
    check_distribution(tokens[:, 0], first)
    joint = [p * q for a, p in enumerate(first) for q in distribution(SECOND[a], **filters)]
    check_distribution(tokens[:, 0] * VOCAB + tokens[:, 1], joint)


@pytest.mark.parametrize("name", SETTINGS)
def test_draft_is_accepted_with_the_target_probability(name: str):
    filters = SETTINGS[name]
    probs = distribution(FIRST, **filters)
    sampled = sample_rows(
        torch.tensor([FIRST]).repeat(DRAWS, 1), params(DRAWS, positions=5, **filters)
    )
    for draft in range(VOCAB):
        rows = torch.stack([sampled, sampled], 1)
        num_accepted = verify(rows, torch.full((DRAWS, 1), draft), starts=[5] * DRAWS).sum().item()
        test = stats.binomtest(num_accepted, DRAWS, probs[draft])
        assert test.pvalue > 0.001
