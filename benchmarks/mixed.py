"""Step times of running requests while a long prompt prefills in the same steps.

    python benchmarks/mixed.py [--shapes qwen3-8b] [--running 8] [--prompt-len 4096] [--max-ratio 3]

Random weights, acceptance length forced to 6, warmed up like a server. The requests first decode
alone; then a prompt arrives, three times. Exits with 1 if a step takes more than `--max-ratio`
times the usual one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.tools.bench.engine_step import random_prompts
from strobe.tools.bench.published_shapes import NAMES, directories
from strobe.warmup.warmup_steps import warm_up

FORCED = 6.0
ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def timed(engine: Engine, steps: int) -> list[float]:
    """Run steps and return the milliseconds of each."""
    times: list[float] = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def prefill_times(engine: Engine, prompt: list[int]) -> list[float]:
    """Return the milliseconds of each step from a prompt's arrival to its first token."""
    request = engine.add(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    times: list[float] = []
    while request.finish_reason is None:
        times += timed(engine, 1)
    return times


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    with directories(arguments.shapes) as (target, draft):
        config = EngineConfig(
            target=target,
            draft=draft,
            load_format="dummy",
            device=arguments.device,
            max_num_seqs=arguments.running + 1,
            max_model_len=arguments.prompt_len + 1536,
            enable_prefix_caching=False,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
        )
        engine = Engine(resolve(config), simulated_acceptance=FORCED)
    warm_up(engine)
    running = [
        engine.add(prompt, ENDLESS) for prompt in random_prompts(engine, arguments.running, 256)
    ]
    while not all(request.num_output > 60 for request in running):
        engine.step()
    usual_ms = median(timed(engine, 40))
    rounds: list[dict[str, object]] = []
    for number in range(3):
        (prompt,) = random_prompts(engine, 1, arguments.prompt_len - number)
        times = prefill_times(engine, prompt)
        timed(engine, 5)
        rounds.append(
            {
                "steps": len(times),
                "first_token_ms": round(sum(times), 1),
                "median_ms": round(median(times), 2),
                "worst_ms": round(max(times), 2),
                "worst_over_usual": round(max(times) / usual_ms, 2),
            }
        )
    gpu = torch.cuda.get_device_name() if engine.resolved.device.type == "cuda" else "cpu"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": gpu,
        "torch": torch.__version__,
        "running": arguments.running,
        "prompt_tokens": arguments.prompt_len,
        "rows_of_a_mixed_step": engine.limits.max_mixed_tokens,
        "usual_ms": round(usual_ms, 2),
        "rounds": rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-ratio", type=float, default=3.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = measure(arguments)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    rounds: list[dict[str, float]] = report["rounds"]  # type: ignore[assignment]
    return int(any(result["worst_over_usual"] > arguments.max_ratio for result in rounds))


if __name__ == "__main__":
    sys.exit(main())
