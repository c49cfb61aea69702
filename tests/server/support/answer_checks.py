"""Checks of a request's answers, whichever way they were served."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from pydantic import TypeAdapter

from tests.server.support.outcomes import AnswerResult, Outcome

Check = Callable[[Outcome], None]


def anything(outcome: Outcome) -> None:
    """Accept any answer."""


def check_body(shape: Any, body: object) -> None:
    """Check that a response is of a type of the server, and has no field that the type lacks."""
    assert TypeAdapter[object](shape).validate_python(body) == body


def each(check: Callable[[AnswerResult], None]) -> Check:
    """Apply a check to every answer."""

    def checks(outcome: Outcome) -> None:
        for answer in outcome.choices:
            check(answer)

    return checks


def ends(reason: str, stop: Any = None, tokens: int | None = None) -> Check:
    def check(answer: AnswerResult) -> None:
        assert (answer.finish_reason, answer.stop_reason) == (reason, stop)
        assert tokens in (None, len(answer.token_ids))

    return each(check)


def stops_at(*texts: str) -> Check:
    """Check that a stop text ended the answer and is not in it."""

    def check(answer: AnswerResult) -> None:
        assert answer.finish_reason == "stop"
        assert answer.stop_reason in texts
        assert not any(text in answer.text for text in texts)

    return each(check)


def answers(count: int) -> Check:
    """Check the number of answers."""

    def check(outcome: Outcome) -> None:
        assert len(outcome.choices) == count

    return check


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value follows a schema; supports only the keywords used here."""
    kinds: dict[str, Any] = {
        "object": dict, "array": list, "string": str, "integer": int, "number": int | float,
        "boolean": bool,
    }  # fmt: skip
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if not isinstance(value, kinds[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return False
    if kind == "array":
        return len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
    if kind == "string":
        return len(value) <= schema.get("maxLength", len(value))
    properties = schema.get("properties", {}) if kind == "object" else {}
    if kind != "object" or not properties:
        return True
    if schema.get("additionalProperties") is False and not value.keys() <= properties.keys():
        return False
    return set(schema.get("required", ())) <= value.keys() and all(
        fits(item, properties[name]) for name, item in value.items() if name in properties
    )


def is_json(schema: dict[str, Any]) -> Check:
    def check(answer: AnswerResult) -> None:
        assert answer.finish_reason == "stop"
        value = json.loads(answer.text)
        assert isinstance(value, dict)
        assert fits(value, schema), value

    return each(check)


def matches(pattern: str) -> Check:
    def check(answer: AnswerResult) -> None:
        assert answer.finish_reason == "stop"
        assert re.fullmatch(pattern, answer.text), answer.text

    return each(check)


def calls(tools: Sequence[dict[str, Any]], *names: str, max_calls: int = 1) -> Check:
    """Check that the answer is calls of these functions with valid arguments."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    def check(answer: AnswerResult) -> None:
        assert answer.finish_reason == "tool_calls"
        assert 1 <= len(answer.calls) <= max_calls
        assert not answer.text.strip()
        for name, arguments in answer.calls:
            assert name in names
            assert fits(json.loads(arguments), schemas[name]), arguments

    return each(check)


def without_calls(answer: AnswerResult) -> None:
    assert not answer.calls
    assert answer.finish_reason in ("stop", "length")


def thinks(then: Check = anything) -> Check:
    """Check that there is reasoning, and apply a check to the rest of the answer."""

    def check(outcome: Outcome) -> None:
        for answer in outcome.choices:
            assert answer.reasoning
            assert "think>" not in answer.reasoning + answer.text
        then(outcome)

    return check


def thinks_up_to(tokens: int, end: int, then: Check = anything) -> Check:
    """Check that the reasoning ends with the token `end` after at most so many tokens."""

    def check(outcome: Outcome) -> None:
        for answer in outcome.choices:
            assert answer.token_ids.index(end) <= tokens + 1  # the first one starts it
        then(outcome)

    return check


def lacks(*texts: str) -> Check:
    """Check that no text is in the answer."""

    def check(answer: AnswerResult) -> None:
        assert not any(text in answer.text for text in texts)

    return each(check)


def begins(text: str) -> Check:
    def check(answer: AnswerResult) -> None:
        assert answer.text.startswith(text)

    return each(check)


def hides(answer: AnswerResult) -> None:
    assert not answer.reasoning
    assert "think>" not in answer.text


def named(texts: Sequence[str]) -> Check:
    """Check that every token has its log probability and those of the named tokens."""

    def check(answer: AnswerResult) -> None:
        assert len(answer.logprobs) == len(answer.token_ids)
        for token, value, best in answer.logprobs:
            assert value is not None
            assert [text for text in best if text != token] == [t for t in texts if t != token]
            assert best.get(token, value) == value
            assert sum(map(math.exp, {**best, token: value}.values())) <= 1 + 1e-5

    return each(check)


def scored(top: int, *, echoed: bool = False) -> Check:
    """Check that every token has its log probability and the most probable tokens."""

    def check(answer: AnswerResult) -> None:
        prompt = len(answer.prompt_ids or ()) if echoed else 0
        assert len(answer.logprobs) == prompt + len(answer.token_ids)
        for place, (token, value, best) in enumerate(answer.logprobs):
            if echoed and place == 0:
                assert value is None
                continue
            assert value is not None
            assert value <= 1e-6
            assert top <= len(best) <= top + 1
            assert best.get(token, value) == value
        for (begin, end), (token, *_) in zip(
            pairwise(answer.offsets), answer.logprobs, strict=False
        ):
            if end <= len(answer.text):  # tokens of a stop text are not in the text
                assert answer.text[begin:end] == token

    return each(check)


def prompt_scored(answer: AnswerResult) -> None:
    assert answer.prompt_ids is not None
    assert answer.prompt_logprobs is not None
    assert len(answer.prompt_logprobs) == len(answer.prompt_ids)
    assert answer.prompt_logprobs[0] is None
    for token, entry in zip(answer.prompt_ids[1:], answer.prompt_logprobs[1:], strict=True):
        assert str(token) in entry
        assert 2 <= len(entry) <= 3
