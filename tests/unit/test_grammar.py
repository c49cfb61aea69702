"""Grammar masks along drafts, compared with a fresh matcher that reads one token after another."""

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
from llguidance import LLMatcher

from strobe.config import DEMO_MODELS
from strobe.sampling.grammar import GrammarState
from strobe.sampling.grammar_compiler import GrammarCompiler, grammar_source
from strobe.sampling_params import StructuredOutputs
from strobe.text.tokenizer import Tokenizer
from tests.support.grammar_walk import walk as walk_along

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
    """Return the token ids that one row's mask allows."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[:VOCAB]).tolist())


@cache
def slow(
    grammars: GrammarCompiler, kind: str, tokens: tuple[int, ...], *, forced: bool = True
) -> frozenset[int] | None:
    """Return the token ids that a fresh matcher allows after `tokens`; None if `tokens` is illegal.
    After the end only end tokens are allowed. forced: where the grammar leaves one text, allow only
    the tokenizer's own tokens of it."""
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
    """Return each row's mask, computed from scratch; rows before the marker and after illegal
    drafts allow every token."""
    known, size, rows = [*output, *drafts], len(after), list[frozenset[int]]()
    for end in range(len(output), len(known) + 1):
        begins = [i for i in range(size, end + 1) if known[i - size : i] == list(after)]
        mask = slow(grammars, kind, tuple(known[begins[0] : end])) if begins else EVERY
        rows.append(EVERY if mask is None else mask)
    return rows


class GrammarSlot:
    """One slot of a GrammarState."""

    def __init__(self, grammars: GrammarCompiler, structured: StructuredOutputs):
        self.state, self.done = GrammarState(grammars), 0
        self.state.admit(3, structured)
        self.drafts: list[int] = []


def masks(slot: GrammarSlot, output: Sequence[int], drafts: Sequence[int]) -> list[frozenset[int]]:
    """Return the rows' masks and store the step's drafts in `slot.drafts`. Only an illegal draft
    may be replaced, and only by a legal one."""
    assert slot.state.advance(3, output[slot.done :]) is None
    slot.done = len(output)
    original = list(drafts)
    step = walk_along(slot.state, [3], [drafts])
    assert not step.errors
    assert list(drafts) == original
    assert (step.masks.shape, step.masks.dtype) == ((1, 1 + len(drafts), WORDS), np.int32)
    rows = [allowed(row) for row in step.masks[0]]
    (slot.drafts,) = step.drafts
    assert len(slot.drafts) == len(original)
    changed = [i for i, (a, b) in enumerate(zip(slot.drafts, original, strict=True)) if a != b]
    if changed:
        assert original[changed[0]] not in rows[changed[0]]
        assert slot.drafts[changed[0]] in rows[changed[0]]
    return rows


