"""Training batches of the demo target: chats from the task generator, tokenized and packed.

Worker processes make whole batches; batch `i` comes from worker `i % workers`, so the order is the
same in every run with the same number of workers.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo_models.tasks import Example, generate, small_talk, split  # noqa: E402

Message = dict[str, Any]
WEIGHTS = {"arithmetic": 1.3, "lists": 1.3, "dates": 1.3, "code": 1.0, "json": 1.0, "tool": 0.9}
IGNORED = -100
_LOOK_AHEAD = 64


@dataclass(frozen=True)
class Packing:
    """`rows` of `length` tokens a batch; no chat crosses a row. `chats` bounds the chats in it.

    A batch has about one chat for every 150 tokens; a row that would pass the bound ends early.
    """

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def chats(self) -> int:
        return max(16, self.tokens // 80)


@dataclass(frozen=True)
class Batch:
    """Flat arrays of T tokens: ids, labels (`IGNORED` on prompts), positions in the chat.

    `bounds` are the starts of the chats and T, filled up with T to a fixed size.
    """

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray
    used: int


def _training_example(rng: random.Random) -> Example:
    while True:
        family = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))[0]
        example = generate(rng, family=family)
        if split(example) == "train":
            return example


def answer_message(example: Example) -> Message:
    """The assistant's message that solves the example."""
    message = {"role": "assistant", "content": example.answer}
    return message | {"reasoning_content": example.reasoning} if example.thinking else message


def conversation(rng: random.Random) -> tuple[list[Message], list[Message], bool]:
    """Messages that end with the assistant's, tools, and whether it thinks.

    Mostly one task; one chat in twenty has something before it, and some are small talk.
    """
    draw = rng.random()
    if draw < 0.02:
        thinking = rng.random() < 0.5
        return small_talk.small_talk(rng, thinking), [], thinking
    if draw < 0.04:
        thinking = rng.random() < 0.5
        return *small_talk.tool_result(rng, thinking), thinking
    example = _training_example(rng)
    messages = [*example.messages, answer_message(example)]
    if draw < 0.09:
        if rng.random() < 0.3:
            earlier = small_talk.small_talk(rng, False)
        else:
            first = _training_example(rng)
            while first.tools:
                first = _training_example(rng)
            earlier = [*first.messages, {"role": "assistant", "content": first.answer}]
        messages = earlier + [message for message in messages if message["role"] != "system"]
    return messages, list(example.tools), example.thinking


def _chats(seed: str, tokenizer_folder: str) -> Iterator[tuple[list[int], int]]:
    """Token ids of a whole chat and the length of its prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    encode = tokenizer.backend_tokenizer.encode_batch
    rng = random.Random(seed)
    while True:
        prompts: list[str] = []
        answers: list[str] = []
        for _ in range(256):
            messages, tools, thinking = conversation(rng)
            prompt = tokenizer.apply_chat_template(
                messages[:-1],
                tools=tools or None,
                add_generation_prompt=True,
                enable_thinking=thinking,
                tokenize=False,
            )
            whole = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
            assert whole.startswith(prompt)
            prompts.append(prompt)
            answers.append(whole[len(prompt) :].removesuffix("\n"))
        encoded = zip(
            encode(prompts, add_special_tokens=False),
            encode(answers, add_special_tokens=False),
            strict=True,
        )
        yield from ((prompt.ids + answer.ids, len(prompt.ids)) for prompt, answer in encoded)


def batches(seed: str, tokenizer_folder: str, packing: Packing) -> Iterator[Batch]:
    """Endless packed batches of one stream of chats."""
    chats = _chats(seed, tokenizer_folder)
    waiting: list[tuple[list[int], int]] = []
    while True:
        ids = np.zeros(packing.tokens, np.int32)
        labels = np.full(packing.tokens, IGNORED, np.int32)
        positions = np.zeros(packing.tokens, np.int32)
        bounds: list[int] = []
        used = 0
        for row in range(packing.rows):
            at, end = row * packing.length, (row + 1) * packing.length
            while True:
                while len(waiting) < _LOOK_AHEAD:
                    waiting.append(next(chats))
                place = next((i for i, (t, _) in enumerate(waiting) if len(t) <= end - at), None)
                room = packing.chats - 2 * (packing.rows - row) - len(bounds)
                if place is None or room <= 0:
                    break
                tokens, prompt = waiting.pop(place)
                size = len(tokens)
                ids[at : at + size] = tokens
                labels[at + prompt - 1 : at + size - 1] = tokens[prompt:]
                positions[at : at + size] = np.arange(size)
                bounds.append(at)
                used += size
                at += size
            if at < end:
                positions[at:end] = np.arange(end - at)
                bounds.append(at)
        assert len(bounds) <= packing.chats
        fill = [packing.tokens] * (packing.chats + 1 - len(bounds))
        yield Batch(ids, labels, positions, np.array(bounds + fill, np.int32), used)


def _work(seed: str, folder: str, packing: Packing, queue: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"
    for batch in batches(seed, folder, packing):
        queue.put(batch)


class BatchPool:
    """Worker processes that fill one queue each; `batches` takes from them in turn."""

    def __init__(self, *, seed: int, folder: str, packing: Packing, workers: int, ahead: int = 12):
        context = multiprocessing.get_context("spawn")
        self._queues = [context.Queue(ahead) for _ in range(workers)]
        self._workers = [
            context.Process(
                target=_work, args=(f"target {seed} {i}", folder, packing, queue), daemon=True
            )
            for i, queue in enumerate(self._queues)
        ]
        for worker in self._workers:
            worker.start()

    def batches(self) -> Iterator[Batch]:
        """Batches, round robin over the workers."""
        while True:
            for queue in self._queues:
                yield queue.get()

    def stop(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
