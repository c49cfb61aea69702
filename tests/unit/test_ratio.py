"""The ratio test: drafts that were drawn leave the target's law as it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from slow_rules import penalized
from slow_sampling import key_of, law, rows
from torch import Tensor

from strobe.runner.picking import Drawn, Picking
from strobe.runner.runner import Output
from strobe.sampling.noise import DRAFTS, TESTS, uniforms
from strobe.sampling.rules import LogitEdits, Penalties, RowValues
from strobe.sampling.sampler import SamplingRows, draw, probabilities
from strobe.spec.verify import match_prefix, pick, ratio_test
from strobe.step import Proposal

DRAWS = 8_000
FIRST = [0.3, 1.4, -0.2, 1.1, 0.4]
"""The target's logits for the first token."""
SECOND = [
    [0.0, 2.0, 1.0, -1.0, 0.0],
    [1.5, 0.2, 0.1, 1.0, -2.0],
    [0.0, 0.0, 0.0, 3.0, 1.0],
    [2.0, 2.0, 0.5, 0.0, 1.0],
    [0.1, 0.2, 0.3, 0.4, 0.5],
]
"""The target's logits for the second token, by the first."""
NEVER = -math.inf
DRAFTERS = {
    "near": [0.5, 1.0, 0.1, 1.3, 0.2],
    "equal": FIRST,
    "flat": [0.0] * 5,
    "certain and wrong": [0.0, 0.0, 60.0, 0.0, 0.0],
    "of a reduced vocabulary": [0.3, NEVER, 0.8, 1.1, NEVER],
}
SETTINGS = {
    "temperature 1": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.35},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}


def noise(stream: int, **how: Any) -> SamplingRows:
    """DRAWS rows of one stream, seeds 0, 1, 2, ..."""
    made = rows(DRAWS, **how).__dict__
    keys = torch.tensor([key_of(seed, 0, stream) for seed in range(DRAWS)])
    return SamplingRows(**made | {"key": keys})


def drafted(logits: list[float], position: int, **how: Any) -> Drawn:
    """A draft per seed."""
    draws = noise(DRAFTS, positions=position, **how)
    every = torch.tensor(logits).repeat(DRAWS, 1)
    probs = probabilities(every, draws)
    test = noise(TESTS, positions=position)
    return Drawn(draw(probs, every, draws), probs, uniforms(test.key, test.position))


def picked(
    logits: Tensor, position: int, drawn: Drawn | None, edits: LogitEdits | None = None, **how: Any
) -> Tensor:
    picking = Picking(rows(DRAWS, positions=position, **how), edits, drawn=drawn)
    return pick(Output(logits, None, None), picking)


def speculative(
    draft: list[float], edits: LogitEdits | None = None, **how: Any
) -> tuple[Tensor, int]:
    """Two tokens per seed, with a draft for the first, and how many drafts were kept. Where it was
    not, the second comes from a step of its own, with a new draft."""
    drawn = drafted(draft, 5, **how)
    first = picked(torch.tensor(FIRST).repeat(DRAWS, 1), 5, drawn, edits, **how)
    bonus = picked(torch.tensor(SECOND)[drawn.tokens], 6, None, **how)
    found = match_prefix(torch.stack([first, bonus], 1), Proposal(drawn.tokens[:, None]))
    later = drafted(draft, 6, **how)
    again = picked(torch.tensor(SECOND)[first], 6, later, **how)
    second = torch.where(found.accepted == 1, bonus, again)
    return torch.stack([first, second], 1), int(found.accepted.sum())


def check_law(tokens: Tensor, probabilities: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).tolist()
    possible = [i for i, p in enumerate(probabilities) if p > 0]
    assert sum(counts[i] for i in possible) == len(tokens), "a token that was filtered out appears"
    wanted = [probabilities[i] * len(tokens) for i in possible]
    assert stats.chisquare([counts[i] for i in possible], wanted).pvalue > 0.001


def check(tokens: Tensor, first: list[float], **how: Any) -> None:
    check_law(tokens[:, 0], first)
    joint = [p * q for a, p in enumerate(first) for q in law(SECOND[a], **how)]
    check_law(tokens[:, 0] * len(first) + tokens[:, 1], joint)