def walk(grammars: GrammarCompiler, kind: str, seed: int, max_tokens: int = 14) -> list[int]:
    """Return random legal tokens, up to an end token if one comes."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < max_tokens and not ENDS & set(tokens):
        mask = slow(grammars, kind, tuple(tokens))
        assert mask
        ends = sorted(mask & ENDS)
        others = sorted(mask - ENDS)
        tokens.append(rng.choice(ends if ends and (not others or rng.random() < 0.3) else others))
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
        slot = GrammarSlot(grammars, KINDS[kind])
        for drafts in ([], tokens[done : done + 1], tokens[done : done + 7]):
            rows = masks(slot, tokens[:done], drafts)
            assert rows == slow_masks(grammars, kind, tokens[:done], drafts)
            assert all(draft in mask for draft, mask in zip(drafts, rows, strict=False))


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_masked_after_an_illegal_draft(grammars: GrammarCompiler, kind: str):
    rng = random.Random(kind)
    tokens = walk(grammars, kind, 11)
    slot = GrammarSlot(grammars, KINDS[kind])
    drafts = tokens[:6]
    for position in range(len(drafts)):
        wrong = illegal(grammars, kind, drafts[:position], rng)
        changed = [*drafts[:position], wrong, *drafts[position + 1 :]]
        rows = masks(slot, [], changed)
        assert rows == slow_masks(grammars, kind, [], slot.drafts)
        assert wrong not in rows[position]
        if slot.drafts == changed:
            assert rows[position + 1 :] == [EVERY] * (len(drafts) - position)


@pytest.mark.parametrize("kind", KINDS)
def test_walking_drafts_does_not_move_the_position(grammars: GrammarCompiler, kind: str):
    """Walks the same drafts twice, then others, then commits some of them."""
    rng = random.Random(3)
    tokens = walk(grammars, kind, 5, max_tokens=12)
    slot = GrammarSlot(grammars, KINDS[kind])
    done = 0
    while done <= len(tokens):
        drafts = tokens[done : done + 5]
        wrong = [*drafts[:2], illegal(grammars, kind, tokens[: done + len(drafts[:2])], rng), 9]
        for proposed in (drafts, drafts, wrong, drafts, [EOS, EOS]):
            rows = masks(slot, tokens[:done], proposed)
            assert rows == slow_masks(grammars, kind, tokens[:done], slot.drafts)
        done += rng.randint(1, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_catching_up_in_pieces_equals_token_by_token(grammars: GrammarCompiler, kind: str):
    tokens = walk(grammars, kind, 7)
    expected = slow_masks(grammars, kind, tokens, [])
    for size in (1, 2, 5, len(tokens)):
        slot = GrammarSlot(grammars, KINDS[kind])
        for end in range(size, len(tokens), size):
            masks(slot, tokens[:end], tokens[end : end + 2])
        assert masks(slot, tokens, []) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_only_end_follows_the_end(grammars: GrammarCompiler, kind: str):
    """Holds for drafts and committed tokens; min_tokens may extend an answer past the end."""
    tokens = next(t for s in range(99) if (t := walk(grammars, kind, s, max_tokens=60))[-1] in ENDS)
    slot = GrammarSlot(grammars, KINDS[kind])
    answer = tokens[:-1]
    assert tokens[-1] in masks(slot, answer, [])[0]
    assert masks(slot, answer, [EOS, EOS, 0, 5, EOS])[1:] == [{*ENDS}] * 3 + [EVERY] * 2
    assert masks(slot, [*answer, EOS], [EOS, 0])[:] == [{*ENDS}] * 3
    assert masks(slot, [*answer, EOS, EOS, 0], []) == [{*ENDS}]


@pytest.mark.parametrize("kind", KINDS)
def test_completed_walk_matches_the_grammar(
    grammars: GrammarCompiler, kind: str, tokenizer: Tokenizer
):
    texts = set[str]()
    for seed in range(20):
        tokens = walk(grammars, kind, seed, max_tokens=50)
        if tokens[-1] in ENDS:
            texts.add(tokenizer.decode(tokens))
    assert texts
    assert all(FITS[kind](text) for text in texts), texts


def test_equal_lark_and_gbnf_allow_the_same(grammars: GrammarCompiler):
    tokens = walk(grammars, "lark", 2)
    assert slow_masks(grammars, "lark", [], tokens) == slow_masks(grammars, "gbnf", [], tokens)


MARKERS = [(7,), (7, 8), (7, 7, 8)]


@pytest.mark.parametrize("think_end", MARKERS, ids=str)
@pytest.mark.parametrize("kind", ["json", "choice"])
def test_marker_starts_the_grammar_at_any_position(
    grammars: GrammarCompiler, kind: str, think_end: tuple[int, ...]
):
    """The marker may lie in committed tokens, in drafts, or span both."""
    thinking, tokens = [20, 8, 21, *think_end[:-1]], walk(grammars, kind, 4)
    known = [*thinking, *think_end, *tokens[:4]]
    for done in range(len(known) + 1):
        slot = GrammarSlot(grammars, replace(KINDS[kind], think_end=think_end))
        for drafts in (known[done : done + 3], known[done:], [9, 9], known[done:]):
            rows = masks(slot, known[:done], drafts)
            assert rows == slow_masks(grammars, kind, known[:done], slot.drafts, think_end)
    slot = GrammarSlot(grammars, replace(KINDS[kind], think_end=think_end))
    for done in range(len(known) + 1):
        expected = slow_masks(grammars, kind, known[:done], known[done : done + 4], think_end)
        assert masks(slot, known[:done], known[done : done + 4]) == expected
    assert slow(grammars, kind, ()) in expected + slow_masks(grammars, kind, [], known, think_end)


def test_all_tokens_are_allowed_before_the_marker(grammars: GrammarCompiler):
    slot = GrammarSlot(grammars, replace(KINDS["choice"], think_end=(7, 8)))
    assert masks(slot, [7, 9, 8], [EOS, 5, 8]) == [EVERY] * 4
    assert masks(slot, [7, 9, 8, 7, 8], []) == [slow(grammars, "choice", ())]


def test_marker_inside_the_answer_restarts_nothing(grammars: GrammarCompiler):
    tokens = walk(grammars, "lark", 6)
    marker = tokens[1]
    slot = GrammarSlot(grammars, replace(KINDS["lark"], think_end=(marker,)))
    rows = masks(slot, [marker], tokens[:4])
    assert rows == slow_masks(grammars, "lark", [], tokens[:4])


# grammars that do not compile or cannot go on

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
        {"choice": ["a"], "alternative": 'start: %json {"type": "hamster"}'},
        "does not compile: .*Invalid type: hamster.$",
    ),
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
    assert " | " not in text  # nothing of the grammar that the reader did not write


def test_request_leaving_its_grammar_ends_alone(grammars: GrammarCompiler):
    """Sampling cannot cause this; a broken matcher fails its request and not the step."""
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


def test_slot_without_a_grammar_allows_all_tokens(grammars: GrammarCompiler):
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
    """As after a preemption, in a slot that another request used before."""
    tokens = walk(grammars, "json", 3)
    state = GrammarState(grammars)
    state.admit(0, KINDS["choice"])
    state.admit(0, KINDS["json"], tokens[:6])
    rows = walk_along(state, [0], [tokens[6:9]]).masks[0]
    expected = slow_masks(grammars, "json", tokens[:6], tokens[6:9])
    assert [allowed(row) for row in rows] == expected


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
    reason = {"missing": "does not exist", "damaged": "error", "another vocabulary": "100"}[damage]
    assert reason in str(caught.value)
    assert str(caught.value).endswith(".")


def test_vocabulary_padding_is_never_allowed():
    grammars = GrammarState(GrammarCompiler(FILE, VOCAB + 40, sorted(ENDS)))
    grammars.admit(0, StructuredOutputs(regex="(.|\n)*"))
    (mask,) = walk_along(grammars, [0], [[]]).masks
    assert mask.shape == (1, WORDS + 2)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert bits[:VOCAB].sum() > VOCAB / 2
    assert not bits[VOCAB : VOCAB + 40].any()


# hostile grammars

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
    """Recursing 6,000 deep would overflow an ordinary stack."""
    slot = GrammarSlot(grammars, StructuredOutputs(**DEEP["rules"]))
    (mask,) = masks(slot, [], [])
    assert len(mask) == 1


@pytest.mark.parametrize("name", sorted(DEEP.keys() - {"rules"}))
def test_deep_nesting_is_rejected_in_one_short_sentence(grammars: GrammarCompiler, name: str):
    with pytest.raises(
        ValueError, match=r"^structured_outputs: the grammar does not compile: "
    ) as caught:
        grammars.compile(StructuredOutputs(**DEEP[name]))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("schema", [DEEP_SCHEMA, json.loads(DEEP_SCHEMA)], ids=["text", "object"])
def test_deep_schema_error_names_its_depth(grammars: GrammarCompiler, schema: Any):
    with pytest.raises(ValueError, match="nested too deeply: 151 levels, at most 124 are read"):
        grammars.compile(StructuredOutputs(json=schema))


def test_schema_of_the_allowed_depth_compiles(grammars: GrammarCompiler):
    grammars.compile(StructuredOutputs(json='{"items":' * 123 + "{}" + "}" * 123))


def test_oversized_grammar_is_rejected_with_its_size(grammars: GrammarCompiler):
    with pytest.raises(ValueError, match=r"holds 200\d\d\d characters, but at most 131072"):
        grammars.compile(StructuredOutputs(regex="a" * 200_000))


# thinking before the answer


@pytest.mark.parametrize("kind", ["json", "choice"])
def test_answer_may_start_with_or_without_thinking(grammars: GrammarCompiler, kind: str):
    """After the start every token is allowed up to the marker; without it the grammar applies."""
    think_start = 1
    think_end = (7, 8)
    tokens = walk(grammars, kind, 4)
    first = slow(grammars, kind, ())
    assert first is not None

    def slot() -> GrammarSlot:
        return GrammarSlot(
            grammars, replace(KINDS[kind], think_end=think_end, think_start=think_start)
        )

    def slow_opened(output: list[int], drafts: list[int]) -> list[frozenset[int]]:
        known = [*output, *drafts]
        begun = known[:1] == [think_start] and bool(output)
        if begun:
            return slow_masks(grammars, kind, output[1:], drafts, think_end)
        if known[:1] == [think_start]:
            return [first | {think_start}, *slow_masks(grammars, kind, [], drafts[1:], think_end)]
        rows = slow_masks(grammars, kind, output, drafts)
        return rows if output else [rows[0] | {think_start}, *rows[1:]]

    for known in (
        [think_start, 20, 7, 7, 8, *tokens[:4]],
        [*tokens[:6]],
        [9, think_start, 7, 8, 5],
    ):
        stepped = slot()
        for done in range(len(known) + 1):
            if known[:1] == [9] and done:
                break
            for drafts in (known[done : done + 3], known[done:], [think_start, 5], []):
                for at in (slot(), stepped):
                    rows = masks(at, known[:done], drafts)
                    assert rows == slow_opened(known[:done], at.drafts)


@pytest.mark.parametrize("max_thinking", [0, 1, 3])
@pytest.mark.parametrize("think_start", [None, 1])
@pytest.mark.parametrize("kind", ["json", "choice", "lark"])
def test_limit_ends_the_thinking(
    grammars: GrammarCompiler, kind: str, think_start: int | None, max_thinking: int
):
    """Drafts beyond the limit are replaced by the marker; the grammar applies after it."""
    think_end = (7, 8)
    tokens = walk(grammars, kind, 4)
    limited = replace(
        KINDS[kind], think_end=think_end, think_start=think_start, max_thinking=max_thinking
    )
    begun = [] if think_start is None else [think_start]
    thoughts = [20, 21, 22][:max_thinking]
    slot = GrammarSlot(grammars, limited)
    rows = masks(slot, [], [*begun, *thoughts, 30, 31])
    assert slot.drafts[: len(begun) + max_thinking + 1] == [*begun, *thoughts, 7]
    for row in rows[len(begun) : len(begun) + max_thinking]:
        assert row == EVERY
    assert rows[len(begun) + max_thinking] == {7}
    if think_start is not None:
        assert think_start in rows[0]
        allowed = slow(grammars, kind, (), forced=False) or set()
        assert rows[0] - {think_start} == allowed - {think_start}
    for count in range(max_thinking + 1):  # thinking may also end earlier
        known = [*begun, *thoughts[:count], *think_end]
        (first,) = masks(GrammarSlot(grammars, limited), known, [])
        assert first == slow(grammars, kind, (), forced=False)
        (later,) = masks(GrammarSlot(grammars, limited), [*known, *tokens[:3]], [])
        assert later == slow(grammars, kind, tuple(tokens[:3]), forced=False)


def test_max_thinking_without_its_end_is_an_error(grammars: GrammarCompiler):
    with pytest.raises(ValueError, match="max_thinking is 3, but nothing in think_end"):
        grammars.compile(replace(KINDS["json"], max_thinking=3))


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_may_precede_the_answer(grammars: GrammarCompiler, kind: str, tokenizer: Tokenizer):
    prefix = "\n\n"
    prefixed = replace(KINDS[kind], prefix=prefix)
    tokens = tokenizer.encode(prefix, add_special_tokens=False)
    plain = slow(grammars, kind, ())
    first, *_ = masks(GrammarSlot(grammars, prefixed), [], [])
    assert plain is not None
    assert plain < first
    (after_prefix,) = masks(GrammarSlot(grammars, prefixed), tokens, [])
    assert after_prefix == plain


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"lark", "gbnf"}))
def test_alternative_grammar_may_replace_the_constraint(grammars: GrammarCompiler, kind: str):
    either = replace(KINDS[kind], alternative=KINDS["lark"].grammar)
    slot = GrammarSlot(grammars, either)
    lark, own = slow(grammars, "lark", ()), slow(grammars, kind, (), forced=False)
    assert lark
    assert own
    for followed in (kind, "lark", kind):
        tokens = walk(grammars, followed, 3)[:3]
        rows = masks(slot, [], tokens)
        assert rows[0] == lark | own
        assert rows[1] == slow(grammars, followed, (tokens[0],), forced=False)


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
    expected = {first: slow_masks(grammars, "json", tokens[:5], tokens[:3])}
    expected[second] = slow_masks(grammars, "json", [], tokens[:3])
    for order in ([second], [first], [second, first], [first, second]):
        step = walk_along(state, order, [tokens[:3]] * len(order))
        for slot, drafts, rows in zip(order, step.drafts, step.masks, strict=True):
            output = tokens[:5] if slot == first else []
            token_sets = [allowed(row) for row in rows]
            assert token_sets == slow_masks(grammars, "json", output, drafts)
            assert drafts != tokens[:3] or token_sets == expected[slot]
    state.advance(second, tokens[:2])
    token_sets = walk_along(state, [first], [[]]).masks[0]
    assert [allowed(row) for row in token_sets] == slow_masks(grammars, "json", tokens[:5], [])


def test_drafts_of_different_lengths_walk_in_one_step(grammars: GrammarCompiler):
    """Rows past a slot's own drafts allow every token."""
    state, kinds = GrammarState(grammars), list(KINDS)
    tokens = [walk(grammars, kind, 8) for kind in kinds]
    for slot, kind in enumerate(kinds):
        state.admit(slot, KINDS[kind], tokens[slot][:slot])
    drafts = [t[slot : slot + slot % 4 + 1] for slot, t in enumerate(tokens)]
    step = walk_along(state, range(len(kinds)), drafts)
    assert step.drafts == drafts
    for slot, (kind, rows) in enumerate(zip(kinds, step.masks, strict=True)):
        expected = slow_masks(grammars, kind, tokens[slot][:slot], drafts[slot])
        free = [EVERY] * (len(rows) - len(expected))
        assert [allowed(row) for row in rows] == expected + free


