"""Drafts mended by what a grammar forces."""

from __future__ import annotations

import pytest

from strobe.config import DEMO_MODELS
from strobe.sampling.grammar import Follower, Grammars
from strobe.sampling_params import StructuredOutputs

END = 2
TEXT = "The name is Ann, and that is all there is to say."


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(DEMO_MODELS / "target" / "tokenizer.json", 2048, [END])


def follower(grammars: Grammars, **structured: object) -> Follower:
    return Follower(grammars.compile(StructuredOutputs(**structured)))  # type: ignore[arg-type]


def test_forced_text_takes_the_place_of_drafts_that_are_not_allowed(grammars: Grammars):
    at = follower(grammars, choice=[TEXT])
    true = grammars.tokenizer.tokenize_str(TEXT)
    for wrong in ([5] * len(true), [*true[:3], *([5] * (len(true) - 3))]):
        assert at.mend([], wrong) == true
        assert at.mend([], wrong[:4]) == true[:4]
    assert at.mend(true[:5], [5, 5]) == true[5:7]


def test_drafts_that_are_allowed_stay(grammars: Grammars):
    at = follower(grammars, choice=[TEXT])
    letters = [grammars.tokenizer.tokenize_str(letter)[0] for letter in "The name"]
    assert at.mend([], letters) == letters


def test_where_several_ways_are_open_an_illegal_draft_stays(grammars: Grammars):
    at = follower(grammars, regex="(a|b)[0-9]{3} end")
    digits = grammars.tokenizer.tokenize_str("a12")
    assert at.mend([], [5, 5]) == [5, 5]
    assert at.mend([], [*digits, 5, 5]) == [*digits, 5, 5]
    forced = grammars.tokenizer.tokenize_str("a123 end")
    mended = at.mend([], [*forced[:4], *[5] * 8])
    assert grammars.tokenizer.decode_str(mended).startswith("a123 end")
    assert len(mended) == 12


def test_mending_leaves_the_place_where_it_was(grammars: Grammars):
    at = follower(grammars, choice=[TEXT])
    true = grammars.tokenizer.tokenize_str(TEXT)
    before = at.masks([], true[:4], grammars.words)
    assert at.mend([], [5] * 8) == true[:8]
    assert (at.masks([], true[:4], grammars.words) == before).all()
    assert at.mend(true, [5, 5]) == [5, 5]  # behind the end nothing is forced


def test_before_a_marker_drafts_are_free_and_behind_it_mended(grammars: Grammars):
    matcher = grammars.compile(StructuredOutputs(choice=[TEXT]))
    at = Follower(matcher, after=[7, 8])
    true = grammars.tokenizer.tokenize_str(TEXT)
    assert at.mend([], [5, 6, 5]) == [5, 6, 5]
    assert at.mend([5], [7, 8, 5, 5]) == [7, 8, *true[:2]]
