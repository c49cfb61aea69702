"""Grammars followed along drafts, against a fresh matcher that reads one token after another."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_walk import walk as walk_along
from llguidance import LLMatcher

from strobe.config import DEMO_MODELS
from strobe.sampling.grammar import GrammarState
from strobe.sampling.grammar_compiler import GrammarCompiler, grammar_source
from strobe.sampling_params import StructuredOutputs
from strobe.text.tokenizer import Tokenizer

FILE = DEMO_MODELS / "target" / "tokenizer.json"
VOCAB = 2048
WORDS = VOCAB // 32
EOS = 2
ENDS = {0, 2}
EVERY = frozenset(range(VOCAB))

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ab", "abc"]}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHOICES = ("yes", "yes and no", "no")
REGEX = r"[a-c]{2,4}( or [0-9]+)?"

KINDS: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json=SCHEMA),
    "json text": StructuredOutputs(json=json.dumps(SCHEMA)),
    "json_object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=REGEX),
    "choice": StructuredOutputs(choice=CHOICES),
    "lark": StructuredOutputs(grammar='start: "<" word ("," word)* ">"\nword: /[a-d]+/'),
    "gbnf": StructuredOutputs(grammar='root ::= "<" word ("," word)* ">"\nword ::= [a-d]+'),
}

FITS: dict[str, Callable[[str], Any]] = {
    "json": lambda text: json.loads(text)["name"] in ("ab", "abc"),
    "json text": lambda text: isinstance(json.loads(text)["size"], int),
    "json_object": lambda text: isinstance(json.loads(text), dict),
    "regex": re.compile(REGEX).fullmatch,
    "choice": lambda text: text in CHOICES,
    "lark": re.compile(r"<[a-d]+(,[a-d]+)*>").fullmatch,
    "gbnf": re.compile(r"<[a-d]+(,[a-d]+)*>").fullmatch,
}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(FILE, VOCAB, sorted(ENDS))


def allowed(mask: Any) -> frozenset[int]:
    """The tokens of one row's mask."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[:VOCAB]).tolist())


@cache
def slow(
    grammars: GrammarCompiler, kind: str, tokens: tuple[int, ...], *, forced: bool = True
) -> frozenset[int] | None:
    """What may follow some tokens by a matcher made anew; None where they are not legal. Behind
    the end only the end may come. forced: of a text that must come, the tokenizer's own tokens
    alone."""
    source = json.loads(grammar_source(KINDS[kind]))
    if not forced:
        option = '%llguidance {"no_forcing": true}\nstart: "x"'
        source["grammars"].append({"name": "option", "lark_grammar": option})
    matcher = LLMatcher(grammars.tokenizer, json.dumps(source), log_level=0)
    for token in tokens:
        if matcher.is_stopped():
            if token not in ENDS:
                return None
        elif not matcher.consume_token(token):
            return None
    return allowed(matcher.compute_bitmask())


def slow_masks(
    grammars: GrammarCompiler,
    kind: str,
    output: Sequence[int],
    drafts: Sequence[int],
    after: Sequence[int] = (),
) -> list[frozenset[int]]:
    """The rows, each from the beginning: free before the marker and behind illegal drafts."""
    known, size, found = [*output, *drafts], len(after), list[frozenset[int]]()
    for end in range(len(output), len(known) + 1):
        begins = [i for i in range(size, end + 1) if known[i - size : i] == list(after)]
        mask = slow(grammars, kind, tuple(known[begins[0] : end])) if begins else EVERY
        found.append(EVERY if mask is None else mask)
    return found


class Follower:
    """One slot of a GrammarState."""

    def __init__(self, grammars: GrammarCompiler, structured: StructuredOutputs):
        self.state, self.done = GrammarState(grammars), 0
        self.state.admit(3, structured)
        self.drafts: list[int] = []


def masks(follower: Follower, output: Sequence[int], drafts: Sequence[int]) -> list[frozenset[int]]:
    """The rows' masks; the drafts as they became are the follower's own. Only a draft that is not
    allowed gives way, and to one that is."""
    assert follower.state.advance(3, output[follower.done :]) is None
    follower.done = len(output)
    given = list(drafts)
    step = walk_along(follower.state, [3], [drafts])
    assert not step.errors
    assert list(drafts) == given
    assert (step.masks.shape, step.masks.dtype) == ((1, 1 + len(drafts), WORDS), np.int32)
    found = [allowed(row) for row in step.masks[0]]
    (follower.drafts,) = step.drafts
    assert len(follower.drafts) == len(given)
    changed = [i for i, (a, b) in enumerate(zip(follower.drafts, given, strict=True)) if a != b]
    if changed:
        assert given[changed[0]] not in found[changed[0]]
        assert follower.drafts[changed[0]] in found[changed[0]]
    return found


