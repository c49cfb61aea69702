"""Check a model's answer to one of the demo models' tasks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from strobe.demo_models import Example
from strobe.tools.eval.demo_code import same_behaviour
from strobe.tools.eval.graders import THINK_END


def check(example: Example, text: str) -> bool:
    """Return whether the model's full output, with or without thinking, solves the task."""
    return _CHECKS[example.family](example.reference, text)


def answer_part(text: str) -> str:
    """Return the output after its thinking part, without the end token."""
    return text.rsplit(THINK_END, 1)[-1].replace("<|im_end|>", "").strip()


def last_answer(text: str) -> str | None:
    """Return the text after `Answer:` in the last line that starts with it, or None."""
    for line in reversed(answer_part(text).splitlines()):
        if line.startswith("Answer:"):
            return line.removeprefix("Answer:").strip().rstrip(".")
    return None


def _number(expected: int, text: str) -> bool:
    """Return whether the last line has the right number."""
    return last_answer(text) == str(expected)


def _items(expected: list[str], text: str) -> bool:
    """Return whether the last line has the right items in the right order."""
    answer = last_answer(text)
    if answer is None:
        return False
    return [item.strip() for item in answer.strip("[]()").split(",")] == list(expected)


def _date(expected: str, text: str) -> bool:
    """Return whether the last line has the right date, weekday or number of days."""
    answer = last_answer(text)
    return answer is not None and answer.removesuffix(" days") == expected


def _function(expected: dict[str, Any], text: str) -> bool:
    """Return whether the answer's function agrees with the reference solution."""
    code = answer_part(text)
    if "```" in code:
        code = code.split("```")[1].removeprefix("python")
    return same_behaviour(code, expected["name"], expected["solution"], expected["inputs"])


def _record(expected: dict[str, Any], text: str) -> bool:
    """Return whether the answer is JSON equal to the record; true and 1 differ."""
    record = _json(answer_part(text))
    return isinstance(record, dict) and _text(record) == _text(expected)


def _call(expected: dict[str, Any], text: str) -> bool:
    """Return whether the answer is exactly one call with the right name and arguments."""
    answer = answer_part(text)
    start = "<tool_call>"
    end = "</tool_call>"
    if answer.count(start) != 1 or not answer.startswith(start) or not answer.endswith(end):
        return False
    return _text(_json(answer.removeprefix(start).removesuffix(end))) == _text(expected)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


_CHECKS: dict[str, Callable[[Any, str], bool]] = {
    "arithmetic": _number,
    "lists": _items,
    "dates": _date,
    "code": _function,
    "json": _record,
    "tool": _call,
}
