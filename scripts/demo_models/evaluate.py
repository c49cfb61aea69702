"""Measure correct answers and acceptance of the demo models on held-out prompts, with Strobe.

    python scripts/demo_models/evaluate.py --count 40 --json docs/demo_models/evaluation.json

For each family: the share of greedy answers that the generator's checker passes, and the mean
acceptance length (tokens per verify step, the target's own included) at temperature 0 and 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.demo_models.tasks import FAMILIES, Example, check, heldout
from strobe import LLM, SamplingParams
from strobe.counters import DraftCounts
from strobe.outputs import RequestOutput
from strobe.tools.demo_comparison import prompts_of


def acceptance(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return, over all verify steps, the tokens per step (without each answer's first token, which
    the prefill generates) and the share of steps that accept each position."""
    counts = DraftCounts()
    for output in outputs:
        if (report := output.outputs[0].speculation) is not None:
            counts.merge(report.counts)
    made = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    return {
        "acceptance_length": round(made / counts.steps, 3),
        "verify_steps": counts.steps,
        "rate_per_position": [round(n / counts.steps, 3) for n in counts.accepted_per_position],
    }


def by_family(examples: Sequence[Example], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Return the figures for all examples and for each family."""
    groups: dict[str, list[int]] = {"all": list(range(len(examples)))}
    for i, example in enumerate(examples):
        groups.setdefault(example.family, []).append(i)
    figures = {}
    for name in ("all", *FAMILIES):
        chosen = groups[name]
        right = sum(check(examples[i], outputs[i].outputs[0].text) for i in chosen)
        figures[name] = {
            "answers": len(chosen),
            "right": round(right / len(chosen), 4),
            "tokens": sum(len(outputs[i].outputs[0].token_ids) for i in chosen),
            **acceptance([outputs[i] for i in chosen]),
        }
    return figures


def meets_the_bars(figures: dict[str, Any]) -> bool:
    """90 % right overall and 75 % in each family; 5 tokens per step overall, 3 in each family."""
    return all(
        row["right"] >= (0.90 if family == "all" else 0.75)
        and row["acceptance_length"] >= (5.0 if family == "all" else 3.0)
        for family, row in figures.items()
    )


def main() -> int:
    """Print the tables; return 1 if the pair misses its bars at temperature 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40, help="held-out prompts per family")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=7, help="seed of the held-out prompts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--draft-sample-method",
        default="probabilistic",
        help="greedy: drafts are the drafter's most probable tokens at temperature 1, too",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    llm = LLM(
        device=options.device,
        dtype=options.dtype,
        max_num_seqs=16,
        draft_sample_method=options.draft_sample_method,
        adaptive=False,
    )
    examples = heldout(options.count, seed=options.seed)
    prompts = prompts_of(llm, examples)
    figures: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": str(llm.engine.resolved.device),
        "dtype": str(llm.engine.resolved.dtype),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "draft_sample_method": options.draft_sample_method,
        "prompts_per_family": options.count,
        "heldout_seed": options.seed,
    }
    for name, temperature in (("temperature_0", 0.0), ("temperature_1", 1.0)):
        params = SamplingParams(temperature=temperature, max_tokens=options.max_tokens, seed=1)
        figures[name] = by_family(examples, llm.generate(prompts, params))
    for name in ("temperature_0", "temperature_1"):
        print(f"\n{name}\n{'family':12}{'right':>8}{'tokens per step':>18}   accepted by position")
        for family, row in figures[name].items():
            rates = " ".join(f"{rate:.2f}" for rate in row["rate_per_position"])
            length = row["acceptance_length"]
            print(f"{family:12}{row['right']:>8.1%}{length:>18.2f}   {rates}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if meets_the_bars(figures["temperature_0"]) else 1


if __name__ == "__main__":
    sys.exit(main())