def walk(grammars: GrammarCompiler, kind: str, seed: int, most: int = 14) -> list[int]:
    """Random legal tokens, up to an end token where one comes."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < most and not ENDS & set(tokens):
        mask = slow(grammars, kind, tuple(tokens))
        assert mask
        ends = sorted(mask & ENDS)
        rest = sorted(mask - ENDS)
        tokens.append(rng.choice(ends if ends and (not rest or rng.random() < 0.3) else rest))
    return tokens


def illegal(grammars: GrammarCompiler, kind: str, tokens: Sequence[int], rng: random.Random) -> int:
    mask = slow(grammars, kind, tuple(tokens))
    assert mask
    return rng.choice(sorted(EVERY - mask))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_masks_along_legal_drafts_match_token_by_token(
    grammars: GrammarCompiler, kind: str, seed: int
):
    tokens = walk(grammars, kind, seed)
    for done in range(0, len(tokens), 3):
        follower = Follower(grammars, KINDS[kind])
        for drafts in ([], tokens[done : done + 1], tokens[done : done + 7]):
            found = masks(follower, tokens[:done], drafts)
            assert found == slow_masks(grammars, kind, tokens[:done], drafts)
            assert all(draft in mask for draft, mask in zip(drafts, found, strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_kept_after_an_illegal_draft(grammars: GrammarCompiler, kind: str):
    rng = random.Random(kind)
    tokens = walk(grammars, kind, 11)
    follower = Follower(grammars, KINDS[kind])
    drafts = tokens[:6]
    for place in range(len(drafts)):
        wrong = illegal(grammars, kind, drafts[:place], rng)
        given = [*drafts[:place], wrong, *drafts[place + 1 :]]
        found = masks(follower, [], given)
        assert found == slow_masks(grammars, kind, [], follower.drafts)
        assert wrong not in found[place]
        if follower.drafts == given:
            assert found[place + 1 :] == [EVERY] * (len(drafts) - place)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_along_drafts_leaves_the_place_where_it_was(grammars: GrammarCompiler, kind: str):
    """Asked twice, then with other drafts, then with some of them committed."""
    rng = random.Random(3)
    tokens = walk(grammars, kind, 5, most=12)
    follower = Follower(grammars, KINDS[kind])
    done = 0
    while done <= len(tokens):
        drafts = tokens[done : done + 5]
        wrong = [*drafts[:2], illegal(grammars, kind, tokens[: done + len(drafts[:2])], rng), 9]
        for given in (drafts, drafts, wrong, drafts, [EOS, EOS]):
            found = masks(follower, tokens[:done], given)
            assert found == slow_masks(grammars, kind, tokens[:done], follower.drafts)
        done += rng.randint(1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_catching_up_in_pieces_equals_token_by_token(grammars: GrammarCompiler, kind: str):
    tokens = walk(grammars, kind, 7)
    wanted = slow_masks(grammars, kind, tokens, [])
    for size in (1, 2, 5, len(tokens)):
        follower = Follower(grammars, KINDS[kind])
        for end in range(size, len(tokens), size):
            masks(follower, tokens[:end], tokens[end : end + 2])
        assert masks(follower, tokens, []) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_only_end_follows_the_end(grammars: GrammarCompiler, kind: str):
    """In drafts as in committed tokens: min_tokens may hold an answer open there."""
    tokens = next(t for s in range(99) if (t := walk(grammars, kind, s, most=60))[-1] in ENDS)
    follower = Follower(grammars, KINDS[kind])
    whole = tokens[:-1]
    assert tokens[-1] in masks(follower, whole, [])[0]
    assert masks(follower, whole, [EOS, EOS, 0, 5, EOS])[1:] == [{*ENDS}] * 3 + [EVERY] * 2
    assert masks(follower, [*whole, EOS], [EOS, 0])[:] == [{*ENDS}] * 3
    assert masks(follower, [*whole, EOS, EOS, 0], []) == [{*ENDS}]


@pytest.mark.parametrize("kind", KINDS)
def test_completed_walk_matches_the_grammar(
    grammars: GrammarCompiler, kind: str, tokenizer: Tokenizer
):
    texts = set[str]()
    for seed in range(20):
        tokens = walk(grammars, kind, seed, most=50)
        if tokens[-1] in ENDS:
            texts.add(tokenizer.decode(tokens))
    assert texts
    assert all(FITS[kind](text) for text in texts), texts


def test_equal_lark_and_gbnf_allow_the_same(grammars: GrammarCompiler):
    tokens = walk(grammars, "lark", 2)
    assert slow_masks(grammars, "lark", [], tokens) == slow_masks(grammars, "gbnf", [], tokens)


MARKERS = [(7,), (7, 8), (7, 7, 8)]


@pytest.mark.parametrize("after", MARKERS, ids=str)
@pytest.mark.parametrize("kind", ["json", "choice"])
def test_marker_starts_the_grammar_at_any_position(
    grammars: GrammarCompiler, kind: str, after: tuple[int, ...]
):
    """In the committed tokens, in the drafts, or begun in the one and ended in the other."""
    thinking, tokens = [20, 8, 21, *after[:-1]], walk(grammars, kind, 4)
    known = [*thinking, *after, *tokens[:4]]
    for done in range(len(known) + 1):
        follower = Follower(grammars, replace(KINDS[kind], after=after))
        for drafts in (known[done : done + 3], known[done:], [9, 9], known[done:]):
            found = masks(follower, known[:done], drafts)
            assert found == slow_masks(grammars, kind, known[:done], follower.drafts, after)
    follower = Follower(grammars, replace(KINDS[kind], after=after))
    for done in range(len(known) + 1):
        wanted = slow_masks(grammars, kind, known[:done], known[done : done + 4], after)
        assert masks(follower, known[:done], known[done : done + 4]) == wanted
    assert slow(grammars, kind, ()) in wanted + slow_masks(grammars, kind, [], known, after)


def test_before_a_marker_all_tokens_are_free_also_the_ends(grammars: GrammarCompiler):
    follower = Follower(grammars, replace(KINDS["choice"], after=(7, 8)))
    assert masks(follower, [7, 9, 8], [EOS, 5, 8]) == [EVERY] * 4
    assert masks(follower, [7, 9, 8, 7, 8], []) == [slow(grammars, "choice", ())]


def test_marker_inside_the_answer_restarts_nothing(grammars: GrammarCompiler):
    tokens = walk(grammars, "lark", 6)
    marker = tokens[1]
    follower = Follower(grammars, replace(KINDS["lark"], after=(marker,)))
    found = masks(follower, [marker], tokens[:4])
    assert found == slow_masks(grammars, "lark", [], tokens[:4])


# what does not compile or cannot go on

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "does not compile: the JSON schema is no JSON"),
    ({"json": "[1]"}, "does not compile"),
    ({"json": {"type": "hamster"}}, "does not compile: .*hamster"),
    ({"json": {"$ref": "#/nowhere"}}, "does not compile: .*nowhere"),
    ({"json": {"enum": {1, 2}}}, "does not compile: .*set"),
    ({"json": {"type": "string", "format": b"date"}}, "does not compile: .*bytes"),
    ({"regex": "(a"}, "does not compile: .*unclosed group"),
    ({"grammar": "start: nothing"}, 'does not compile: .*"nothing"'),
    ({"grammar": "root ::= nothing"}, "does not compile: .*nothing"),
    ({"grammar": ""}, "does not compile"),
    (
        {"regex": "(x{1000}){1000}"},
        "does not compile: it takes more work at a token than .* 50,000",
    ),
    (
        {"regex": "a(b{1000}){1000}"},
        "does not compile: it takes more work at a token than .* 50,000",
    ),
    ({"regex": r"[^\s\S]"}, "does not compile: the model's tokens can write nothing"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(f) for f, _ in WRONG])
def test_uncompilable_grammar_is_a_one_line_error(
    grammars: GrammarCompiler, fields: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=f"^structured_outputs: the grammar {message}") as caught:
        grammars.compile(StructuredOutputs(**fields))
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text


def test_request_leaving_its_grammar_ends_alone(grammars: GrammarCompiler):
    """It cannot come about by sampling; a broken matcher is the request's error, not the step's."""
    state = GrammarState(grammars)
    for slot in (4, 9):
        state.admit(slot, KINDS["choice"])
    error = state.advance(4, [5])
    assert "cannot be followed further" in str(error)
    assert "\n" not in str(error)
    assert "state" not in str(error)
    for _ in range(2):
        step = walk_along(state, [9, 4], [[], [1, 2]])
        assert step.errors == {1: error}
        assert step.drafts == [[], [1, 2]]
        assert [allowed(row) for row in step.masks[1]] == [EVERY] * 3
        first, *rest = (allowed(row) for row in step.masks[0])
        assert first == slow(grammars, "choice", ())
        assert rest == [EVERY] * 2
    assert state.advance(4, [6]) == error
    assert state.advance(9, []) is None


def test_a_slot_without_a_grammar_is_free(grammars: GrammarCompiler):
    state = GrammarState(grammars)
    state.admit(1, KINDS["choice"])
    state.admit(1, None)
    state.admit(1, None)
    assert state.advance(1, [5]) is None
    step = walk_along(state, [0, 1], [[5], [6]])
    assert step.drafts == [[5], [6]]
    assert not step.errors
    assert (step.masks == -1).all()
    assert walk_along(state, [], []).errors == {}


def test_resumed_request_restores_its_grammar_position(grammars: GrammarCompiler):
    """As after a preemption, in a slot of another's."""
    tokens = walk(grammars, "json", 3)
    state = GrammarState(grammars)
    state.admit(0, KINDS["choice"])
    state.admit(0, KINDS["json"], tokens[:6])
    found = walk_along(state, [0], [tokens[6:9]]).masks[0]
    wanted = slow_masks(grammars, "json", tokens[:6], tokens[6:9])
    assert [allowed(row) for row in found] == wanted


