"""Tokens/s of `strobe serve` with one engine and with several.

    python benchmarks/replicas.py [--device cpu] [--shapes demo] [--replicas 2] [--rounds 3]
                                  [--json FILE] [-- OPTIONS]

Every way answers the same held-out prompts of the demo models, greedily and with equally many
tokens. There are enough clients to fill all places of all engines. The ways alternate; the best
round of each counts. Other shapes have random weights and the demo models' tokenizer. Options
after -- go to `strobe serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import time
from datetime import date
from importlib.metadata import version
from typing import Any

from serving import Server, bodies, load

from strobe import LLM, __version__
from strobe.config import DEMO_MODELS
from strobe.host.openmp import usable_cores
from strobe.tools.bench.published_shapes import directories
from strobe.tools.demo_comparison import choose_examples, prompts_of


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shapes", default="demo", help="of published models, such as qwen3-8b")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--max-num-seqs", type=int, default=16, help="places of each engine")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("arguments", nargs="*", help="of strobe serve, after --")
    options = parser.parse_args()
    llm = LLM(device="cpu")
    prompts: list[Any] = prompts_of(llm, choose_examples(options.requests))
    requests = bodies(prompts, options.max_tokens, False)
    cores, count = usable_cores(), options.replicas
    concurrency = count * options.max_num_seqs
    several = f"{count} engines, one thread each"
    ways = {"one engine, one thread": (1, 1), several: (count, 1)}
    if options.device == "cpu":
        ways[f"one engine, {cores} threads"] = (1, cores)
    with directories(options.shapes) as (target, draft):
        models = [target, f"--draft={draft}"]
        if options.shapes != "demo":
            shutil.copy(DEMO_MODELS / "target" / "tokenizer.json", target)
            models += ["--load-format=dummy", "--dtype=bfloat16"]
        arguments = [
            *models, f"--device={options.device}", "--no-enable-prefix-caching",
            f"--max-num-seqs={options.max_num_seqs}", *options.arguments,
        ]  # fmt: skip
        rates = measure(ways, arguments, requests, concurrency, options.rounds)
    best = {name: max(all_rates) for name, all_rates in rates.items()}
    figures = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {cores} cores",
        "versions": {"strobe": __version__, "torch": version("torch")},
        "device": options.device,
        "shapes": options.shapes,
        "requests": options.requests,
        "concurrency": concurrency,
        "max_tokens": options.max_tokens,
        "arguments": options.arguments,
        "tokens_per_s": {name: round(rate, 1) for name, rate in best.items()},
        "all_rounds": {name: [round(r) for r in all_rates] for name, all_rates in rates.items()},
        "ratio": {name: round(best[several] / rate, 2) for name, rate in best.items()},
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
    return 0


def measure(
    ways: dict[str, tuple[int, int]],
    arguments: list[str],
    requests: list[dict[str, Any]],
    concurrency: int,
    rounds: int,
) -> dict[str, list[float]]:
    """Return the tokens/s of each way's rounds. ways: numbers of engines and of their threads."""
    servers: dict[str, Server] = {}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for name, (engines, threads) in ways.items():
            os.environ["OMP_NUM_THREADS"] = str(threads)
            servers[name] = Server([*arguments, f"--data-parallel-size={engines}"])
        for round_index in range(rounds + 1):
            for name, server in servers.items():
                began = time.perf_counter()
                tokens = asyncio.run(load(server.port, requests, concurrency))
                if round_index:  # the first one warms up
                    rates[name].append(tokens / (time.perf_counter() - began))
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(60)
    return rates


if __name__ == "__main__":
    raise SystemExit(main())
