"""Forced tokens replace drafts that a grammar does not allow."""

from __future__ import annotations

import numpy as np
import pytest

from strobe.config import DEMO_MODELS
from strobe.sampling.grammar import GrammarState
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs
from tests.support.grammar_walk import walk

END = 2
TEXT = "The name is Ann, and that is all there is to say."


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(DEMO_MODELS / "target" / "tokenizer.json", 2048, [END])


class Walker:
    """One slot of a GrammarState."""

    def __init__(self, grammars: GrammarCompiler, **structured: object):
        self.state, self.done = GrammarState(grammars), 0
        self.state.admit(0, StructuredOutputs(**structured))  # type: ignore[arg-type]

    def walk(self, output: list[int], drafts: list[int]) -> tuple[list[int], np.ndarray]:
        assert self.state.advance(0, output[self.done :]) is None
        self.done = len(output)
        step = walk(self.state, [0], [drafts])
        return step.drafts[0], step.masks[0]

    def drafts(self, output: list[int], drafts: list[int]) -> list[int]:
        return self.walk(output, drafts)[0]


def test_forced_tokens_replace_illegal_drafts(grammars: GrammarCompiler):
    slot = Walker(grammars, choice=[TEXT])
    true = grammars.tokenizer.tokenize_str(TEXT)
    for wrong in ([5] * len(true), [*true[:3], *([5] * (len(true) - 3))]):
        assert slot.drafts([], wrong) == true
        assert slot.drafts([], wrong[:4]) == true[:4]
    assert slot.drafts(true[:5], [5, 5]) == true[5:7]


def test_text_forced_by_a_lark_grammar_replaces_drafts(grammars: GrammarCompiler):
    """llguidance itself does not look for forced text, see `grammars.source`."""
    slot = Walker(grammars, grammar=f'start: ("a"|"b") "{TEXT}"')
    first = grammars.tokenizer.tokenize_str("a")
    assert slot.drafts([], [5] * 8) == [5] * 8
    text = grammars.tokenizer.decode_str(slot.drafts(first, [5] * 8))
    assert len(text) > 12
    assert TEXT.startswith(text)


def test_legal_drafts_stay(grammars: GrammarCompiler):
    slot = Walker(grammars, choice=[TEXT])
    letters = [grammars.tokenizer.tokenize_str(letter)[0] for letter in "The name"]
    assert slot.drafts([], letters) == letters


def test_illegal_draft_stays_where_no_token_is_forced(grammars: GrammarCompiler):
    slot = Walker(grammars, regex="(a|b)[0-9]{3} end")
    digits = grammars.tokenizer.tokenize_str("a12")
    assert slot.drafts([], [5, 5]) == [5, 5]
    assert slot.drafts([], [*digits, 5, 5]) == [*digits, 5, 5]
    forced = grammars.tokenizer.tokenize_str("a123 end")
    forced = slot.drafts([], [*forced[:4], *[5] * 8])
    assert grammars.tokenizer.decode_str(forced).startswith("a123 end")
    assert len(forced) == 12


def test_walk_does_not_move_the_position(grammars: GrammarCompiler):
    slot = Walker(grammars, choice=[TEXT])
    true = grammars.tokenizer.tokenize_str(TEXT)
    before = slot.walk([], true[:4])[1]
    assert slot.drafts([], [5] * 8) == true[:8]
    assert (slot.walk([], true[:4])[1] == before).all()
    assert slot.drafts(true, [5, 5]) == [5, 5]  # after the end no token is forced


def test_drafts_are_free_before_a_marker_and_forced_after(grammars: GrammarCompiler):
    slot = Walker(grammars, choice=[TEXT], think_end=[7, 8])
    true = grammars.tokenizer.tokenize_str(TEXT)
    assert slot.drafts([], [5, 6, 5]) == [5, 6, 5]
    assert slot.drafts([5], [7, 8, 5, 5]) == [7, 8, *true[:2]]
