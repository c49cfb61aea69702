"""Compare planned and used memory on a GPU: weights, KV pool, graphs and steps.

    python benchmarks/memory.py [--shapes qwen3-8b] [--max-num-seqs 64] [--within 0.03]

With default settings the KV pool takes the rest of the GPU's planned memory. Then every kind of
step runs: a full prefill, decoding at every captured number of requests, greedy and sampled, and
steps that mix prompts and decoding. Exits with 1 if the use differs from the plan by more than
`--within`, or if steps fail.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.tools.bench.engine_step import random_prompts
from strobe.tools.bench.published_shapes import NAMES, directories
from strobe.warmup.warmup_steps import warm_up


def drive(engine: Engine, count: int, sampling: SamplingParams) -> None:
    """Run `count` requests at once until each has some tokens."""
    requests = [engine.add(prompt, sampling) for prompt in random_prompts(engine, count, 300)]
    while not all(request.num_output > 24 for request in requests):
        engine.step()
    for request in requests:
        engine.finish(request, "abort")
    while engine.has_work:
        engine.step()


def used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    with directories(arguments.shapes) as (target, draft):
        config = EngineConfig(
            target=target,
            draft=draft,
            load_format="dummy",
            max_num_seqs=arguments.max_num_seqs,
            enable_prefix_caching=False,
        )
        resolved = resolve(config)
        before = used(resolved.device)
        engine = Engine(resolved, simulated_acceptance=6.0)
    parts = engine.components
    stores = sum(store.data.nbytes for store in parts.stores.values())
    weights = torch.cuda.memory_allocated() - stores
    limits = engine.limits
    began = time.perf_counter()
    warm_up(engine)
    warmed = round(time.perf_counter() - began, 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    warm = greedy.clone(temperature=1.0, top_p=0.9, seed=1)
    long = random_prompts(engine, 4, limits.max_num_batched_tokens // 2)
    first = [engine.add(prompt, greedy.clone(max_tokens=1)) for prompt in long]
    while any(request.finish_reason is None for request in first):
        engine.step()
    for sampling in (greedy, warm):
        for count in parts.runner.buckets.spans:
            drive(engine, count, sampling)
    torch.cuda.synchronize()
    planned = weights + stores + resolved.scratch.total
    real = used(resolved.device) - before
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "weights": weights,
        "kv": stores,
        "steps_and_graphs": resolved.scratch.total,
        "planned": planned,
        "used": real,
        "used_over_planned": round(real / planned, 4),
        "graphs": len(engine.graphs),
        "warm_up_s": warmed,
        "peak_of_tensors": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "free": torch.cuda.mem_get_info()[0],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--within", type=float, default=0.03)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, but there is none.", file=sys.stderr)
        return 1
    report = measure(arguments)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(abs(report["used_over_planned"] - 1) > arguments.within)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
