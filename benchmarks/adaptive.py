"""Compare adaptive drafting with none and with whole blocks, on the demo models.

    python benchmarks/adaptive.py [--rounds 5] [--concurrency 1,8] [--device cpu] [--json FILE]

Three kinds of prompts: held-out examples of the demo tasks, whose drafts are mostly right; other
chat; and random tokens, after which hardly any draft is right. One engine answers all prompts of a
kind in each way; the ways alternate, and a round's figure is tokens per second over all prompts.
The adaptive policy keeps its estimates between rounds. All ways must give the same answers.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from strobe import LLM, SamplingParams
from strobe.config import DEMO_MODELS
from strobe.speculation.draft_policy import DraftPolicy
from strobe.tools.demo_comparison import choose_examples, prompts_of

CHAT = (
    "Who wrote Hamlet?",
    "Tell me about the weather in Lisbon in spring.",
    "What should I cook tonight with rice, eggs and spinach?",
    "Explain to a child why the sky is blue.",
    "Write a short letter to a friend who has moved to another town.",
    "Which book would you take to an island, and why?",
    "How do I repair a flat bicycle tyre?",
    "Give me three names for a grey cat.",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
WAYS = ("plain", "whole blocks", "adaptive")


def kinds(llm: LLM, count: int) -> dict[str, list[list[int]]]:
    rng = random.Random(1)
    size = llm.engine.resolved.target.decoder.vocab_size
    chat = [[{"role": "user", "content": text}] for text in CHAT]
    return {
        "demo tasks": [[*map(int, ids)] for ids in prompts_of(llm, choose_examples(count))],
        "other chat": [list(llm.tokenizer.render_chat(messages)) for messages in chat][:count],
        "random tokens": [[rng.randrange(size) for _ in range(30)] for _ in range(count)],
    }


def run(llm: LLM, prompts: Sequence[list[int]], at_once: int, way: str) -> tuple[float, Any]:
    """Answer the prompts; return the seconds and the answers."""
    params = GREEDY.clone(speculation=False) if way == "plain" else GREEDY
    began, answers = time.perf_counter(), list[list[int]]()
    for first in range(0, len(prompts), at_once):
        outputs = llm.generate(prompts[first : first + at_once], params, use_tqdm=False)
        answers += [output.outputs[0].token_ids for output in outputs]
    return time.perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(
        str(DEMO_MODELS / "target"),
        str(DEMO_MODELS / "draft"),
        device=options.device,
        enable_prefix_caching=False,
    )
    adaptive = llm.engine.scheduler.draft_policy
    rates_by_cell: dict[str, Any] = {}
    for at_once in map(int, options.concurrency.split(",")):
        for kind, prompts in kinds(llm, options.prompts).items():
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for turn in range(1 + options.rounds):  # the first one warms up
                answers: dict[str, Any] = {}
                for way in WAYS[:: 1 if turn % 2 else -1]:
                    llm.engine.scheduler.draft_policy = (
                        adaptive if way == "adaptive" else DraftPolicy()
                    )
                    seconds, answers[way] = run(llm, prompts, at_once, way)
                    if turn:
                        rates[way].append(sum(map(len, answers[way])) / seconds)
                assert answers["plain"] == answers["adaptive"] == answers["whole blocks"]
            cell = f"{kind}, {at_once} at once"
            rates_by_cell[cell] = row = {way: round(median(rates[way]), 1) for way in WAYS}
            for way in WAYS[:2]:
                pairs = zip(rates["adaptive"], rates[way], strict=True)
                row[f"adaptive over {way}"] = round(median(a / b for a, b in pairs), 3)
            print(f"{cell}: {row}", flush=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(llm.engine.resolved.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tokens_per_s": rates_by_cell,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
