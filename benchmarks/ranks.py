"""Plain decoding and start of one rank and of several, with the demo models.

    python benchmarks/ranks.py [--device cpu] [--ranks 2] [--concurrency 1] [--rounds 3]
                               [--json FILE]

Every run is a process of its own that starts an engine, decodes plainly for a number of steps and
prints its figures. On a CPU one rank uses all cores, several share them. The ways alternate; the
best round of each counts. A start lasts until the engine can take a request, imports not included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from strobe import __version__


def run(device: str, ranks: int, concurrency: int, steps: int) -> dict[str, float]:
    """Time one engine. Returns seconds until it starts, and tokens/s."""
    from strobe.config import EngineConfig
    from strobe.ranks.leader import start_engine
    from strobe.sampling_params import SamplingParams

    began = time.perf_counter()
    engine = start_engine(
        EngineConfig(method="none", device=device, tensor_parallel_size=ranks, adaptive=False)
    )
    started = time.perf_counter() - began
    params = SamplingParams(temperature=0.0, max_tokens=steps + 20, ignore_eos=True)
    for i in range(concurrency):
        engine.add(list(range(10 + i, 42 + i)), params)
    for _ in range(20):
        engine.step()
    began, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(event.tokens) for event in engine.step())
    return {"start_s": started, "tokens_per_s": tokens / (time.perf_counter() - began)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.device, options.one, options.concurrency, options.steps)))
        return 0
    rounds: dict[int, list[dict[str, float]]] = {1: [], options.ranks: []}
    for _ in range(options.rounds):
        for ranks, figures in rounds.items():
            command = [sys.executable, __file__, *sys.argv[1:], f"--one={ranks}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures.append(json.loads(done.stdout.splitlines()[-1]))
    best: dict[int, dict[str, float]] = {
        ranks: {
            "start_s": round(min(f["start_s"] for f in figures), 2),
            "tokens_per_s": round(max(f["tokens_per_s"] for f in figures), 1),
        }
        for ranks, figures in rounds.items()
    }
    one, several = best[1], best[options.ranks]
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"strobe": __version__, "torch": version("torch")},
        "device": options.device,
        "concurrency": options.concurrency,
        "ranks": best,
        "speed_ratio": round(several["tokens_per_s"] / one["tokens_per_s"], 2),
        "longer_start_s": round(several["start_s"] - one["start_s"], 2),
    }
    print(json.dumps(report, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
