"""Text that all task families share: greetings, thanks and system messages."""

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
    """Add a random greeting, thanks and sometimes a system message to the user's request."""
    user = {"role": "user", "content": say(rng, _OPENINGS) + request + say(rng, _CLOSINGS)}
    if rng.random() < 0.15:
        return {"role": "system", "content": rng.choice(_SYSTEMS)}, user
    return (user,)


def prompt_key(example: Example) -> str:
    """Return a hex SHA-256 of the model's whole input except the thinking switch."""
    text = json.dumps([example.messages, example.tools], ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
