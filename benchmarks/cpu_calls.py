"""Counts torch's calls in one plain step on a CPU, by operation, and times steps: all of each, its
products with weights, and the rest, in processor time of the main thread, so that other processes
disturb little.

    python benchmarks/cpu_calls.py [--target smollm2] [--requests 1] [--weight-dtype auto]
        [--compile]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from statistics import median

import torch
from cpu_turns import Stopwatch
from torch.profiler import ProfilerActivity, profile

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.models.linear import Linear


def decoding_engine(options: argparse.Namespace) -> Engine:
    """Return an engine in which all requests decode without drafts."""
    engine = Engine(
        EngineConfig(
            target=options.target,
            method="none",
            device="cpu",
            dtype=options.dtype,
            weight_dtype=options.weight_dtype,
            compile=options.compile,
            max_num_seqs=options.requests,
            max_model_len=2048,
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
    for i in range(options.requests):
        engine.add([100 + i] * options.context, params)
    while not all(request.is_decoding for request in engine.scheduler.running):
        engine.step()
    for _ in range(8):
        engine.step()
    return engine


def count_calls(engine: Engine) -> Counter[str]:
    """Return one step's calls by operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step()
    return Counter(event.name for event in profiler.events())


def time_steps(engine: Engine, steps: int) -> list[tuple[float, float]]:
    """Return the milliseconds of processor time of each step, and of its packed products."""
    watch = Stopwatch(time.thread_time)
    model = engine.runner.model
    for linear in model.modules():
        if isinstance(linear, Linear) and linear.product is not None:
            linear.product = watch.wrap(linear.product)
    if model.packed_head is not None:
        product = watch.wrap(model.packed_head.product)
        model.packed_head = model.packed_head._replace(product=product)
    times: list[tuple[float, float]] = []
    for _ in range(steps):
        watch.seconds = 0.0
        start = time.thread_time()
        engine.step()
        times.append((1e3 * (time.thread_time() - start), 1e3 * watch.seconds))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=30, help="operations to list")
    options = parser.parse_args()
    engine = decoding_engine(options)
    calls = count_calls(engine)
    times = time_steps(engine, options.steps)
    print("| operation | calls |\n|---|---|")
    for name, count in calls.most_common(options.rows):
        print(f"| `{name}` | {count} |")
    figures = {
        "torch": torch.__version__,
        "compile": options.compile,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "calls": calls.total(),
        "step_ms": round(median([step for step, _ in times]), 2),
        "products_ms": round(median([products for _, products in times]), 2),
        "around_ms": round(median([step - products for step, products in times]), 2),
        "around_ms_min": round(min([step - products for step, products in times]), 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