@pytest.mark.parametrize("damage", ["missing", "damaged", "another vocabulary"])
def test_unusable_tokenizer_is_named_at_first_grammar(tmp_path: Path, damage: str):
    file = tmp_path / "tokenizer.json"
    if damage == "damaged":
        file.write_text('{"model":')
    if damage == "another vocabulary":
        shutil.copy(FILE, file)
    grammars = GrammarState(GrammarCompiler(file, 100, [2]))
    assert walk_along(grammars, [0], [[1]]).drafts == [[1]]
    with pytest.raises(ValueError, match=r"^structured_outputs needs .*tokenizer\.json") as caught:
        grammars.admit(0, KINDS["regex"])
    wanted = {"missing": "does not exist", "damaged": "error", "another vocabulary": "100"}[damage]
    assert wanted in str(caught.value)
    assert str(caught.value).endswith(".")


def test_vocabulary_padding_is_never_allowed():
    grammars = GrammarState(GrammarCompiler(FILE, VOCAB + 40, sorted(ENDS)))
    grammars.admit(0, StructuredOutputs(regex="(.|\n)*"))
    (found,) = walk_along(grammars, [0], [[]]).masks
    assert found.shape == (1, WORDS + 2)
    bits = np.unpackbits(found.view(np.uint8), bitorder="little")
    assert bits[:VOCAB].sum() > VOCAB / 2
    assert not bits[VOCAB : VOCAB + 40].any()


