"""SmolLM2's own prompts and answers, generated on one GPU as token ids, so that no text is handled.

    python scripts/smollm2/answers.py TARGET prompts.npz OUT --minutes 3

OUT gets answers-0.npz, answers-1.npz, ...: each a random part of the answers, complete in itself.
Three sources of prompts: `prompts.py`, the model itself, which writes the user's turn of its own
chat template, and its own earlier answers, which it is asked to rewrite.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo_models.answers import answer  # noqa: E402
from scripts.smollm2.prompts import KINDS, LONGEST, REWRITE_TEXT, flat, is_heldout, rows_of  # noqa: E402
from strobe.models.architectures import load_target_config  # noqa: E402
from strobe.models.target import Target  # noqa: E402
from strobe.models.weight_loading import load_target  # noqa: E402

START = time.monotonic()
MAX_TOKENS = 224
"""Maximum tokens of an answer."""
TEMPERATURES = (0.0, 1.0)
"""One is drawn for each answer."""
PROMPT_TEMPERATURES = (0.6, 0.8, 1.0, 1.0, 1.0, 1.1)
"""One is drawn for each prompt that the model writes."""
PROMPT_TOKENS = 96
"""Maximum tokens of a user's turn that the model writes."""
SOURCE_TOKENS = 24, 160
"""Minimum and maximum tokens of an answer that is to be rewritten."""
PART = 15 << 19
"""Token ids of a file: under 16 MiB before compression."""


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer as token ids. kind: index in KINDS."""

    prompt: list[int]
    answer: list[int]
    kind: int
    temperature: float
    heldout: bool


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def chat_parts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids before and after a user's text in a chat of one turn."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "TEXT"}], tokenize=False, add_generation_prompt=True
    )
    before, after = chat.split("TEXT")
    return tuple(tokenizer.encode(part, add_special_tokens=False) for part in (before, after))


def own_prompts(
    target: Target, parts: tuple[list[int], list[int]], count: int, batch: int, rng: random.Random
) -> list[list[int]]:
    """Return different prompts that the model writes, about `count` of them."""
    before, after = parts
    ends = set(target.config.eos_ids)
    prompts: set[tuple[int, ...]] = set()
    for start in range(0, count, batch):
        temperatures = [rng.choice(PROMPT_TEMPERATURES) for _ in range(min(batch, count - start))]
        turns = answer(
            target,
            [before] * len(temperatures),
            temperatures,
            max_tokens=PROMPT_TOKENS,
            seed=rng.randrange(1 << 30),
        )
        complete = (turn[:-1] for turn in turns if turn[-1] in ends and len(turn) > 4)
        prompts |= {(*before, *turn, *after) for turn in complete}
    return [list(prompt) for prompt in sorted(prompts)]


def rewriting_prompts(
    tokenizer: Any,
    parts: tuple[list[int], list[int]],
    answers: Sequence[Answered],
    eos_ids: Sequence[int],
    rng: random.Random,
) -> list[tuple[list[int], bool]]:
    """Return prompts that ask to rewrite earlier answers, and whether each is held out."""
    before, after = parts
    patterns = [
        [tokenizer.encode(part, add_special_tokens=False) for part in pattern.split("{}")]
        for pattern in REWRITE_TEXT
    ]
    prompts: list[tuple[list[int], bool]] = []
    for source in answers:
        text = [i for i in source.answer if i not in eos_ids][: SOURCE_TOKENS[1]]
        if len(text) < SOURCE_TOKENS[0]:
            continue
        first, last = rng.choice(patterns)
        ids = [*before, *first, *text, *last, *after]
        if len(ids) <= LONGEST:
            prompts.append((ids, source.heldout))
    return prompts


def batches(
    prompts: Sequence[tuple[list[int], int, bool]], size: int, rng: random.Random
) -> Iterator[list[tuple[list[int], int, bool]]]:
    """Yield batches of prompts of similar length, in random order."""
    order = list(prompts)
    rng.shuffle(order)
    for start in range(0, len(order), 4 * size):
        pool = sorted(order[start : start + 4 * size], key=lambda item: len(item[0]))
        parts = [pool[i : i + size] for i in range(0, len(pool), size)]
        rng.shuffle(parts)
        yield from parts


def answers_until(
    target: Target,
    prompts: Sequence[tuple[list[int], int, bool]],
    size: int,
    end: float,
    rng: random.Random,
) -> list[Answered]:
    """Answer prompts of (ids, kind, held out) until all are answered or the time is `end`."""
    results: list[Answered] = []
    for part in batches(prompts, size, rng):
        begin = time.monotonic()
        if begin - START > end:
            break
        temperatures = [rng.choice(TEMPERATURES) for _ in part]
        rows = answer(
            target,
            [ids for ids, _, _ in part],
            temperatures,
            max_tokens=MAX_TOKENS,
            seed=rng.randrange(1 << 30),
        )
        for (ids, kind, heldout), row, temperature in zip(part, rows, temperatures, strict=True):
            if len(row) > 1:
                results.append(Answered(ids, row, kind, temperature, heldout))
        tokens = sum(map(len, rows))
        say(f"{len(part)} answers, {tokens} tokens, {tokens / (time.monotonic() - begin):.0f} /s")
    return results


def save(answers: Sequence[Answered], out: Path, number: int) -> int:
    """Write answers to files from the given number on; return the next number."""
    part: list[Answered] = []
    size = 0
    for i, item in enumerate(answers, start=1):
        part.append(item)
        size += len(item.prompt) + len(item.answer)
        if size >= PART or i == len(answers):
            prompts, rows = flat([a.prompt for a in part]), flat([a.answer for a in part])
            np.savez_compressed(
                out / f"answers-{number}.npz",
                prompts=prompts["ids"],
                prompt_lengths=prompts["lengths"],
                answers=rows["ids"],
                answer_lengths=rows["lengths"],
                kinds=np.array([a.kind for a in part], np.uint8),
                temperatures=np.array([round(10 * a.temperature) for a in part], np.uint8),
                heldout=np.array([a.heldout for a in part]),
            )
            part, size, number = [], 0, number + 1
    return number


def load(files: Sequence[Path]) -> list[Answered]:
    """Read files that `save` wrote."""
    answers: list[Answered] = []
    for file in files:
        data = np.load(file)
        columns = zip(
            rows_of(data["prompts"], data["prompt_lengths"]),
            rows_of(data["answers"], data["answer_lengths"]),
            data["kinds"].tolist(),
            (data["temperatures"] / 10).tolist(),
            data["heldout"].tolist(),
            strict=True,
        )
        answers += [Answered(*row) for row in columns]
    return answers


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--own", type=int, default=80_000, help="prompts that the model writes")
    parser.add_argument("--batch", type=int, default=3072, help="answers generated at once")
    parser.add_argument("--limit", type=int, help="prompts of each source, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Write prompts, answer them, have a part of the answers rewritten."""
    from transformers import AutoTokenizer

    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans each new length for 50 ms
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = load_target(
        options.target,
        load_target_config(options.target),
        max_positions=LONGEST + 2 * MAX_TOKENS,
        dtype=torch.float32,
        device=device,
    )
    rng = random.Random(options.seed)
    parts = chat_parts(tokenizer)
    data = np.load(options.prompts)
    texts = list(zip(rows_of(data["ids"], data["lengths"]), data["kinds"].tolist(), strict=True))
    if options.limit:
        texts, options.own = rng.sample(texts, options.limit), options.limit
    own = own_prompts(target, parts, options.own, options.batch, rng)
    say(f"{len(own)} prompts by the model, {len(texts)} from text")
    prompts = [(ids, kind, is_heldout(ids)) for ids, kind in texts]
    prompts += [(ids, KINDS.index("chat"), is_heldout(ids)) for ids in own]
    end = options.minutes * 60
    answers = answers_until(target, prompts, options.batch, 0.7 * end, rng)
    sources = rng.sample(answers, len(answers) // 2)
    kind = KINDS.index("rewriting")
    rewriting = [
        (ids, kind, heldout)
        for ids, heldout in rewriting_prompts(tokenizer, parts, sources, target.config.eos_ids, rng)
    ]
    answers += answers_until(target, rewriting, options.batch, end, rng)
    rng.shuffle(answers)
    count = save(answers, options.out, 0)
    kinds = {name: sum(a.kind == i for a in answers) for i, name in enumerate(KINDS)}
    tokens = sum(len(a.answer) for a in answers)
    say(f"{len(answers)} answers, {tokens} tokens in {count} files: {kinds}")
    for item in answers[:12]:
        print(repr(tokenizer.decode(item.prompt[len(parts[0]) :])), item.temperature)
        print("   ", repr(tokenizer.decode(item.answer)))


if __name__ == "__main__":
    main()
