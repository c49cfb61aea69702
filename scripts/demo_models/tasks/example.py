"""The text habits that all task families share."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from scripts.demo_models.tasks.wording import say
from strobe.demo_models import Example

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
