"""Cost of clients that send bodies slowly to the other clients of a server with few descriptors.

    python benchmarks/slow_bodies.py [--slow 200] [--clients 32] [--descriptors 256] [--rounds 5]
        [--seconds 20] [--json FILE]

Each round measures tokens/s, as counted by the engine, without and with the slow clients, in an
order that changes from round to round. A normal client sends one request after another on a
keep-alive connection. A slow one announces a body of 1 MiB and sends a byte per second; a second
after it is rejected it connects again. /health is requested every half second on a new connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from serving import Connection, Server, bodies

from strobe.config import DEMO_MODELS
from strobe.text.tokenizer import Tokenizer
from strobe.tools.demo_comparison import choose_examples

SLOW = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1048576\r\n\r\n{"
)


class Round:
    """Clients that run for some seconds, and counts of their failures."""

    def __init__(self, port: int, requests: list[dict[str, Any]], seconds: float):
        self.port, self.requests = port, requests
        self.end = time.monotonic() + seconds
        self.failed = self.refused = self.unhealthy = 0
        self.slowest_health = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.end

    async def client(self, number: int) -> None:
        connection = None
        while not self.over:
            number += 1
            try:
                connection = connection or await Connection(self.port).open()
                body = self.requests[number % len(self.requests)]
                await connection.post("/v1/completions", body)
            except (AssertionError, OSError, asyncio.IncompleteReadError):
                self.failed += 1
                connection = None
                await asyncio.sleep(0.1)
        if connection is not None:
            connection.writer.close()

    async def slow(self) -> None:
        while not self.over:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                answer = asyncio.ensure_future(reader.read(1))
                writer.write(SLOW)
                try:
                    while not (answer.done() or self.over):
                        await asyncio.wait({answer}, timeout=1)
                        writer.write(b" ")
                finally:
                    answer.cancel()
                    writer.close()
                self.refused += not self.over
            await asyncio.sleep(1)

    async def health(self) -> None:
        while not self.over:
            began, status = time.monotonic(), b""
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    status = await reader.readline()
                    writer.close()
            self.unhealthy += b" 200 " not in status
            self.slowest_health = max(self.slowest_health, time.monotonic() - began)
            await asyncio.sleep(0.5)


def generated_tokens(port: int) -> float:
    """Return the tokens generated so far, as counted by the engine."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        counts = re.findall(
            r"^vllm:generation_tokens_total\S* (\S+)$", answer.read().decode(), re.M
        )
    return sum(map(float, counts))


async def attack(port: int, slow: int, seconds: float) -> None:
    """Run slow clients for some seconds, and print how often one was rejected."""
    clients_round = Round(port, [], seconds)
    await asyncio.gather(*[clients_round.slow() for _ in range(slow)])
    print(clients_round.refused)


async def measure(
    server: Server, requests: list[dict[str, Any]], clients: int, slow: int, seconds: float
) -> dict[str, Any]:
    clients_round = Round(server.port, requests, seconds + 4)
    tasks = [asyncio.create_task(clients_round.client(997 * number)) for number in range(clients)]
    tasks.append(asyncio.create_task(clients_round.health()))
    command = [sys.executable, __file__, f"--attack={server.port}", f"--slow={slow}"]
    # In its own session, since the kernel divides CPU time between sessions.
    attack = await asyncio.create_subprocess_exec(
        *command, f"--seconds={seconds + 4}", stdout=subprocess.PIPE, start_new_session=True
    )
    await asyncio.sleep(4)  # all have connected
    began, before = time.monotonic(), await asyncio.to_thread(generated_tokens, server.port)
    cpu = server.cpu_seconds()
    await asyncio.sleep(seconds)
    ended, after = time.monotonic(), await asyncio.to_thread(generated_tokens, server.port)
    cpu = [round(now - then, 2) for then, now in zip(cpu, server.cpu_seconds(), strict=True)]
    refused, _ = await attack.communicate()
    await asyncio.gather(*tasks)
    return {
        "tokens_per_second": round((after - before) / (ended - began), 1),
        "cpu_seconds": cpu,
        "failed": clients_round.failed,
        "slow_refused": int(refused),
        "health_failed": clients_round.unhealthy,
        "health_slowest_ms": round(clients_round.slowest_health * 1e3, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--slow", type=int, default=200)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--descriptors", type=int, default=256, help="the server's limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        asyncio.run(attack(options.attack, options.slow, options.seconds))
        return 0
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.descriptors, hard))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = Server([f"--max-num-seqs={options.clients}", "--no-enable-prefix-caching"])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        figures = asyncio.run(measure_rounds(server, options))
    finally:
        server.process.terminate()
        server.process.wait(60)
    print(json.dumps(figures, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2))
    return 0


async def measure_rounds(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Measure without and with slow clients in each round; a round's change compares its own two
    measurements."""
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    prompts = [
        tokenizer.render_chat(example.messages, enable_thinking=example.thinking)
        for example in choose_examples(192)
        if not example.tools
    ]
    requests = bodies(prompts, 128, False)
    await measure(server, requests, options.clients, 0, options.seconds / 2)  # warm-up
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        result: dict[str, Any] = {}
        for slow in (0, options.slow) if number % 2 == 0 else (options.slow, 0):
            way = "beside slow bodies" if slow else "alone"
            result[way] = await measure(server, requests, options.clients, slow, options.seconds)
        rates = {way: figures["tokens_per_second"] for way, figures in result.items()}
        result["change"] = round(rates["beside slow bodies"] / rates["alone"] - 1, 4)
        rounds.append(result)
        print(json.dumps(result), file=sys.stderr)
    return {
        "date": date.today().isoformat(),
        "slow": options.slow,
        "clients": options.clients,
        "descriptors": options.descriptors,
        "seconds": options.seconds,
        "median_change": statistics.median([result["change"] for result in rounds]),
        "rounds": rounds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
