"""The small target model and drafter that ship with Strobe, and held-out examples of their tasks.

`heldout.jsonl` is written by `scripts/demo_models/write_heldout.py`; `tools/eval/demo_tasks.py`
grades the answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("arithmetic", "lists", "dates", "code", "json", "tool")
HELDOUT = Path(__file__).with_name("heldout.jsonl")


@dataclass(frozen=True)
class Example:
    """One chat task with its answer.

    `messages` hold the chat without the answer, `tools` the OpenAI function schemas; `reasoning`
    is empty when `thinking` is False; `reference` is what a grader compares with.
    """

    family: str
    template: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool
    reasoning: str
    answer: str
    reference: Any


def read_heldout(count: int | None = None) -> list[Example]:
    """The first examples, by default all, the families in turn. Of every 24, half are with
    thinking, and half from templates that training never saw. Raises ValueError where there are
    fewer than `count`."""
    rows: list[Any] = [
        json.loads(line) for line in HELDOUT.read_text(encoding="utf-8").splitlines()
    ]
    if count is not None and count > len(rows):
        raise ValueError(
            f"prompts is {count}, but the demo models have {len(rows)} held-out ones; ask for at "
            f"most {len(rows)}."
        )
    for row in rows:
        row |= {part: tuple(row[part]) for part in ("messages", "tools")}
    return [Example(**row) for row in rows[:count]]
