"""Held-out tasks of the demo pair as the files that the clients read."""

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
"""How an answer begins that does not think."""


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def questions(count: int, *families: str) -> list[Example]:
    """`count` examples with one message and no tools, the families in turn."""
    plain = [e for e in read_heldout() if len(e.messages) == 1 and not e.tools]
    groups = [[e for e in plain if e.family == family] for family in families]
    most = len(groups) * min(map(len, groups))
    if count > most:
        raise ValueError(f"count is {count}, but there are {most} questions; ask for fewer.")
    return [groups[i % len(groups)][i // len(groups)] for i in range(count)]


def write_evaluation(folder: Path, count: int) -> None:
    """answers.jsonl and choices.jsonl of tasks/*.yaml: `count` questions each."""
    examples = questions(count, *ANSWERED)
    pool = questions(max(count, 30), *ANSWERED)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODELS / "target")
    rng = random.Random(0)
    answers, choices = [], []
    for example in examples:
        question, right = example.messages[0]["content"], last_answer(example.answer)
        others = {last_answer(other.answer) for other in pool if other.family == example.family}
        offered = [right, *rng.sample(sorted(others - {right}), 3)]
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
    """Prompts for vllm's data set `custom`."""
    examples = questions(count, *ANSWERED, "code", "json")
    write_lines(path, ({"prompt": example.messages[0]["content"]} for example in examples))
