"""Tokens per verify step of SmolLM2's drafter on held-out prompts, and Strobe's speed with it.

    python scripts/smollm2/evaluate.py TARGET DRAFT answers-*.npz --kinds chat code rewriting

The engine answers held-out prompts with all drafts at each temperature. `--speed` also answers them
without drafts and with adaptive drafting, in turns, `--speed-batch` requests at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.answers import load  # noqa: E402
from scripts.smollm2.prompts import KINDS  # noqa: E402
from strobe import LLM, SamplingParams  # noqa: E402
from strobe.outputs import RequestOutput  # noqa: E402


def heldout_prompts(files: list[Path], kinds: list[str], count: int) -> dict[str, list[list[int]]]:
    """Return up to `count` held-out prompts of each kind."""
    prompts: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    for item in load(files):
        of_kind = prompts.get(KINDS[item.kind])
        if item.heldout and of_kind is not None and len(of_kind) < count:
            of_kind.append(item.prompt)
    return prompts


def answer(
    llm: LLM, prompts: list[list[int]], options: argparse.Namespace, temperature: float
) -> list[RequestOutput]:
    """Answer prompts of token ids; seeds are the same in each call."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=i)
        for i in range(len(prompts))
    ]
    inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def acceptance(outputs: list[RequestOutput]) -> dict[str, Any]:
    """Return tokens per verify step and the acceptance of each position."""
    reports = [output.outputs[0].speculation for output in outputs]
    steps = sum(r.steps for r in reports if r is not None)
    accepted = sum(r.accepted for r in reports if r is not None)
    positions = zip(*(r.accepted_per_position for r in reports if r is not None), strict=True)
    return {
        "prompts": len(outputs),
        "tokens_per_step": round(1 + accepted / max(1, steps), 3),
        "per_position": [round(sum(column) / max(1, steps), 3) for column in positions],
    }


def speed(
    engines: dict[str, LLM], prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the median tokens per second of each engine over rounds in turns, greedy, and whether
    all gave equal tokens."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    tokens: dict[str, list[list[int]]] = {}
    size = options.speed_batch
    for _ in range(options.rounds):
        for name, llm in engines.items():
            begin = time.perf_counter()
            rows = list[list[int]]()
            for first in range(0, len(prompts), size):
                outputs = answer(llm, prompts[first : first + size], options, 0.0)
                rows += [list(output.outputs[0].token_ids) for output in outputs]
            rates[name].append(sum(map(len, rows)) / (time.perf_counter() - begin))
            tokens[name] = rows
    first = next(iter(tokens.values()))
    return {
        "tokens_per_second": {n: round(statistics.median(r), 1) for n, r in rates.items()},
        "equal_tokens": all(rows == first for rows in tokens.values()),
    }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["chat", "code", "rewriting"], choices=KINDS)
    parser.add_argument("--count", type=int, default=24, help="prompts of a kind")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--sample-method", default="probabilistic", choices=("greedy", "probabilistic")
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speed-count", type=int, default=4, help="prompts of a kind for --speed")
    parser.add_argument("--speed-batch", type=int, default=1, help="requests at once for --speed")
    return parser.parse_args()


def main() -> None:
    """Print the figures as JSON."""
    options = parse()
    prompts = heldout_prompts(options.answers, options.kinds, options.count)
    common: dict[str, Any] = {"max_model_len": 1024, "device": options.device}
    drafting = LLM(
        options.target,
        options.draft,
        adaptive=False,
        draft_sample_method=options.sample_method,
        **common,
    )
    for temperature in options.temperatures:
        for kind, rows in prompts.items():
            result = acceptance(answer(drafting, rows, options, temperature))
            print(json.dumps({"kind": kind, "temperature": temperature, **result}), flush=True)
    if options.speed:
        engines = {
            "plain": LLM(options.target, method="none", **common),
            "all drafts": drafting,
            "adaptive": LLM(options.target, options.draft, **common),
        }
        for kind, rows in prompts.items():
            result = speed(engines, rows[: options.speed_count], options)
            print(json.dumps({"kind": kind, **result}), flush=True)


if __name__ == "__main__":
    main()
