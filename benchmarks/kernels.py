"""Where a step's time goes, kernel by kernel: steady decoding by shapes, random weights.

    python benchmarks/kernels.py [--shapes qwen3-8b] [--concurrency 1 8 32] [--method dflash none]

Steps run under torch's profiler. Kernels that are launched early overlap with the one before, so
a kernel's share is the time from the end of the kernel before to its own end; the shares add up to
the steps' whole time on the device. A line is one kernel with one grid: GEMMs of different
sizes share a name and differ in it.
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
    """The kernels of `steps` steady steps of `count` requests, in the order of their ends."""
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
    found = [event for event in events if event.get("cat") in kinds]
    return sorted(found, key=lambda event: event["ts"] + event["dur"])


def shares(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Kernel and grid -> microseconds from the end before to its own, for each launch."""
    result: dict[str, list[float]] = defaultdict(list)
    before = events[0]["ts"]
    for event in events:
        end = event["ts"] + event["dur"]
        grid = "x".join(str(size) for size in event["args"].get("grid", []))
        result[f"{event['name'][:70]} {grid}"].append(end - before)
        before = end
    return result


def show(found: dict[str, list[float]], steps: int, least: float) -> None:
    whole = sum(sum(times) for times in found.values()) / steps
    print(f"{whole / 1e3:.3f} ms a step; launches a step, median, sum in µs, share")
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
        total = sum(times) / steps
        if total >= least:
            print(
                f"{len(times) / steps:7.1f} {median(times):8.1f} {total:9.1f} "
                f"{total / whole:6.1%}  {name}"
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
    parser.add_argument("--least", type=float, default=5.0, help="microseconds a step to be shown")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device; this needs one.", file=sys.stderr)
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
            found = shares(trace(engine, count, arguments.prompt_len, steps))
            print(f"\n{method}, {count} requests: ", end="")
            show(found, steps, arguments.least)
        del engine
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
