"""Held-out tasks of the demo models in the clients' file formats."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from strobe.config import DEMO_MODELS
from strobe.demo_models import Example, read_heldout
from strobe.tools.eval.demo_tasks import last_answer

ANSWERED = ("arithmetic", "lists", "dates")
"""The families that end in a line `Answer: ...`."""
DIRECT = "<think>\n\n</think>\n\n"
"""Beginning of an answer without thinking."""


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def questions(count: int, *families: str) -> list[Example]:
    """Return `count` examples with one message and no tools, cycling through the families."""
    plain = [e for e in read_heldout() if len(e.messages) == 1 and not e.tools]
    groups = [[e for e in plain if e.family == family] for family in families]
    max_count = len(groups) * min(map(len, groups))
    if count > max_count:
        raise ValueError(f"count is {count}, but there are {max_count} questions; ask for fewer.")
    return [groups[i % len(groups)][i // len(groups)] for i in range(count)]


def write_evaluation(folder: Path, count: int) -> None:
    """Write answers.jsonl and choices.jsonl for tasks/*.yaml, `count` questions each."""
    examples = questions(count, *ANSWERED)
    pool = questions(max(count, 30), *ANSWERED)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODELS / "target")
    rng = random.Random(0)
    answers, choices = [], []
    for example in examples:
        question, right = example.messages[0]["content"], last_answer(example.answer)
        same_family = [other for other in pool if other.family == example.family]
        other_answers = {last_answer(other.answer) for other in same_family}
        offered = [right, *rng.sample(sorted(other_answers - {right}), 3)]
        rng.shuffle(offered)
        chat = {"conversation": [{"role": "user", "content": question}], "tokenize": False}
        prompt = tokenizer.apply_chat_template(**chat, add_generation_prompt=True)
        answers.append({"question": question, "prompt": prompt, "answer": right})
        working = example.answer[: example.answer.rindex("Answer:")]
        texts = [f"{DIRECT}{working}Answer: {answer}" for answer in offered]
        choices.append({"prompt": prompt, "choices": texts, "right": offered.index(right)})
    write_lines(folder / "answers.jsonl", answers)
    write_lines(folder / "choices.jsonl", choices)


def write_chats(path: Path, count: int) -> None:
    """Write prompts for vllm's data set `custom`."""
    examples = questions(count, *ANSWERED, "code", "json")
    write_lines(path, ({"prompt": example.messages[0]["content"]} for example in examples))
