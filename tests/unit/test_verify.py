"""Verification: which drafts are kept, and that the output's law is the target's own."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from slow_sampling import law, rows
from strobe.spec.verify import match_prefix

from strobe.sampling.sampler import sample
from strobe.step import Proposal


def verdict(picks: list[list[int]], drafts: list[list[int]], lengths: list[int] | None = None):
    tokens = torch.tensor(drafts).view(len(picks), -1)
    found = match_prefix(
        torch.tensor(picks), Proposal(tokens, None if lengths is None else torch.tensor(lengths))
    )
    assert torch.equal(found.tokens, torch.tensor(picks))
    return found.accepted.tolist()


def test_every_draft_is_kept_when_all_match():
    assert verdict([[1, 2, 3, 9]], [[1, 2, 3]]) == [3]


def test_nothing_is_kept_when_the_first_differs_whatever_follows():
    assert verdict([[7, 2, 3, 9]], [[1, 2, 3]]) == [0]


def test_drafts_are_kept_up_to_the_first_that_differs():
    picks = [[1, 7, 3, 9], [1, 2, 7, 9], [7, 7, 7, 9], [1, 2, 3, 1]]
    assert verdict(picks, [[1, 2, 3]] * 4) == [1, 2, 0, 3]


def test_the_last_pick_is_never_compared():
    assert verdict([[1, 2]], [[1]]) == [1]
    assert verdict([[1, 1]], [[2]]) == [0]


def test_drafts_beyond_a_rows_length_are_not_kept_even_when_they_match():
    picks = [[1, 2, 3, 9]] * 4
    assert verdict(picks, [[1, 2, 3]] * 4, [0, 1, 2, 3]) == [0, 1, 2, 3]
    assert verdict(picks, [[1, 7, 3]] * 4, [0, 1, 2, 3]) == [0, 1, 1, 1]


def test_without_drafts_nothing_is_kept():
    assert verdict([[4], [5]], [[], []]) == [0, 0]
    assert verdict([[4], [5]], [[], []], [0, 0]) == [0, 0]


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


def plain(**how: float) -> torch.Tensor:
    """Two tokens per seed, one after another: [DRAWS, 2]."""
    first = sample(torch.tensor([FIRST]).repeat(DRAWS, 1), rows(DRAWS, positions=5, **how))
    second = sample(torch.tensor(SECOND)[first], rows(DRAWS, positions=6, **how))
    return torch.stack([first, second], 1)


def speculative(draft: int, **how: float) -> torch.Tensor:
    """The same with one draft for the first token, so that most need one step and some need two."""
    logits = torch.tensor([FIRST, SECOND[draft]]).repeat(DRAWS, 1)
    seeds = [i for i in range(DRAWS) for _ in range(2)]
    picks = sample(logits, rows(2 * DRAWS, seeds=seeds, positions=[5, 6] * DRAWS, **how))
    picks = picks.view(DRAWS, 2)
    found = match_prefix(picks, Proposal(torch.full((DRAWS, 1), draft)))
    first = found.tokens[:, 0]
    again = sample(torch.tensor(SECOND)[first], rows(DRAWS, positions=6, **how))
    second = torch.where(found.accepted == 1, found.tokens[:, 1], again)
    assert 0 < found.accepted.sum() < DRAWS or law(FIRST, **how)[draft] == 0
    return torch.stack([first, second], 1)


def check_law(tokens: torch.Tensor, probabilities: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    possible = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in possible) == len(tokens), "a token that was filtered out appears"
    if len(possible) > 1:
        wanted = [probabilities[i] * len(tokens) for i in possible]
        assert stats.chisquare([counts[i] for i in possible], wanted).pvalue > 0.001


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("draft", range(VOCAB))
def test_one_draft_leaves_the_law_and_every_seeds_tokens_unchanged(name: str, draft: int):
    how = SETTINGS[name]
    tokens = speculative(draft, **how)
    assert torch.equal(tokens, plain(**how))
    first = law(FIRST, **how)
    check_law(tokens[:, 0], first)
    joint = [p * q for a, p in enumerate(first) for q in law(SECOND[a], **how)]
    check_law(tokens[:, 0] * VOCAB + tokens[:, 1], joint)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_draft_is_accepted_with_the_targets_probability_of_it(name: str):
    how = SETTINGS[name]
    wanted = law(FIRST, **how)
    picks = sample(torch.tensor([FIRST]).repeat(DRAWS, 1), rows(DRAWS, positions=5, **how))
    for draft in range(VOCAB):
        two = torch.stack([picks, picks], 1)
        kept = match_prefix(two, Proposal(torch.full((DRAWS, 1), draft))).accepted.sum().item()
        test = stats.binomtest(kept, DRAWS, wanted[draft])
        assert test.pvalue > 0.001