def test_compiled_grammars_are_cached_and_the_oldest_evicted(
    monkeypatch: pytest.MonkeyPatch,
):
    sources: list[str] = []

    def counting(tokenizer: Any, source: str, **options: Any) -> LLMatcher:
        sources.append(source)
        return LLMatcher(tokenizer, source, **options)

    monkeypatch.setattr("strobe.grammars.source.LLMatcher", Counting(counting))
    monkeypatch.setattr("strobe.sampling.grammar_compiler._MAX_CACHED", 3)
    monkeypatch.setattr("strobe.sampling.grammar_compiler._QUICK_SECONDS", 60.0)
    grammars = GrammarCompiler(FILE, VOCAB, [2])

    def compiled(*letters: str, lane: int = 0) -> int:
        before = len(sources)
        for letter in letters:
            matcher = grammars.compile(StructuredOutputs(regex=letter), lane)
            assert len(allowed(matcher.compute_bitmask())) == 1
        return len(sources) - before

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
    """LLMatcher whose constructor calls are recorded."""

    def __init__(self, make: Callable[..., LLMatcher]):
        self.make = make

    def __call__(self, *args: Any, **options: Any) -> LLMatcher:
        return self.make(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(LLMatcher, name)


def test_grammars_compile_in_several_threads_at_once():
    grammars = GrammarCompiler(FILE, VOCAB, sorted(ENDS))
    start = threading.Barrier(4)

    def work(number: int) -> list[list[frozenset[int]]]:
        start.wait(30)
        first_masks = []
        for i in range(12):
            kind = list(KINDS)[(number + i) % len(KINDS)]
            slot = GrammarSlot(grammars, KINDS[kind])
            first_masks.append([kind, masks(slot, [], [])[0]])
        return first_masks

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
    for layout in ({}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}):
        assert fits(json.dumps(value, **layout)), layout
    for gap in ("\n\n", "  ", "\n" + " " * 21, "\n\t\n", "\n\t "):
        assert not fits(json.dumps(value).replace(": ", f":{gap}")), gap
