"""The target's answers as token ids: reading, supervision and batching.

Legend: M sequences of the corpus, N sequences of a batch, S positions (right-padded).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

ROUND = 64
"""Batches are padded to a multiple of this length, to limit the number of shapes."""


class ChatTokenizer(Protocol):
    """What training needs of a transformers tokenizer."""

    mask_token_id: int | None

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, **options: object
    ) -> str: ...


@dataclass(frozen=True)
class Sample:
    """One sequence. supervised[i]: token i was written by the target."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]

    @staticmethod
    def of(prompt: Sequence[int], output: Sequence[int]) -> Sample:
        mask = (False,) * len(prompt) + (True,) * len(output)
        return Sample((*prompt, *output), mask)

    def cut(self, length: int) -> Sample:
        return Sample(self.ids[:length], self.supervised[:length])

    def has_block(self) -> bool:
        """Return whether any block can start: two supervised tokens in a row."""
        return any(a and b for a, b in zip(self.supervised, self.supervised[1:], strict=False))


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) of each line of a JSONL file; the place is for error messages."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read ({reason}); name a JSONL file.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: {error}; write one JSON object per line.") from None
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not a JSON object; write one per line.")
        yield place, value


def _ids(line: dict[str, Any], key: str, place: str, vocabulary: int) -> list[int]:
    ids = line.get(key)
    if not isinstance(ids, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in ids
    ):
        raise ValueError(
            f"{place}: {key} must be a list of token ids from 0 to {vocabulary - 1}; "
            "write the file with the tokenizer of this target."
        )
    return ids


def template_options(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line's arguments of the chat template besides its messages."""
    options = dict(line.get("chat_template_kwargs") or {})
    if "enable_thinking" in line:
        options["enable_thinking"] = line["enable_thinking"]
    if line.get("tools"):
        options["tools"] = line["tools"]
    return options


def render(
    tokenizer: ChatTokenizer,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    *,
    answer: bool,
) -> list[int]:
    """Return the token ids of a chat; `answer` adds the opening of the assistant's turn."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=answer, **options
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer_turns(line: dict[str, Any], place: str) -> list[int]:
    """Return the indices of the assistant's messages. Raises ValueError if the line is no chat."""
    messages = line.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ValueError(
            f"{place}: needs either messages (a list of objects with role and content) or "
            "prompt_ids and output_ids."
        )
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def chat_sample(
    tokenizer: ChatTokenizer, line: dict[str, Any], place: str, eos_ids: Sequence[int]
) -> Sample:
    """Encode a chat as one sequence, supervised from each answer's opening through its end token.

    An earlier answer that the template renders differently in the history (Qwen3 drops its
    reasoning) is not supervised, because the target did not write it in that form.
    """
    turns = answer_turns(line, place)
    if not turns or turns[-1] != len(line["messages"]) - 1:
        raise ValueError(
            f"{place}: the last message is not an answer of the assistant; have the target write "
            "one with `python -m strobe.tools.train.regenerate`."
        )
    messages = line["messages"]
    options = template_options(line)
    ids = render(tokenizer, messages, options, answer=False)
    supervised = [False] * len(ids)
    for turn in turns:
        prompt = render(tokenizer, messages[:turn], options, answer=True)
        if ids[: len(prompt)] != prompt:
            continue
        ends = (i for i in range(len(prompt), len(ids)) if ids[i] in eos_ids)
        end = next(ends, len(ids) - 1)
        supervised[len(prompt) : end + 1] = [True] * (end + 1 - len(prompt))
    if not any(supervised):
        raise ValueError(
            f"{place}: the chat template does not render the prompt as the beginning of the "
            "whole chat; give the line as prompt_ids and output_ids instead."
        )
    return Sample(tuple(ids), tuple(supervised))


def read_samples(
    path: Path,
    tokenizer: ChatTokenizer,
    *,
    vocabulary: int,
    eos_ids: Sequence[int],
    max_length: int,
) -> list[Sample]:
    """Read the sequences of a JSONL file, cut to `max_length`; those without a block are left out.

    tokenizer: a transformers tokenizer, used only for lines with messages.
    """
    samples: list[Sample] = []
    for place, line in read_lines(path):
        if "prompt_ids" in line:
            prompt = _ids(line, "prompt_ids", place, vocabulary)
            sample = Sample.of(prompt, _ids(line, "output_ids", place, vocabulary))
        else:
            sample = chat_sample(tokenizer, line, place, eos_ids)
        sample = sample.cut(max_length)
        if sample.has_block():
            samples.append(sample)
    if not samples:
        raise ValueError(
            f"{path} holds no answer of two or more tokens within max_length {max_length}; "
            "give longer answers or raise max_length."
        )
    return samples


@dataclass(frozen=True)
class Batch:
    """ids [N, S] int64, padded with 0; supervised [N, S] bool, False on padding."""

    ids: Tensor
    supervised: Tensor


class Corpus:
    """All sequences, concatenated in two tensors, so that a batch is one gather."""

    def __init__(self, samples: Sequence[Sample], device: torch.device | None = None):
        lengths = [len(sample.ids) for sample in samples]
        self.lengths = torch.tensor(lengths)
        self._starts = (self.lengths.cumsum(0) - self.lengths).to(device)
        self._ends = self.lengths.to(device)
        flat = [i for sample in samples for i in sample.ids]
        mask = [m for sample in samples for m in sample.supervised]
        self._ids = torch.tensor(flat, dtype=torch.int32, device=device)
        self._supervised = torch.tensor(mask, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: Tensor) -> Batch:
        """Return the sequences at `indices` [N] (on the CPU), padded to a multiple of ROUND."""
        longest = int(self.lengths[indices].max())
        length = -(-longest // ROUND) * ROUND
        rows = indices.to(self._ids.device)
        offset = torch.arange(length, device=self._ids.device)
        inside = offset < self._ends[rows, None]
        cells = (self._starts[rows, None] + offset).where(inside, 0)
        return Batch((self._ids[cells] * inside).long(), self._supervised[cells] & inside)


def epoch_order(lengths: Tensor, batch_size: int, generator: torch.Generator) -> list[Tensor]:
    """Return one epoch as batches of indices, in random order, each of sequences of similar length.

    Incomplete batches are dropped, unless there is no other; each epoch drops other sequences.
    """
    order = torch.randperm(len(lengths), generator=generator)
    batches: list[Tensor] = []
    for pool in order.split(32 * batch_size):
        by_length = pool[lengths[pool].argsort(stable=True)]
        batches += [b for b in by_length.split(batch_size) if len(b) == batch_size]
    batches = batches or [order]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