# grammars that are out to harm

DEEP: dict[str, dict[str, Any]] = {
    "rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000))},
    "schema text": {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    "regex": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "parentheses": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "gbnf": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
}
DEEP_SCHEMA = '{"items":' * 150 + "{}" + "}" * 150
DEEP["rules"]["grammar"] += 'r6000: "a"'


def test_deeply_chained_rules_do_not_crash(
    grammars: GrammarCompiler,
):
    """On a usual stack 6,000 do."""
    follower = Follower(grammars, StructuredOutputs(**DEEP["rules"]))
    (mask,) = masks(follower, [], [])
    assert len(mask) == 1


@pytest.mark.parametrize("name", sorted(DEEP.keys() - {"rules"}))
def test_deep_nesting_is_rejected_in_one_short_sentence(grammars: GrammarCompiler, name: str):
    with pytest.raises(
        ValueError, match=r"^structured_outputs: the grammar does not compile: "
    ) as caught:
        grammars.compile(StructuredOutputs(**DEEP[name]))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("schema", [DEEP_SCHEMA, json.loads(DEEP_SCHEMA)], ids=["text", "object"])
def test_deep_schema_is_refused_with_its_depth(grammars: GrammarCompiler, schema: Any):
    with pytest.raises(ValueError, match="nested too deeply: 151 levels, at most 124 are read"):
        grammars.compile(StructuredOutputs(json=schema))


def test_schema_of_the_allowed_depth_compiles(grammars: GrammarCompiler):
    grammars.compile(StructuredOutputs(json='{"items":' * 123 + "{}" + "}" * 123))


def test_oversized_grammar_is_rejected_with_its_size(grammars: GrammarCompiler):
    with pytest.raises(ValueError, match=r"holds 200\d\d\d characters, but at most 131072"):
        grammars.compile(StructuredOutputs(regex="a" * 200_000))


# models that think first


@pytest.mark.parametrize("kind", ["json", "choice"])
def test_an_answer_may_open_thinking_or_begin_at_once(grammars: GrammarCompiler, kind: str):
    """opener: behind it everything is free up to the marker; without it the grammar holds."""
    opener, after, tokens = 1, (7, 8), walk(grammars, kind, 4)
    first = slow(grammars, kind, ())
    assert first is not None

    def follower() -> Follower:
        return Follower(grammars, replace(KINDS[kind], after=after, opener=opener))

    def slow_opened(output: list[int], drafts: list[int]) -> list[frozenset[int]]:
        known = [*output, *drafts]
        begun = known[:1] == [opener] and bool(output)
        if begun:
            return slow_masks(grammars, kind, output[1:], drafts, after)
        if known[:1] == [opener]:
            return [first | {opener}, *slow_masks(grammars, kind, [], drafts[1:], after)]
        found = slow_masks(grammars, kind, output, drafts)
        return found if output else [found[0] | {opener}, *found[1:]]

    for known in ([opener, 20, 7, 7, 8, *tokens[:4]], [*tokens[:6]], [9, opener, 7, 8, 5]):
        stepped = follower()
        for done in range(len(known) + 1):
            if known[:1] == [9] and done:
                break
            for drafts in (known[done : done + 3], known[done:], [opener, 5], []):
                for at in (follower(), stepped):
                    found = masks(at, known[:done], drafts)
                    assert found == slow_opened(known[:done], at.drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_may_lead_and_then_the_answer_follows(
    grammars: GrammarCompiler, kind: str, tokenizer: Tokenizer
):
    lead = "\n\n"
    led = replace(KINDS[kind], lead=lead)
    tokens = tokenizer.encode(lead, add_special_tokens=False)
    plain = slow(grammars, kind, ())
    first, *_ = masks(Follower(grammars, led), [], [])
    assert plain is not None
    assert plain < first
    (behind,) = masks(Follower(grammars, led), tokens, [])
    assert behind == plain


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"lark", "gbnf"}))
def test_alternative_grammar_may_replace_the_constraint(grammars: GrammarCompiler, kind: str):
    either = replace(KINDS[kind], instead=KINDS["lark"].grammar)
    follower = Follower(grammars, either)
    lark, own = slow(grammars, "lark", ()), slow(grammars, kind, (), forced=False)
    assert lark
    assert own
    for followed in (kind, "lark", kind):
        tokens = walk(grammars, followed, 3)[:3]
        found = masks(follower, [], tokens)
        assert found[0] == lark | own
        assert found[1] == slow(grammars, followed, (tokens[0],), forced=False)


