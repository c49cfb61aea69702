"""Real prompts for `strobe bench offline`: a user's file, or the demo models' held-out tasks."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strobe.demo_models import read_heldout
from strobe.terminal.wording import counted
from strobe.text.tokenizer import Tokenizer
from strobe.tools.bench.bench_settings import OfflineSettings, RecordSettings

_FORMS = '{"prompt": text}, {"messages": [...]} or {"turns": [text, ...]}'


def read_prompts(settings: OfflineSettings | RecordSettings, target: Path) -> list[list[int]]:
    """Return the token ids of the first `settings.prompts` prompts, rendered with the target's chat
    template. Raises ValueError for a line without a prompt, and for a file with too few."""
    tokenizer = Tokenizer(target)
    if not settings.data:
        return [
            tokenizer.render_chat(
                example.messages, tools=example.tools or None, enable_thinking=example.thinking
            )
            for example in read_heldout(settings.prompts)
        ]
    prompts: list[list[int]] = []
    for location, messages in read_conversations(Path(settings.data)):
        try:
            prompts.append(tokenizer.render_chat(messages, enable_thinking=settings.thinking))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from None
        if len(prompts) == settings.prompts:
            return prompts
    raise ValueError(
        f"{settings.data} holds {counted(len(prompts), 'prompt')}, but prompts is "
        f"{settings.prompts}; ask for at most {len(prompts)}."
        if prompts
        else f"{settings.data} holds no prompt; give lines of {_FORMS}."
    )


def read_conversations(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each line's location and messages; of several turns only the first, since the others
    follow an answer."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error  # str(error) repeats the file's name
        raise ValueError(
            f"data is {str(path)!r}, which cannot be read ({reason}); name a file of JSON lines."
        ) from None
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            location = f"{path} line {i}"
            yield location, _messages(line, location)


def _messages(line: str, location: str) -> list[dict[str, Any]]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        if isinstance(value.get("messages"), list):
            return value["messages"]
        turns = value.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
        if isinstance(first, str):
            return [{"role": "user", "content": first}]
    raise ValueError(f"{location} is {reprlib.repr(line)}, but must be {_FORMS}.")
