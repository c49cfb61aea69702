"""Many sampled steps with requests that arrive, end and are aborted: no error, no leak, no NaN.

    python benchmarks/endurance.py [--steps 50000] [--device cuda] [--json FILE]

The demo models in bf16 on a GPU, sampling at temperature 1 with top-p 0.9, speculation at random
per request. Every 1,000 steps the engine checks its bookkeeping, also against the device. K/V
caches must be free of NaN, all pages must be freed, and memory and the number of captured graphs
must not grow after the first tenth. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.request import Request


def ask(engine: Engine, rng: random.Random) -> Request:
    prompt = [rng.randrange(4, 2000) for _ in range(rng.choice((3, 17, 60, 300)))]
    params = SamplingParams(
        temperature=1.0,
        top_p=0.9,
        seed=rng.randrange(1 << 30),
        max_tokens=rng.choice((1, 20, 150, 400)),
        speculation=rng.choice((None, None, None, False, {"num_drafts": 5})),
    )
    return engine.add(prompt, params)


def run(steps: int, device: str, seed: int) -> dict[str, object]:
    dtype = "bfloat16" if device != "cpu" else "float32"
    config = EngineConfig(device=device, dtype=dtype, max_num_seqs=16, kv_cache_memory="256MiB")
    engine, rng = Engine(config), random.Random(seed)
    open_ones: list[Request] = []
    faults: list[str] = []
    steady: tuple[int, int] | None = None
    tokens = requests = 0
    began = time.perf_counter()
    for step in range(1, steps + 1):
        while len(open_ones) < 16 and rng.random() < 0.3:
            open_ones.append(ask(engine, rng))
            requests += 1
        if open_ones and rng.random() < 0.01:
            engine.finish(rng.choice(open_ones), "abort")
        tokens += sum(len(event.tokens) for event in engine.step())
        open_ones = [request for request in open_ones if request.finish_reason is None]
        if step % 1000 == 0 or step == steps:
            engine.check()
            for name, store in engine.components.stores.items():
                if not all(bool(torch.isfinite(layer).all()) for layer in store.data):
                    faults.append(f"step {step}: the {name}'s cache holds what is no number")
        if step >= steps // 10 and steady is None and device != "cpu":
            torch.cuda.synchronize()
            steady = torch.cuda.memory_reserved(), len(engine.graphs)
    for request in open_ones:
        engine.finish(request, "abort")
    while engine.has_work:
        engine.step()
    engine.check()
    if engine.components.pool.available != engine.components.pool.capacity:
        faults.append("pages are lost")
    ended = (torch.cuda.memory_reserved(), len(engine.graphs)) if device != "cpu" else None
    if steady is not None and ended is not None and ended[0] > steady[0] + (64 << 20):
        faults.append(f"memory grew from {steady[0]} to {ended[0]} bytes")
    seconds = time.perf_counter() - began
    name = torch.cuda.get_device_name() if device != "cpu" else platform.machine()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": name,
        "torch": torch.__version__,
        "steps": steps,
        "requests": requests,
        "tokens": tokens,
        "acceptance_length": round(engine.stats.draft_counts.acceptance_length or 0, 2),
        "milliseconds_per_step": round(1e3 * seconds / steps, 3),
        "memory_and_graphs_after_a_tenth": steady,
        "at_the_end": ended,
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = run(arguments.steps, arguments.device, arguments.seed)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