def overlapping(p: list[float], q: list[float]) -> float:
    """How often a draft is kept: 1 less the total variation distance."""
    return sum(map(min, p, q))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_follow_the_target_and_drafts_are_kept_as_often_as_the_laws_overlap(
    name: str, drafter: str
):
    how, draft = SETTINGS[name], DRAFTERS[drafter]
    tokens, kept = speculative(draft, **how)
    check(tokens, law(FIRST, **how), **how)
    share = overlapping(law(FIRST, **how), law(draft, **how))
    if drafter == "equal":
        assert kept == DRAWS
    else:
        assert stats.binomtest(kept, DRAWS, min(share, 1.0)).pvalue > 0.001


def test_drafts_that_the_target_never_gives_are_never_kept():
    edits = LogitEdits(bias=RowValues(torch.arange(DRAWS), torch.zeros(DRAWS, 5)))
    assert edits.bias is not None
    edits.bias.values[:, [0, 2, 3]] = NEVER
    draft = [0.3, NEVER, 0.8, 1.1, NEVER]
    tokens, kept = speculative(draft, edits, temperature=1.0)
    assert kept == 0
    banned = [NEVER, FIRST[1], NEVER, NEVER, FIRST[4]]
    check(tokens, law(banned, temperature=1.0), temperature=1.0)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_drafter_needs_to_know_no_rules_on_logits(drafter: str):
    """Penalties and a bias change the target's law alone."""
    strength = torch.tensor([[0.4, 0.9, 1.3]]).repeat(DRAWS, 1)
    counts = torch.tensor([[0, 2, 1, 0, 0]], dtype=torch.int32).repeat(DRAWS, 1)
    prompt = torch.tensor([[True, False, False, True, False]]).repeat(DRAWS, 1)
    every = torch.arange(DRAWS)
    none = torch.zeros(DRAWS, 1, dtype=torch.int64)
    penalties = Penalties(every, counts, prompt, none, none[:, 0], strength)
    bias = [0.0, 0.5, -0.3, 0.0, 1.0]
    edits = LogitEdits(RowValues(every, torch.tensor([bias]).repeat(DRAWS, 1)), penalties)
    biased = [x + b for x, b in zip(FIRST, bias, strict=True)]
    changed = penalized(biased, [0, 3], [1, 1, 2], presence=0.4, frequency=0.9, repetition=1.3)
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}
    tokens, _ = speculative(DRAFTERS[drafter], edits, **how)
    check(tokens, law(changed, **how), **how)


def test_where_nothing_is_left_a_token_is_drawn_by_the_targets_law():
    """Rounding may leave no p - q where a draft is refused; and rows without a draft have q = 0."""
    p = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.0, 0.8], [0.5, 0.5, 0.0]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    share = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    kept, rest = ratio_test(p, Drawn(torch.tensor([1, 1, 2]), q, share))
    assert kept.tolist() == [False, False, False]
    assert torch.equal(rest, p)


def test_numbers_that_are_none_keep_no_draft_and_give_tokens_of_the_vocabulary():
    wrong = torch.full((DRAWS, 5), math.nan)
    drawn = drafted(FIRST, 5)
    drawn = drawn._replace(probs=wrong)
    good = torch.tensor(FIRST).repeat(DRAWS, 1)
    check_law(picked(good, 5, drawn), law(FIRST, temperature=1.0))
    assert picked(wrong, 5, drafted(FIRST, 5)).max() < 5


def test_a_replaced_draft_counts_as_what_was_drawn():
    """A grammar allows three tokens; where it does not allow the draft, another stands in for it.
    The token depends on the draft as it was drawn, and the one that stands in is kept where it
    happens to equal the token: to hold it for a draft that was not drawn would change the law."""
    edits = LogitEdits(bias=RowValues(torch.arange(DRAWS), torch.zeros(DRAWS, 5)))
    assert edits.bias is not None
    edits.bias.values[:, [1, 2]] = NEVER
    allowed = [FIRST[0], NEVER, NEVER, FIRST[3], FIRST[4]]
    drawn = drafted(DRAFTERS["near"], 5)
    stands_in = torch.where((drawn.tokens == 1) | (drawn.tokens == 2), 3, drawn.tokens)
    good = torch.tensor(FIRST).repeat(DRAWS, 1)
    tokens = picked(good, 5, drawn, edits)
    check_law(tokens, law(allowed, temperature=1.0))
    kept = match_prefix(torch.stack([tokens, tokens], 1), Proposal(stands_in[:, None])).accepted
    assert 0 < kept[stands_in != drawn.tokens].sum() < kept.sum()
    wrong = torch.where(stands_in == drawn.tokens, tokens, picked(good, 5, None, edits))
    with pytest.raises(AssertionError):
        check_law(wrong, law(allowed, temperature=1.0))
