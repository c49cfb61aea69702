"""CPU time of the HTTP process for each delivery of a streamed answer, without an engine.

    python benchmarks/deliveries.py [--rounds 7] [--json FILE]

A scripted engine has an answer of 1,000 verify steps of 4 tokens ready, and one of a single step.
Their difference, divided by the steps between them, is the time for one delivery: detokenizing,
parsing, the event's JSON and its way through the middleware. The best round counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from strobe import __version__  # noqa: E402
from tests.server.support.scripted_server import Script, post, tokenizer  # noqa: E402

TOKENS_PER_STEP = 4
NUM_STEPS = 1000
WORDS = "The answer has a few words of prose, a number such as 42, and then it goes on. "
MESSAGES = [{"role": "user", "content": "Hello."}]
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello."},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2000},
    "/api/chat": {"model": "scripted", "messages": MESSAGES},
}


def script(num_steps: int) -> Script:
    """Return an engine with an answer of so many steps."""
    made = Script(WORDS * num_steps, size=TOKENS_PER_STEP, ends="length")
    made.ids = made.ids[: num_steps * TOKENS_PER_STEP]
    return made


def seconds(path: str, num_steps: int) -> float:
    """Return the CPU time of one streamed request."""
    engine = script(num_steps)
    started = time.process_time()
    answer = post(path, engine, **REQUESTS[path], stream=True)
    taken = time.process_time() - started
    assert answer.status == 200, answer.body
    return taken


def per_delivery(path: str, rounds: int) -> float:
    """Return microseconds for each delivery of an endpoint."""
    long = min(seconds(path, NUM_STEPS) for _ in range(rounds))
    short = min(seconds(path, 1) for _ in range(rounds))
    return 1e6 * (long - short) / (NUM_STEPS - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer()
    about = f"Strobe {__version__}, Python {platform.python_version()}, {date.today()}"
    figures = {path: round(per_delivery(path, options.rounds), 1) for path in REQUESTS}
    print(about)
    for path, microseconds in figures.items():
        print(f"{path:22} {microseconds:6.1f} µs")
    if options.json is not None:
        report = {"about": about, "microseconds": figures}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
