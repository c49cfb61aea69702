"""Tokens/s of `strobe demo` with several ways for threads to wait, on idle and on busy cores.

    python benchmarks/threads.py [--rounds 3] [--spins 1000 3000] [--json FILE]

In each round and for each state of the machine, `strobe demo` runs once with each way, in its own
process: Strobe's choice ("chosen"), libgomp's default ("libgomp"), without spinning ("passive"), in
one thread ("one thread"), and with given spin counts. Busy means another process on every core. The
figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from strobe.host.openmp import SPIN_COUNT, WAIT_VARIABLES, free_cores

CORES = sorted(os.sched_getaffinity(0))
FIGURES = ("dflash_tokens_per_s", "plain_tokens_per_s", "seconds")


def burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def neighbours(state: str) -> Iterator[None]:
    """Run a busy process on each core if the state is busy."""
    burners = [multiprocessing.Process(target=burn, args=(core,), daemon=True) for core in CORES]
    burners = burners if state == "busy" else []
    for process in burners:
        process.start()
    try:
        time.sleep(0.5)  # wait until they run, or have ended
        yield
    finally:
        for process in burners:
            process.kill()
            process.join()


def demo(variables: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    """Run the demo with these variables instead of the environment's own; return its figures."""
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
    size = [f"--prompts={options.prompts}", f"--max-tokens={options.max_tokens}", "--repeats=1"]
    began = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "strobe", "demo", "--json", *size],
        env=environment | variables, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    figures = json.loads(run.stdout) | {"seconds": time.perf_counter() - began}
    return {name: figures[name] for name in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--spins", type=int, nargs="*", default=[SPIN_COUNT])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    all_cores = {"OMP_NUM_THREADS": str(len(CORES))}
    ways = {
        "chosen": dict[str, str](),
        "libgomp": all_cores | {"GOMP_SPINCOUNT": "300000"},  # libgomp's default
        "passive": all_cores | {"OMP_WAIT_POLICY": "PASSIVE"},
        "one thread": {"OMP_NUM_THREADS": "1"},
        **{f"{spins} spins": all_cores | {"GOMP_SPINCOUNT": str(spins)} for spins in options.spins},
    }
    if free_cores(len(CORES)) < len(CORES):
        print("Other processes are running, so no state is idle.", file=sys.stderr)
    cells: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for state in ("idle", "busy"):
            with neighbours(state):
                for way, variables in ways.items():
                    cells.setdefault((way, state), []).append(demo(variables, options))
                    print(way, state, cells[way, state][-1], file=sys.stderr, flush=True)
    result: dict[str, Any] = {"cores": len(CORES)}
    for way in ways:
        for name in FIGURES:
            idle, busy = [median(run[name] for run in cells[way, s]) for s in ("idle", "busy")]
            figures = {"idle": idle, "busy": busy, "share": busy / idle}
            result.setdefault(way, {})[name] = {k: round(v, 3) for k, v in figures.items()}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
