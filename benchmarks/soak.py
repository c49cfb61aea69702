"""Load the server with many good and bad clients; afterwards it must be in its initial state.

    python benchmarks/soak.py [--streams 1000] [--seconds 300] [--max-waiting 1100] [--json FILE]
                              [--small-pool [--known 240]]

Each stream sends one request after another: well-formed requests with random features (some
clients disconnect at a random moment), bad bodies, bad HTTP, oversized prompts and truncated
requests. After a 429 it retries as Retry-After says. The exit status is 1 if a well-formed request
was not answered in full, if an error was not the expected one, or if the server did not become
idle: requests, pages, tasks, threads, file descriptors and memory are compared with those after a
warm-up of the same kind, and an answer with the same answer before.

With --small-pool the pages are far too few, so that requests are preempted and prefixes come from
host memory all the time. A third of the good requests are then of a list whose answers the idle
server gave before, one request at a time; each must have the same text again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

from soak_requests import (
    COMPLETIONS,
    Sent,
    WrongAnswer,
    bad_body,
    bad_http,
    good,
    half,
    known,
    oversized,
    read,
    same_text,
    text_of,
    with_grammar,
)

from strobe import __version__
from strobe.server.server_settings import TEXT_THREADS

TIMEOUT = 240.0
"""Seconds for a request's answer, and for the server to become idle."""
MAX_GROWTH = {"server": 48 << 20, "engine": 96 << 20}
"""Bytes by which a process may grow after the warm-up."""
DISCONNECT_SHARE = 0.25
"""Share of the well-formed requests whose client disconnects."""
MIX: tuple[tuple[Callable[[random.Random], Sent], int], ...] = (
    (good, 66), (bad_body, 12), (bad_http, 6), (oversized, 4), (half, 6), (read, 6),
)  # fmt: skip
KNOWN_SHARE = 0.33
"""Their share of the good requests."""
BUSY = ("vllm:num_preemptions_total", "vllm:external_prefix_cache_hits_total")
"""Metrics that must rise with a small pool."""
SHOWN_LINES = 40
"""Errors of the log and lines of their tracebacks that a report shows."""
IDLE = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "strobe:open_answers",
)  # fmt: skip


