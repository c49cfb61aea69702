"""Time of a step by kernel, in steady decoding with random weights of given shapes.

    python benchmarks/kernels.py [--shapes qwen3-8b] [--concurrency 1 8 32] [--method dflash none]

Steps run under torch's profiler. A kernel that is launched early overlaps with the previous one, so
its share is the time from the previous kernel's end to its own end; the shares add up to the steps'
total time on the device. A line is one kernel with one grid: GEMMs of different sizes share a name
but not a grid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.tools.bench.engine_step import random_prompts
from strobe.tools.bench.published_shapes import NAMES, directories

GREEDY = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)


def trace(engine: Engine, count: int, length: int, steps: int) -> list[dict[str, Any]]:
    """Return the kernels of `steps` steady steps of `count` requests, sorted by their ends."""
    requests = [engine.add(prompt, GREEDY) for prompt in random_prompts(engine, count, length)]
    for _ in range(20 + count):
        engine.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    for request in requests:
        engine.finish(request, "abort")
    while engine.has_work:
        engine.step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in kinds]
    return sorted(kernels, key=lambda event: event["ts"] + event["dur"])


def shares(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return, by kernel and grid, the microseconds of each launch: previous end to own end."""
    result: dict[str, list[float]] = defaultdict(list)
    before = events[0]["ts"]
    for event in events:
        end = event["ts"] + event["dur"]
        grid = "x".join(str(size) for size in event["args"].get("grid", []))
        result[f"{event['name'][:70]} {grid}"].append(end - before)
        before = end
    return result


def show(times_by_kernel: dict[str, list[float]], steps: int, min_us: float) -> None:
    step_us = sum(sum(times) for times in times_by_kernel.values()) / steps
    print(f"{step_us / 1e3:.3f} ms per step; launches per step, median, sum in µs, share")
    for name, times in sorted(times_by_kernel.items(), key=lambda item: -sum(item[1])):
        total = sum(times) / steps
        if total >= min_us:
            print(
                f"{len(times) / steps:7.1f} {median(times):8.1f} {total:9.1f} "
                f"{total / step_us:6.1%}  {name}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--method", nargs="+", choices=["dflash", "none"], default=["dflash"])
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--weight-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--min-us", type=float, default=5.0, help="minimum shown, per step")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, but there is none.", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for method in arguments.method:
        with directories(arguments.shapes) as (target, draft):
            config = EngineConfig(
                target=target,
                draft=draft if method == "dflash" else None,
                method=method,
                load_format="dummy",
                weight_dtype=arguments.weight_dtype,
                max_num_seqs=max(arguments.concurrency),
                max_model_len=arguments.max_model_len,
                enable_prefix_caching=False,
            )
            forced = 6.0 if method == "dflash" else None
            engine = Engine(resolve(config), simulated_acceptance=forced)
        for count in arguments.concurrency:
            steps = arguments.steps
            times_by_kernel = shares(trace(engine, count, arguments.prompt_len, steps))
            print(f"\n{method}, {count} requests: ", end="")
            show(times_by_kernel, steps, arguments.min_us)
        del engine
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
