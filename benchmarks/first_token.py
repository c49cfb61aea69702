"""Time to the first token of a long prompt: computed, and with its prefix on the device or in host
memory.

    python benchmarks/first_token.py [--shapes qwen3-8b] [--prefix 16000] [--fillers 2]

Random weights, warmed up like a server, one request at a time. The first prompt of a round is new,
and the next ones continue it, as the turns of a chat do: the second while the device holds it, the
third once other prompts have taken the device's pages, so that its prefix is in host memory only.
Exits with 1 if a prompt got its prefix from elsewhere, with the state of both tiers, or if a ratio
is above --max-device or --max-host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.tools.bench.engine_step import random_prompts
from strobe.tools.bench.published_shapes import NAMES, directories
from strobe.warmup.warmup_steps import warm_up

SUFFIX = 64
"""Tokens of a prompt after its prefix."""
UNCACHED = 128
"""Maximum tokens at a prefix's end that are computed again: the last border of a recurrent target's
states is up to 64 tokens before it."""
ROOM = 1.5
"""Prompts that the device's pages hold: one to bring back, but not the fillers as well."""
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
Times: TypeAlias = dict[str, list[float]]


def make_engine(arguments: argparse.Namespace) -> Engine:
    """Return an engine with random weights, warmed up, whose pages hold ROOM prompts."""
    max_model_len = arguments.prefix + SUFFIX + 64
    with directories(arguments.shapes) as (target, draft):
        config = EngineConfig(
            target=target,
            draft=draft,
            load_format="dummy",
            device=arguments.device,
            max_num_seqs=2,
            max_model_len=max_model_len,
            kv_cache_memory=arguments.kv_cache_memory,
            state_cache_memory=arguments.state_cache_memory,
            kv_offload_memory=arguments.kv_offload_memory,
        )
        resolved = resolve(config)
        if config.kv_cache_memory is None:
            num_pages = int(ROOM * resolved.limits.max_pages)
            resolved = resolve(config.with_(kv_cache_memory=num_pages * resolved.page_bytes))
        engine = Engine(resolved, simulated_acceptance=6.0)
    warm_up(engine)
    return engine


def first_token(engine: Engine, prompt: list[int]) -> tuple[Request, float]:
    """Return the request of a prompt and the milliseconds to its first token."""
    began = time.perf_counter()
    request = engine.add(prompt, ONE_TOKEN)
    while request.finish_reason is None:
        engine.step()
    spent = 1e3 * (time.perf_counter() - began)
    while engine.has_work:  # the step after it, which was launched before its end was known
        engine.step()
    return request, spent


def run_rounds(engine: Engine, prefix_length: int, rounds: int, num_fillers: int) -> Times:
    """Return the milliseconds of each kind of prompt. The first round loads the kernels; `rounds`
    more count."""
    times: Times = {"computed": [], "on the device": [], "in host memory": []}
    length = prefix_length + SUFFIX
    drawn = random_prompts(engine, (rounds + 1) * (2 + num_fillers), length)
    for _ in range(rounds + 1):
        prefix = drawn.pop()[:prefix_length]
        suffixes = drawn.pop()
        request, spent = first_token(engine, prefix)
        check(engine, request, "nowhere")
        times["computed"].append(spent)

        request, spent = first_token(engine, prefix + suffixes[:SUFFIX])
        check(engine, request, "on the device")
        times["on the device"].append(spent)

        for _ in range(num_fillers):
            request, _ = first_token(engine, drawn.pop())
            check(engine, request, "nowhere")
        request, spent = first_token(engine, prefix + suffixes[SUFFIX : 2 * SUFFIX])
        check(engine, request, "in host memory")
        times["in host memory"].append(spent)
    return times


def check(engine: Engine, request: Request, place: str) -> None:
    """Exit if a request's prefix was not in this place; say what the tiers hold."""
    cached = request.num_cached or 0
    from_host = request.num_host_cached
    enough = request.num_prompt - SUFFIX - UNCACHED
    is_expected = {
        "nowhere": not cached,
        "on the device": cached >= enough and not from_host,
        "in host memory": from_host >= enough,
    }
    if not is_expected[place]:
        sys.exit(
            f"A prompt of {request.num_prompt} tokens found {cached} of them, {from_host} in host "
            f"memory; its prefix was expected {place}. Give --kv-cache-memory room for one prompt, "
            f"--kv-offload-memory for all of a round, or more --fillers. The tiers: "
            f"{json.dumps(tier_state(engine, request))}"
        )


def tier_state(engine: Engine, request: Request) -> dict[str, Any]:
    """Return what decides whether a request's prefix is brought back from host memory."""
    tier = engine.components.host_tier
    assert tier is not None
    end = request.num_prompt
    keys = request.page_keys
    stats = engine.stats
    return {
        "copied_gb_per_s": round(tier.bytes_per_ms / 1e6, 2),
        "copying_its_pages_ms": round(
            sum(len(keys) * rows.row_bytes for rows in tier.pages) / tier.bytes_per_ms, 1
        ),
        "computing_it_ms": round(engine.prefill_costs.ms(0, end), 1),
        "prompt_steps": engine.prefill_costs.steps,
        "its_pages": len(keys),
        "device_pages": [group.capacity for group in tier.pool.groups],
        "host_rows": [rows.num_rows for rows in tier.pages],
        "host_rows_in_use": [len(rows) for rows in tier.pages],
        "its_pages_in_host": [sum(key in rows for key in keys) for rows in tier.pages],
        "states_in_host": len(tier.states),
        "saves": stats.host_saves,
        "loads": stats.host_loads,
        "host_queries": stats.host_queries,
        "states_kept": stats.states_kept,
    }


def report_of(engine: Engine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds and return their figures."""
    times = run_rounds(engine, arguments.prefix, arguments.rounds, arguments.fillers)
    medians = {name: median(values[1:]) for name, values in times.items()}
    whole = medians["computed"]
    on_gpu = engine.resolved.device.type == "cuda"
    tier = engine.components.host_tier
    assert tier is not None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "shapes": arguments.shapes,
        "prefix_tokens": arguments.prefix,
        "host_gb_per_s": round(tier.bytes_per_ms / 1e6, 2),
        "first_token_ms": {name: round(value, 1) for name, value in medians.items()},
        "of_computed": {name: round(value / whole, 3) for name, value in medians.items()},
        "rounds_ms": {name: [round(ms, 1) for ms in values] for name, values in times.items()},
    }


def main() -> int:
    """Measure, print the figures as JSON and compare them with the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", choices=NAMES, default="qwen3-8b")
    parser.add_argument("--prefix", type=int, default=16000)
    parser.add_argument("--fillers", type=int, default=2, help="prompts that take the pages")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-cache-memory", help=f"by default for {ROOM} prompts")
    parser.add_argument("--state-cache-memory")
    parser.add_argument("--kv-offload-memory", default="16GiB")
    parser.add_argument("--max-device", type=float, default=0.05)
    parser.add_argument("--max-host", type=float, default=0.25)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    report = report_of(make_engine(arguments), arguments)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    ratios: dict[str, float] = report["of_computed"]
    is_above = (
        ratios["on the device"] > arguments.max_device
        or ratios["in host memory"] > arguments.max_host
    )
    return int(is_above)


if __name__ == "__main__":
    sys.exit(main())