# the cache


@pytest.mark.parametrize("slots", [(0, 16), (0, 1)], ids=["one lane", "two lanes"])
def test_requests_of_one_grammar_share_no_state(grammars: GrammarCompiler, slots: tuple[int, int]):
    tokens = walk(grammars, "json", 1)
    first, second = slots
    state = GrammarState(grammars)
    state.admit(first, KINDS["json"])
    state.advance(first, tokens[:5])
    walk_along(state, [first], [tokens[5:8]])
    state.admit(second, KINDS["json"])
    wanted = {first: slow_masks(grammars, "json", tokens[:5], tokens[:3])}
    wanted[second] = slow_masks(grammars, "json", [], tokens[:3])
    for order in ([second], [first], [second, first], [first, second]):
        step = walk_along(state, order, [tokens[:3]] * len(order))
        for slot, drafts, rows in zip(order, step.drafts, step.masks, strict=True):
            output = tokens[:5] if slot == first else []
            found = [allowed(row) for row in rows]
            assert found == slow_masks(grammars, "json", output, drafts)
            assert drafts != tokens[:3] or found == wanted[slot]
    state.advance(second, tokens[:2])
    found = walk_along(state, [first], [[]]).masks[0]
    assert [allowed(row) for row in found] == slow_masks(grammars, "json", tokens[:5], [])


