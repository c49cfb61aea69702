"""What must hold for the answers of a request, however they were made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from outcomes import Outcome, Said

Check = Callable[[Outcome], None]


def anything(outcome: Outcome) -> None:
    """Nothing more is asked."""


def each(check: Callable[[Said], None]) -> Check:
    """A check of every answer."""

    def checks(outcome: Outcome) -> None:
        for said in outcome.choices:
            check(said)

    return checks


def ends(reason: str, stop: Any = None, tokens: int | None = None) -> Check:
    def check(said: Said) -> None:
        assert (said.finish_reason, said.stop_reason) == (reason, stop)
        assert tokens in (None, len(said.token_ids))

    return each(check)


def stops_at(*texts: str) -> Check:
    """A stop text ended the answer and is not in it."""

    def check(said: Said) -> None:
        assert said.finish_reason == "stop"
        assert said.stop_reason in texts
        assert not any(text in said.text for text in texts)

    return each(check)


def answers(count: int) -> Check:
    """So many answers."""

    def check(outcome: Outcome) -> None:
        assert len(outcome.choices) == count

    return check


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a JSON value follows a schema, of those that are used here."""
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
    def check(said: Said) -> None:
        assert said.finish_reason == "stop"
        value = json.loads(said.text)
        assert isinstance(value, dict)
        assert fits(value, schema), value

    return each(check)


def matches(pattern: str) -> Check:
    def check(said: Said) -> None:
        assert said.finish_reason == "stop"
        assert re.fullmatch(pattern, said.text), said.text

    return each(check)


def calls(tools: Sequence[dict[str, Any]], *names: str, most: int = 1) -> Check:
    """The answer is calls of these functions, with arguments that follow their schemas."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    def check(said: Said) -> None:
        assert said.finish_reason == "tool_calls"
        assert 1 <= len(said.calls) <= most
        assert not said.text.strip()
        for name, arguments in said.calls:
            assert name in names
            assert fits(json.loads(arguments), schemas[name]), arguments

    return each(check)


def without_calls(said: Said) -> None:
    assert not said.calls
    assert said.finish_reason in ("stop", "length")


def thinks(then: Check = anything) -> Check:
    """There is reasoning, and what holds for the rest of the answer."""

    def check(outcome: Outcome) -> None:
        for said in outcome.choices:
            assert said.reasoning
            assert "think>" not in said.reasoning + said.text
        then(outcome)

    return check


def begins(text: str) -> Check:
    def check(said: Said) -> None:
        assert said.text.startswith(text)

    return each(check)


def hides(said: Said) -> None:
    assert not said.reasoning
    assert "think>" not in said.text


def scored(top: int, *, echoed: bool = False) -> Check:
    """Every token has its log probability and the best ones."""

    def check(said: Said) -> None:
        prompt = len(said.prompt_ids or ()) if echoed else 0
        assert len(said.logprobs) == prompt + len(said.token_ids)
        for place, (token, value, best) in enumerate(said.logprobs):
            if echoed and place == 0:
                assert value is None
                continue
            assert value is not None
            assert value <= 1e-6
            assert top <= len(best) <= top + 1
            assert best.get(token, value) == value
        for (begin, end), (token, *_) in zip(pairwise(said.offsets), said.logprobs, strict=False):
            if end <= len(said.text):  # tokens of a stop text are beyond it
                assert said.text[begin:end] == token

    return each(check)


def prompt_scored(said: Said) -> None:
    assert said.prompt_ids is not None
    assert said.prompt_logprobs is not None
    assert len(said.prompt_logprobs) == len(said.prompt_ids)
    assert said.prompt_logprobs[0] is None
    for token, entry in zip(said.prompt_ids[1:], said.prompt_logprobs[1:], strict=True):
        assert str(token) in entry
        assert 2 <= len(entry) <= 3
