r"""JSON schemas, regular expressions and choices as clients send them, compiled by llguidance."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.grammars.json_schema import enforceable
from strobe.grammars.source import unenforced
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    compiler = GrammarCompiler(DEMO_MODELS / "target" / "tokenizer.json", 2048, [2])
    compiler.trial.seconds = None
    return compiler


def fits(grammars: GrammarCompiler, text: str, **fields: Any) -> bool:
    """Whether a text is a whole answer."""
    matcher = grammars.compile(StructuredOutputs(**fields))
    tokens = grammars.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
PAIR = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "$defs": {
        "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
        "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
    },
}
OPTIONAL = json.loads(json.dumps(PAIR).replace('"required": ["kind"]', '"title": "x"'))

ENFORCED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "null keywords": (
        {"type": "array", "items": INTEGER, "maxItems": None, "enum": None, "not": None},
        [[], [1, 2]],
        ["a"],
    ),
    "null in data": ({"enum": ["a", None], "const": None}, [None], ["a"]),
    "nullable": ({"type": "integer", "nullable": True}, [3, None], ["a"]),
    "names are strings": ({"type": "object", "propertyNames": TEXT}, [{"a": 1}], [1]),
    "names of an enum": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/Color"},
         "additionalProperties": INTEGER, "$defs": {"Color": {"enum": ["red", "blue"]}}},
        [{}, {"red": 1}], [{"green": 1}, {"red": "a"}],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^a"}}, [{"ab": 1}], [{"b": 1}],
    ),
    "short names": (
        {"type": "object", "propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}],
    ),
    "not anything": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": INTEGER}},
        [{"b": 1}], [{"a": 1}],
    ),
    "not a type": ({"not": {"type": ["string", "object"]}}, [1, [], None], ["a", {}]),
    "not numbers": ({"not": {"type": "number"}}, ["a"], [1, 1.5]),
    "not a value": ({"enum": [1, 2, 3], "not": {"const": 2}}, [1, 3], [2]),
    "items may repeat": ({"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    "contains anything": ({"type": "array", "contains": {}}, [[1]], [[]]),
    "contains its items": (
        {"type": "array", "items": INTEGER, "contains": INTEGER, "minContains": 2},
        [[1, 2]], [[1]],
    ),
    "contains nothing": ({"type": "array", "contains": INTEGER, "minContains": 0}, [[]], [1]),
    "unevaluated": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False},
        [{"a": 1}], [{"b": 1}],
    ),
    "disjoint by a name": (PAIR, [{"kind": "cat"}], [{"kind": "cow"}]),
    "disjoint by type": ({"oneOf": [TEXT, {"type": "array"}]}, ["a", []], [1]),
    "disjoint by undeclared names": (
        {"oneOf": [{"type": "object", "properties": {k: INTEGER}, "required": [k],
                    "additionalProperties": False} for k in "ab"]},
        [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}],
    ),
}  # fmt: skip
"""Schemas, values that fit and values that do not."""


@pytest.mark.parametrize("name", ENFORCED)
def test_schema_keyword_is_enforced(grammars: GrammarCompiler, name: str):
    schema, right, wrong = ENFORCED[name]
    assert enforceable(schema).dropped == ()
    assert all(fits(grammars, json.dumps(value), json=schema) for value in right)
    assert not any(fits(grammars, json.dumps(value), json=schema) for value in wrong)


UNENFORCED: dict[str, Any] = {
    "format": {"type": "string", "format": "phone"},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": INTEGER},
    "not": {"type": "string", "not": {"pattern": "a"}},
    "if": {"if": TEXT, "then": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "propertyNames": {"type": "object", "propertyNames": {"format": "email"}},
    "oneOf": {"oneOf": [INTEGER, {"type": "number"}]},
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_schema_keyword_that_cannot_be_enforced_is_named(
    grammars: GrammarCompiler, name: str, caplog: pytest.LogCaptureFixture
):
    schema = {"type": "array", "items": UNENFORCED[name], "maxItems": 3}
    with caplog.at_level(logging.WARNING, logger="strobe"):
        grammars.compile(StructuredOutputs(json=schema))
    assert f"are not enforced: {name}" in caplog.text
    assert unenforced(StructuredOutputs(json=json.dumps(schema))) == [name]
    assert name in unenforced(StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}"))
    assert fits(grammars, "[]", grammar=f"start: %json {json.dumps(schema)} /x?/")


def test_one_of_that_overlaps_is_read_as_any_of(grammars: GrammarCompiler):
    assert enforceable(OPTIONAL).dropped == ("oneOf",)
    assert fits(grammars, '{"kind": "cat"}', json=OPTIONAL)
    assert not fits(grammars, '{"kind": "cow"}', json=OPTIONAL)


def test_properties_may_have_the_names_of_keywords(grammars: GrammarCompiler):
    schema = {
        "type": "object",
        "properties": {"not": INTEGER, "uniqueItems": TEXT},
        "required": ["not", "uniqueItems"],
        "default": {"contains": None},
        "additionalProperties": False,
    }
    assert enforceable(schema) == (schema, ())
    assert fits(grammars, '{"not": 1, "uniqueItems": "a"}', json=schema)


@pytest.mark.parametrize("pattern", [r"\d", r"[\d]", r"(?i)\d", r"\w", r"[\w]", r"(x|\d)"])
def test_digits_of_regular_expressions_are_ascii(grammars: GrammarCompiler, pattern: str):
    for fields in ({"regex": pattern}, {"grammar": f"start: /{pattern}/"}):
        assert fits(grammars, "7", **fields)
        assert not fits(grammars, "\u0667", **fields)
        assert not fits(grammars, "\U0001fbf8", **fields)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\w+", "a_9"), (r"\s", "\t"), (r"\S\D\W", "\u00e9x\u00e9"), (r"[^\w]", "\u00e9"),
        (r"[]\d]+", "]1"), (r"[[a]\d-]+", "a1-"), (r"\\d", r"\d"), (r"\[\d", "[3"),
        (r"(?u)\d", "\u0667"), (r"(?u:\d)\d", "\u06677"), (r"\p{Nd}", "\u0667"),
    ],
)  # fmt: skip
def test_other_classes_keep_their_meaning(grammars: GrammarCompiler, pattern: str, text: str):
    assert fits(grammars, text, regex=pattern)


def test_unicode_ends_with_its_group(grammars: GrammarCompiler):
    assert not fits(grammars, "\u0667\u0667", regex=r"(?u:\d)\d")
    assert not fits(grammars, "\u0667\u0667", regex=r"(a?(?u)\d)\d")
    assert not fits(grammars, "\u00e9", regex=r"\w")


def test_lark_text_and_comments_are_no_regular_expressions(grammars: GrammarCompiler):
    grammar = 'start: "/\\\\d/" DIGIT // /\\d/\nDIGIT: /\\d\\//u | "#" /\\d/'
    assert fits(grammars, "/\\d/\u0667/", grammar=grammar)
    assert fits(grammars, "/\\d/#7", grammar=grammar)
    assert not fits(grammars, "/\\d/#\u0667", grammar=grammar)


def test_thousands_of_choices_and_alternatives_compile(grammars: GrammarCompiler):
    texts = [f"item {number}" for number in range(5000)]
    alternatives = " | ".join(map(json.dumps, texts))
    for fields in (
        {"choice": texts},
        {"grammar": f"start: {alternatives}"},
        {"grammar": f"root ::= {alternatives}"},
        {"json": {"enum": texts}},
    ):
        quote = '"' if "json" in fields else ""
        assert fits(grammars, f"{quote}item 4999{quote}", **fields)
        assert not fits(grammars, f"{quote}item 5000{quote}", **fields)


DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/B"}}},
        "$defs": {"B": {"type": "object", "properties": {"b": INTEGER}}}}  # fmt: skip
TREE = {"type": "object", "properties": {"part": {"$ref": "#"}, "n": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "begin", "end", "spaces"),
    [
        ({"type": "array", "items": INTEGER}, "[", "1]", 4),
        ({"type": "object", "properties": {"a": INTEGER}}, "{", "}", 4),
        (DEEP, '{"a": [{', '"b": 1}]}', 12),
        ({"type": "object"}, "{", "}", 20),
        (TREE, "{", "}", 24),
    ],
)
def test_json_may_be_indented_by_the_depth_of_its_schema(
    grammars: GrammarCompiler, schema: Any, begin: str, end: str, spaces: int
):
    for gap in ("", " ", "\n", "\n" + " " * spaces, "\n" + "\t" * (spaces // 4)):
        assert fits(grammars, begin + gap + end, json=schema)
    for gap in ("  ", "\t", "\n" + " " * (spaces + 1), "\n" + "\t" * (spaces // 4 + 1)):
        assert not fits(grammars, begin + gap + end, json=schema)


def test_whitespace_of_a_schema_in_lark_is_bounded(grammars: GrammarCompiler):
    grammar = f"start: %json {json.dumps(DEEP)}"
    assert fits(grammars, '{"a":\n[]}', grammar=grammar)
    assert not fits(grammars, '{"a":\n\n[]}', grammar=grammar)


def test_not_keeps_what_cannot_be_enforced_within_it(grammars: GrammarCompiler):
    schema = {"type": "array", "not": {"uniqueItems": True}}
    assert enforceable(schema).dropped == ("not",)
    assert fits(grammars, "[1]", json=schema)
