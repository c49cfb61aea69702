"""What the clients' programs ask, and how each starts. Imports nothing but Python's library, since
every program runs in its client's environment.

A program is called with (URL, KEY, QUESTIONS, OUT). QUESTIONS is a JSON list of texts. OUT gets a
JSON object: the answers by kind of request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = "strobe-demo"
WEATHER = "What is the weather in Athens in celsius?"
TURTLE = (
    "Take this text and write a JSON object with the keys animal, name and age. "
    "The white turtle of Noah is called Bamin and is 12 years old."
)
UNITS = ["celsius", "kelvin"]
PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": UNITS}},
    "required": ["city", "unit"],
}
FUNCTION: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Use this to know the weather in a city.",
        "parameters": PARAMETERS,
    },
}
DEGREES = '{"degrees": 31}'
MAX_TOKENS = 256


def user(text: str) -> Any:
    """Return a chat of one message."""
    return [{"role": "user", "content": text}]


def rejections(tries: list[tuple[type[Any], Callable[[], Any]]]) -> list[str]:
    """Make requests that the server rejects; return the names of the client's errors. Raises
    AssertionError if one has no request id, and any error that is not of its class."""
    names: list[str] = []
    for kind, attempt in tries:
        try:
            attempt()
        except kind as error:
            names += [type(error).__name__] if error.request_id else []
    assert len(names) == len(tries), names
    return names


def run(answers: Callable[[str, str, list[str]], dict[str, Any]]) -> None:
    """Write what `answers(url, key, questions)` returns to the program's OUT."""
    url, key, questions_file, out = sys.argv[1:]
    questions: list[str] = json.loads(Path(questions_file).read_text(encoding="utf-8"))
    Path(out).write_text(json.dumps(answers(url, key, questions)), encoding="utf-8")
