"""What serving costs: the offline engine against `strobe serve`, the client included.

    python benchmarks/serving.py [--requests 192] [--concurrency 32] [--rounds 3] [--json FILE]

The same held-out prompts of the demo models, greedy, the same number of tokens each way. Ways
take turns; the best round of each counts. Time to first token is measured at concurrency 1, each
prompt both ways in turn, and compared prompt by prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from strobe import LLM, SamplingParams
from strobe.tools.demo import choose_examples, prompts_of


class Connection:
    """One kept-alive HTTP connection, as cheap as asyncio's streams allow."""

    def __init__(self, port: int):
        self.port = port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> Connection:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, float]:
        """(completion tokens, seconds to the first byte of the answer's body)."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        began = time.perf_counter()
        self.writer.write(head.encode() + data)
        headers = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert " 200 " in headers.split("\r\n")[0], headers
        length = re.search(r"content-length: (\d+)", headers)
        if length:
            answer = await self.reader.readexactly(int(length[1]))
            return json.loads(answer)["usage"]["completion_tokens"], time.perf_counter() - began
        first, made = 0.0, 0
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            chunk = await self.reader.readexactly(size + 2)
            first = first or time.perf_counter() - began
            for line in chunk.split(b"\n"):
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:]).get("usage")
                    made = usage["completion_tokens"] if usage else made
        await self.reader.readexactly(2)
        return made, first


class Server:
    """`strobe serve` in a process of its own."""

    def __init__(self, options: Sequence[str]):
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "strobe",
                "serve",
                "--port=0",
                "--no-access-log",
                *options,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            found = re.search(r":(\d+)/ is a page", line)
            if found:
                self.port = int(found[1])
                break
            print(line, end="", file=sys.stderr)
        if not self.port:
            raise SystemExit("the server did not start")
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr)

    def cpu_seconds(self) -> list[float]:
        """CPU time so far of the server's process and of its engine's."""
        found = [_cpu_of(self.process.pid)]
        children = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        return found + sorted((_cpu_of(int(pid)) for pid in children), reverse=True)[:1]


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def bodies(prompts: Sequence[list[int]], most: int, stream: bool) -> list[dict[str, Any]]:
    """The requests; a stream tells its usage at its end."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    common = {"max_tokens": most, "temperature": 0, **options}
    return [{"prompt": prompt, **common} for prompt in prompts]


async def load(port: int, requests: list[dict[str, Any]], concurrency: int) -> int:
    """Tokens made of all requests, so many at a time."""
    left = list(reversed(requests))
    made = 0

    async def worker() -> None:
        nonlocal made
        connection = await Connection(port).open()
        while left:
            tokens, _ = await connection.post("/v1/completions", left.pop())
            made += tokens
        connection.writer.close()

    await asyncio.gather(*[worker() for _ in range(concurrency)])
    return made


def offline(llm: LLM, prompts: Sequence[list[int]], most: int) -> int:
    """Tokens made by the offline API."""
    params = SamplingParams(temperature=0, max_tokens=most)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def first_token(llm: LLM, prompt: list[int], most: int) -> float:
    """Seconds to the offline API's first tokens."""
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=most))
    began = time.perf_counter()
    next(iter(stream))
    seconds = time.perf_counter() - began
    for _ in stream:
        pass
    return seconds


async def served_first_token(port: int, prompts: Sequence[list[int]], most: int) -> list[float]:
    connection = await Connection(port).open()
    found = [
        (await connection.post("/v1/completions", body))[1] for body in bodies(prompts, most, True)
    ]
    connection.writer.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file")
    asked = parser.parse_args()
    common = {"max_num_seqs": asked.concurrency, "enable_prefix_caching": False}
    llm = LLM(**common)
    server = Server([f"--max-num-seqs={asked.concurrency}", "--no-enable-prefix-caching"])
    try:
        figures = measure(llm, server, asked)
    finally:
        server.process.terminate()
        server.process.wait(60)
    print(json.dumps(figures, indent=2))
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(figures, file, indent=2)
    return 0


def measure(llm: LLM, server: Server, asked: argparse.Namespace) -> dict[str, Any]:
    examples = choose_examples(asked.requests)
    prompts: list[Any] = prompts_of(llm, examples)
    most = asked.max_tokens
    whole, streamed = (bodies(prompts, most, stream) for stream in (False, True))
    ways = {
        "offline": lambda: offline(llm, prompts, most),
        "served": lambda: asyncio.run(load(server.port, whole, asked.concurrency)),
        "streamed": lambda: asyncio.run(load(server.port, streamed, asked.concurrency)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, dict[str, float]] = {}
    tokens: set[int] = set()
    for turn in range(asked.rounds + 1):
        for name, run in ways.items():
            began, own, theirs = time.perf_counter(), _own_cpu(), server.cpu_seconds()
            made = run()
            seconds = time.perf_counter() - began
            if not turn:
                continue
            tokens.add(made)
            rates[name].append(made / seconds)
            spent = [b - a for a, b in zip(theirs, server.cpu_seconds(), strict=True)]
            cpu[name] = {
                "wall_s": round(seconds, 2),
                "own_cpu_s": round(_own_cpu() - own, 2),
                "server_cpu_s": round(spent[0], 2),
                "engine_cpu_s": round(spent[1], 2),
            }
    # In bf16 a near-tie may fall otherwise in another batch; in fp32 all ways make the same tokens.
    assert max(tokens) - min(tokens) <= 0.02 * max(tokens), f"different numbers of tokens: {tokens}"
    best = {name: max(found) for name, found in rates.items()}
    few = prompts[:48]
    extra: list[float] = []
    for turn in range(2):
        for prompt in few:
            alone = first_token(llm, prompt, 1 + 15)
            (served,) = asyncio.run(served_first_token(server.port, [prompt], 1 + 15))
            if turn:
                extra.append(served - alone)
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {n: version(n) for n in ("strobe", "torch", "fastapi", "uvicorn")},
        "python": platform.python_version(),
        "device": str(llm.engine.resolved.device),
        "requests": asked.requests,
        "concurrency": asked.concurrency,
        "max_tokens": most,
        "tokens": sorted(tokens),
        "tokens_per_s": {name: round(rate, 1) for name, rate in best.items()},
        "all_rounds": {name: [round(rate) for rate in found] for name, found in rates.items()},
        "cost": {
            name: round(1 - best[name] / best["offline"], 4) for name in ("served", "streamed")
        },
        "cpu": cpu,
        "first_token_extra_ms": {
            "median": round(1e3 * statistics.median(extra), 2),
            "p90": round(1e3 * sorted(extra)[int(0.9 * len(extra))], 2),
        },
    }


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
