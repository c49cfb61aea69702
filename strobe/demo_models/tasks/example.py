"""The value that every task family makes, and the text habits that all of them share."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any

from strobe.demo_models.tasks.wording import say

THINK_END = "</think>"

_OPENINGS = (
    "[||||||Hi! |Hello. |Hello! |Please help me. |I have a question. |Here is a task for you. "
    "|A quick question. |I need some help. |Can you help me? |Good morning! |Please do this. ]"
)
_CLOSINGS = (
    "[|||||| Thanks!| Thank you.| Please be careful.| Take your time.| Thank you very much!]"
)
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful assistant.",
    "You are the demo model of Strobe.",
    "Answer the question of the user.",
    "You are a friendly assistant. Answer carefully.",
)


@dataclass(frozen=True)
class Example:
    """One chat task with its answer.

    `messages` hold the chat without the answer, `tools` the OpenAI function schemas; `reasoning`
    is empty when `thinking` is False; `reference` is what the checker of the family compares with.
    """

    family: str
    template: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool
    reasoning: str
    answer: str
    reference: Any


def chat(rng: random.Random, request: str) -> tuple[dict[str, Any], ...]:
    """The user's request with a random greeting and thanks, sometimes after a system message."""
    user = {"role": "user", "content": say(rng, _OPENINGS) + request + say(rng, _CLOSINGS)}
    if rng.random() < 0.15:
        return {"role": "system", "content": rng.choice(_SYSTEMS)}, user
    return (user,)


def prompt_key(example: Example) -> str:
    """Hex SHA-256 of everything the model sees before it answers, the thinking switch left out."""
    text = json.dumps([example.messages, example.tools], ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def answer_part(text: str) -> str:
    """What follows the thinking part of a full output, without its end mark."""
    return text.rsplit(THINK_END, 1)[-1].replace("<|im_end|>", "").strip()


def last_answer(text: str) -> str | None:
    """The text behind the last `Answer:` on a line of its own, or None."""
    for line in reversed(answer_part(text).splitlines()):
        if line.startswith("Answer:"):
            return line.removeprefix("Answer:").strip().rstrip(".")
    return None