class Server:
    """`strobe serve` in its own process, with its log in a file."""

    def __init__(self, options: list[str], log: Path):
        self.log = log
        command = [sys.executable, "-m", "strobe", "serve", "--port=0", "--device=cpu"]
        with log.open("wb") as file:
            # With more threads than idle cores, threads wait for each other at every barrier: with
            # two threads, next to a client on two cores, a step took 5 s instead of 0.1.
            self.process = subprocess.Popen(
                [*command, *options],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        self.port = 0

    async def start(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not self.port:
            values = re.search(r"http://127\.0\.0\.1:(\d+)/ is a page", self.log.read_text())
            self.port = int(values[1]) if values else 0
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start:\n" + self.log.read_text())
            await asyncio.sleep(0.1)

    @property
    def pids(self) -> dict[str, int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        names = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
        (engine,) = [pid for pid, name in names.items() if "spawn_main" in name]
        return {"server": self.process.pid, "engine": engine}

    def metrics(self) -> dict[str, float]:
        """Return the sum of each metric's samples."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=TIMEOUT) as answer:
            text = answer.read().decode()
        values = Counter[str]()
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", text, re.M):
            values[name] += float(value)
        return values

    def answer(self) -> str:
        """Return a seeded answer, which must be the same every time."""
        request_body = {
            "prompt": "Sort these words: pear apple fig",
            "max_tokens": 48,
            "temperature": 1,
        }
        body = json.dumps({**request_body, "seed": 3, "ignore_eos": True}).encode()
        url = f"http://127.0.0.1:{self.port}{COMPLETIONS}"
        with urlopen(Request(url, body, {"Content-Type": "application/json"})) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    async def rest(self) -> None:
        """Wait until the server is idle. Raises WrongAnswer after TIMEOUT."""
        deadline = time.monotonic() + TIMEOUT
        while busy := {name: value for name in IDLE if (value := self.metrics()[name])}:
            if time.monotonic() > deadline:
                raise WrongAnswer(f"the server does not become idle: {busy}")
            await asyncio.sleep(0.2)


class Vitals(NamedTuple):
    """Resources that must not grow."""

    descriptors: dict[str, int]
    threads: dict[str, int]
    memory: dict[str, int]
    tasks: float

    @staticmethod
    def of(server: Server) -> Vitals:
        pids = server.pids
        return Vitals(
            {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in pids.items()},
            {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in pids.items()},
            {name: _resident(pid) for name, pid in pids.items()},
            server.metrics()["strobe:server_tasks"],
        )

    def faults(self, before: Vitals) -> list[str]:
        values: list[str] = []
        for name, bound in MAX_GROWTH.items():
            for resource_name in ("descriptors", "threads"):
                now, earlier = (
                    getattr(self, resource_name)[name],
                    getattr(before, resource_name)[name],
                )
                if now > earlier:
                    values.append(f"the {name} has {now} {resource_name} and had {earlier}")
            grown = self.memory[name] - before.memory[name]
            if grown > bound:
                values.append(f"the {name} has grown by {grown >> 20} MiB of {bound >> 20}")
        if self.tasks > before.tasks:
            values.append(f"the server has {self.tasks:g} tasks and had {before.tasks:g}")
        return values


async def baseline(server: Server, fresh: Vitals) -> Vitals:
    """Return the vitals of an idle server, after its last connections have closed. Text threads
    start on demand, so up to TEXT_THREADS more than in `fresh` are no leak."""
    deadline, values = time.monotonic() + 30, Vitals.of(server)
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        before, values = values, Vitals.of(server)
        if not before.faults(values):
            break
    max_threads = max(values.threads["server"], fresh.threads["server"] + TEXT_THREADS)
    return values._replace(threads={**values.threads, "server": max_threads})


async def recovered(server: Server, before: Vitals) -> Vitals:
    """Return the vitals once they are good, or after 30 s; the last connections take a moment to
    close."""
    deadline = time.monotonic() + 30
    while (values := Vitals.of(server)).faults(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return values


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The streams and the outcomes of their requests."""

    def __init__(self, port: int, seed: int):
        self.port, self.seed = port, seed
        self.done: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []
        self.again = 0
        self.answered = 0
        self.known: list[Sent] = []

    async def learn(self, count: int) -> None:
        """Send `count` known requests, one at a time, and keep them with their answers."""
        for number in range(count):
            sent = known(number)
            status, _, body = await exchange(self.port, sent)
            sent.judge(status, body)
            self.known.append(sent._replace(judge=same_text(text_of(body))))

    async def run(self, streams: int, seconds: float, requests: int, part: str) -> None:
        """Send requests until `seconds` have passed or `requests` were sent."""
        self._end = time.monotonic() + seconds if seconds else float("inf")
        self._left = requests or sys.maxsize
        await asyncio.gather(*(self._stream(f"{self.seed} {part} {i}") for i in range(streams)))

    async def _stream(self, name: str) -> None:
        rng = random.Random(name)
        makers, weights = zip(*MIX, strict=True)
        while time.monotonic() < self._end and self._left > 0:
            self._left -= 1
            sent = rng.choices(makers, weights)[0](rng)
            if sent.good and self.known and rng.random() < KNOWN_SHARE:
                sent = rng.choice(self.known)
            leaves = sent.kind == "half a request" or (
                sent.good and rng.random() < DISCONNECT_SHARE
            )
            try:
                async with asyncio.timeout(TIMEOUT):
                    became = await (self._left_alone if leaves else self._answered)(rng, sent)
            except (
                WrongAnswer,
                OSError,
                asyncio.IncompleteReadError,
                ValueError,
                KeyError,
            ) as error:
                became = "WRONG"
                self.wrong.append(f"{sent.kind}: {type(error).__name__}: {str(error)[:300]}")
            self.done[sent.kind, became] += 1
            self.answered += became == "answered" and sent.good

    async def _answered(self, rng: random.Random, sent: Sent) -> str:
        """Send a request, retry while the queue is full, and check the answer."""
        while True:
            status, headers, body = await exchange(self.port, sent)
            if status != 429:
                sent.judge(status, body)
                return "answered" if sent.good or status < 400 else "refused"
            self.again += 1
            wait = int(headers["retry-after"])
            await asyncio.sleep(wait * (1 + rng.random()))

    async def _left_alone(self, rng: random.Random, sent: Sent) -> str:
        """Send a request and disconnect: at once, after part of the answer, or after some time."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent.parts[0])
            await writer.drain()
            if rng.random() < 0.7:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 3)):
                        await reader.readexactly(rng.randrange(1, 3000))
        finally:
            if rng.random() < 0.5:  # a reset instead of a clean close
                kill = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, kill
                )
            writer.close()
        return "left"


async def exchange(port: int, sent: Sent) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a new connection and return (status, headers, body); status 0 if the
    connection is closed without a response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(OSError):
            for part in sent.parts:
                writer.write(part)
                await writer.drain()
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (OSError, asyncio.IncompleteReadError):
            return 0, {}, b""
        headers = {
            name.lower(): value.strip() for name, _, value in (h.partition(":") for h in head[1:])
        }
        status = int(head[0].split()[1])
        if "chunked" in headers.get("transfer-encoding", ""):
            body = bytearray()
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            return status, headers, bytes(body)
        return status, headers, await reader.readexactly(int(headers.get("content-length", 0)))
    finally:
        writer.close()


async def soak(arguments: argparse.Namespace, server: Server) -> dict[str, Any]:
    await server.start()
    fresh, before = Vitals.of(server), server.answer()
    soak = Soak(server.port, arguments.seed)
    await exchange(server.port, with_grammar())
    if arguments.small_pool:
        await soak.learn(arguments.known)
    part = arguments.streams, arguments.seconds * 0.2, arguments.requests // 4
    await soak.run(*part, "warm-up")
    await server.rest()
    vitals, counted = await baseline(server, fresh), server.metrics()
    began, answered = time.monotonic(), soak.answered
    await soak.run(arguments.streams, arguments.seconds, arguments.requests, "soak")
    seconds = time.monotonic() - began
    faults = list(dict.fromkeys(soak.wrong))
    try:
        await server.rest()
        after = await recovered(server, vitals)
        faults += after.faults(vitals)
        if server.answer() != before:
            faults.append("the answer after is not the answer before")
    except (WrongAnswer, OSError) as error:
        faults.append(str(error))
        after = vitals
    counted = {name: value - counted[name] for name, value in server.metrics().items()}
    if arguments.small_pool and arguments.seconds:
        faults += [f"{name} did not rise" for name in BUSY if not counted[name]]
    server.process.terminate()
    if (status := await asyncio.to_thread(server.process.wait, TIMEOUT)) != 0:
        faults.append(f"the server's exit status is {status}")
    errors = errors_of(server.log.read_text().splitlines())
    faults += [f"in the log: {line}" for line in errors[:SHOWN_LINES]]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "strobe": __version__}
        | {name: version(name) for name in ("torch", "uvicorn", "fastapi")},
        "streams": arguments.streams,
        "seconds": round(seconds, 1),
        "max_waiting": arguments.max_waiting,
        "requests": {f"{kind}: {became}": n for (kind, became), n in sorted(soak.done.items())},
        "asked_again_after_429": soak.again,
        "answered_per_second": round((soak.answered - answered) / seconds, 1),
        "tokens_per_second": round(counted["vllm:generation_tokens_total"] / seconds),
        "aborted": counted["vllm:request_success_total"],
        "small_pool": {name: counted[name] for name in BUSY} if arguments.small_pool else None,
        "before": vitals._asdict(),
        "after": after._asdict(),
        "faults": faults,
    }


def errors_of(lines: list[str]) -> list[str]:
    """Return a log's errors with the lines that belong to each, such as a traceback."""
    errors: list[str] = []
    follows = False
    for line in lines:
        follows = is_error(line) or (follows and line.startswith(" "))
        if follows:
            errors.append(line)
    return errors


def is_error(line: str) -> bool:
    return "Traceback" in line or bool(re.match(r"\S+ (ERROR|CRITICAL) ", line))


def show(report: dict[str, Any]) -> None:
    print(f"{report['date']}, {report['machine']}")
    print(
        f"{report['streams']} streams for {report['seconds']} s, max_waiting "
        f"{report['max_waiting']}: {report['answered_per_second']} good requests/s, "
        f"{report['tokens_per_second']} tokens/s, {report['asked_again_after_429']} times 429"
    )
    for name, count in (report["small_pool"] or {}).items():
        print(f"  {name:<40} {count:>8,.0f}")
    for name, count in report["requests"].items():
        print(f"  {name:<40} {count:>8}")
    for resource_name in ("descriptors", "threads", "memory", "tasks"):
        earlier, now = report["before"][resource_name], report["after"][resource_name]
        if resource_name == "memory":
            earlier, now = ({k: f"{v >> 20} MiB" for k, v in x.items()} for x in (earlier, now))
        print(f"  {resource_name:<12} {earlier} -> {now}")
    for fault in report["faults"][: 20 + SHOWN_LINES]:
        print(f"FAULT {fault}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=0, help="requests to send, not --seconds")
    # Room for all: if 1,000 clients compete for 256 places and retry, some exceed the timeout.
    parser.add_argument("--max-waiting", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--small-pool",
        action="store_true",
        help="pages for one context, and host memory: requests are preempted and brought back",
    )
    parser.add_argument(
        "--known", type=int, default=240, help="with --small-pool: requests whose answers are known"
    )
    arguments = parser.parse_args()
    if not arguments.requests and not arguments.seconds:
        arguments.seconds = 300.0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the server
    with tempfile.TemporaryDirectory() as directory:
        options = [f"--max-waiting={arguments.max_waiting}", f"--max-body-bytes={1 << 20}"]
        if arguments.small_pool:
            options += ["--kv-cache-memory=40MiB", "--kv-offload-memory=128MiB"]
        server = Server(options, Path(directory) / "log")
        try:
            report = asyncio.run(soak(arguments, server))
        finally:
            server.process.kill()
            server.process.wait()
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
