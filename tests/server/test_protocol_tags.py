"""Structural tags, banned words and the limit of the reasoning, as requests hold them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer

from strobe.grammars.rules import Tag, text_with_tags
from strobe.grammars.source import grammar_source, lark, make_matcher
from strobe.sampling_params import StructuredOutputs
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.sampling_fields import SamplingFields
from strobe.server.schema.structural_tags import tags_grammar
from tests.server.support.request_bodies import GENERATING, SCHEMA, chat, refusal

STRUCTURE = {"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}
OLD = {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<f", "<f="]}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
NEW_TAG = {"type": "tag", "begin": "<f=add>", "content": CONTENT, "end": "</f>"}
FORMAT = {"type": "triggered_tags", "triggers": ["<f", "<f="], "tags": [NEW_TAG]}
NEW = {"type": "structural_tag", "format": FORMAT}
LARK = 'start: "x" one\none: /[0-9]/'


@pytest.mark.parametrize("tags", [OLD, NEW])
@pytest.mark.parametrize("as_text", [False, True])
def test_structural_tags_are_read(tags: dict[str, Any], as_text: bool):
    read = [Tag("<f=", "<f=add>", SCHEMA, "</f>")]
    given = {"structural_tag": json.dumps(tags) if as_text else tags}
    request = chat(structured_outputs=given)
    assert request.sampling.arguments({})["structured_outputs"] == {"structural_tag": read}
    formatted = chat(response_format=tags)
    assert formatted.sampling.arguments({})["structured_outputs"] == {"structural_tag": read}


@pytest.mark.parametrize(
    ("content", "allowed", "refused"),
    [
        ({"type": "regex", "pattern": "[a/}]{2}"}, "<f=add>/}</f>", "<f=add>b"),
        (
            {"type": "grammar", "grammar": 'start: "x" one\none: /[0-9]/'},
            "<f=add>x7</f> so",
            "<f=add>7",
        ),
        ({"type": "grammar", "grammar": 'root ::= "y"+'}, "<f=add>yy</f>", "<f=add>x"),
    ],
)
def test_tags_hold_regular_expressions_and_grammars(
    content: dict[str, Any], allowed: str, refused: str
):
    tags = {**NEW, "format": {**FORMAT, "tags": [{**NEW_TAG, "content": content}]}}
    structured = chat(response_format=tags).sampling.structured_outputs
    assert structured is not None
    given = structured["structural_tag"]
    grammar = StructuredOutputs(grammar=text_with_tags(given, {}, lark))
    tokenizer = LLTokenizer("byte")
    for text, fits in ((f"First {allowed}", True), (f"First {refused}", False)):
        matcher = make_matcher(tokenizer, grammar_source(grammar))
        assert matcher.consume_tokens(tokenizer.tokenize_str(text)) == fits, matcher.get_error()


def test_content_that_is_no_grammar_is_refused():
    tag = Tag("<f", "<f>", ("grammar", "0"), "")
    with pytest.raises(FieldError, match=r"^The content of a structural tag is no grammar: "):
        tags_grammar([tag], {})


@pytest.mark.parametrize(
    ("tags", "param"),
    [
        ({**OLD, **NEW}, ""),
        ({**OLD, "triggers": ["<g"]}, ".structures[0].begin"),
        ({**OLD, "triggers": [3]}, ".triggers[0]"),
        ({**OLD, "structures": []}, ".structures"),
        ({**OLD, "structures": [{**STRUCTURE, "schema": "x"}]}, ".structures[0].schema"),
        ({**OLD, "structures": [{**STRUCTURE, "begin": ""}]}, ".structures[0].begin"),
        ({**OLD, "structures": [{**STRUCTURE, "end": 1}]}, ".structures[0].end"),
        ({**NEW, "format": {**FORMAT, "type": "sequence"}}, ".format.type"),
        ({**NEW, "format": {**FORMAT, "at_least_one": True}}, ".format.at_least_one"),
        ({**NEW, "format": {**FORMAT, "tags": [{**NEW_TAG, "type": 1}]}}, ".format.tags[0].type"),
        ({**NEW, "format": {**FORMAT, "tags": [{**NEW_TAG, "content": {"type": "regex"}}]}},
         ".format.tags[0].content.pattern"),
        ({**NEW, "format": {**FORMAT, "tags": [{**NEW_TAG, "content": {"type": "any_text"}}]}},
         ".format.tags[0].content.type"),
    ],
)  # fmt: skip
def test_invalid_structural_tag(tags: dict[str, Any], param: str):
    error = refusal(ChatCompletionRequest, response_format=tags)
    assert error.param == f"response_format{param}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["a", 1]}, "bad_words[1]"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 65}, "bad_words"),
        ({"bad_words": ["a" * 1001]}, "bad_words"),
        ({"bad_words": ["a"], "guided_regex": "b"}, "bad_words"),
        ({"bad_words": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "ignore_eos": True}, "ignore_eos"),
        ({"thinking_budget": 5}, "thinking_budget"),
    ],
)
@pytest.mark.parametrize("model", GENERATING)
def test_invalid_limits_of_an_answer(
    model: type[SamplingFields], fields: dict[str, Any], param: str
):
    assert refusal(model, **fields).param == param


def test_empty_and_unlimited_fields_change_nothing():
    request = chat(bad_words=[], thinking_token_budget=-1, ignore_eos=True, min_tokens=3)
    assert request.sampling.thinking_budget is None
    assert "structured_outputs" not in request.sampling.arguments({})
    assert chat(bad_words="a", min_tokens=3).warnings() == []