def test_drafts_of_different_lengths_walk_in_one_step(grammars: GrammarCompiler):
    """Rows beyond a slot's own are free."""
    state, kinds = GrammarState(grammars), list(KINDS)
    tokens = [walk(grammars, kind, 8) for kind in kinds]
    for slot, kind in enumerate(kinds):
        state.admit(slot, KINDS[kind], tokens[slot][:slot])
    drafts = [t[slot : slot + slot % 4 + 1] for slot, t in enumerate(tokens)]
    step = walk_along(state, range(len(kinds)), drafts)
    assert step.drafts == drafts
    for slot, (kind, rows) in enumerate(zip(kinds, step.masks, strict=True)):
        wanted = slow_masks(grammars, kind, tokens[slot][:slot], drafts[slot])
        free = [EVERY] * (len(rows) - len(wanted))
        assert [allowed(row) for row in rows] == wanted + free


def test_a_grammar_is_compiled_once_and_the_oldest_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
):
    made: list[str] = []

    def counting(tokenizer: Any, source: str, **options: Any) -> LLMatcher:
        made.append(source)
        return LLMatcher(tokenizer, source, **options)

    monkeypatch.setattr("strobe.grammars.source.LLMatcher", Counting(counting))
    monkeypatch.setattr("strobe.sampling.grammar_compiler._MAX_CACHED", 3)
    monkeypatch.setattr("strobe.sampling.grammar_compiler._QUICK_SECONDS", 60.0)
    grammars = GrammarCompiler(FILE, VOCAB, [2])

    def compiled(*letters: str, lane: int = 0) -> int:
        before = len(made)
        for letter in letters:
            matcher = grammars.compile(StructuredOutputs(regex=letter), lane)
            assert len(allowed(matcher.compute_bitmask())) == 1
        return len(made) - before

    assert compiled("a", "b", "c", "a") == 3
    assert compiled("d") == 1
    assert compiled("a", "c", "d") == 0
    assert compiled("b") == 1
    assert compiled("a") == 1
    assert compiled("a", lane=1) == 1
    assert compiled("a", lane=1) == compiled("a") == 0
    monkeypatch.setattr("strobe.sampling.grammar_compiler._QUICK_SECONDS", 0.0)
    assert compiled("a", lane=2) == 0


class Counting:
    """LLMatcher with a constructor that is watched."""

    def __init__(self, make: Callable[..., LLMatcher]):
        self.make = make

    def __call__(self, *args: Any, **options: Any) -> LLMatcher:
        return self.make(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(LLMatcher, name)


def test_threads_may_compile_while_requests_are_followed():
    grammars = GrammarCompiler(FILE, VOCAB, sorted(ENDS))
    start = threading.Barrier(4)

    def work(number: int) -> list[list[frozenset[int]]]:
        start.wait(30)
        found = []
        for i in range(12):
            kind = list(KINDS)[(number + i) % len(KINDS)]
            follower = Follower(grammars, KINDS[kind])
            found.append([kind, masks(follower, [], [])[0]])
        return found

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, number) for number in range(4)]
        for result in results:
            for kind, mask in result.result(60):
                assert mask == slow(grammars, kind, ())


@pytest.mark.parametrize("form", [{"json": SCHEMA}, {"json_object": True}])
def test_json_whitespace_is_usual_and_bounded(
    grammars: GrammarCompiler, tokenizer: Tokenizer, form: dict[str, Any]
):
    def fits(text: str) -> bool:
        matcher = LLMatcher(
            grammars.tokenizer, grammar_source(StructuredOutputs(**form)), log_level=0
        )
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    value = {"name": "ab", "size": 12}
    for layout in ({}, {"indent": 2}, {"indent": 40}, {"indent": "\t"}, {"separators": (",", ":")}):
        assert fits(json.dumps(value, **layout)), layout
    for gap in ("\n\n", "  ", "\n" + " " * 41, "\n\t\n"):
        assert not fits(json.dumps(value).replace(": ", f":{gap}")), gap
