"""Measure the resident memory of a server's processes over many requests.

    python benchmarks/resident.py [--target smollm2] [--requests 600] [--streams 4] [--every 100]

Several streams send well-formed requests with random features (`soak_requests.py`), each with some
random words before it, so that the KV cache fills up. Prints a table of MiB, at start and after
every `--every` requests: memory resident in the engine and in the HTTP process, and the part of it
that is anonymous, which excludes mapped files.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
from pathlib import Path

from soak import Server
from soak_requests import WORDS, good, http


def resident(pid: int) -> tuple[int, int]:
    """Return the MiB resident in a process, and those that are anonymous."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    values = dict(re.findall(r"^(VmRSS|RssAnon):\s+(\d+) kB$", status, re.M))
    return int(values["VmRSS"]) >> 10, int(values["RssAnon"]) >> 10


def lengthened(head: bytes, rng: random.Random, max_words: int) -> bytes:
    """Return a request whose text is preceded by up to `max_words` random words."""
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(max_words)))
    path = head.split(b" ")[1].decode()
    body = head.partition(b"\r\n\r\n")[2]
    return http(path, body.replace(b"Sort these words:", f"{words}. Sort these words:".encode(), 1))


async def send(port: int, request: bytes) -> None:
    """Send a request and read its whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close", 1))
    await writer.drain()
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server answered {answer[:300]!r}")


async def measure(options: argparse.Namespace, log: Path) -> None:
    server = Server([options.target, *options.serve], log)
    try:
        await server.start()
        rng = random.Random(options.seed)

        def row(count: int) -> None:
            values = [*resident(server.pids["engine"]), *resident(server.pids["server"])]
            print(f"| {count} | {' | '.join(map(str, values))} |", flush=True)

        print("| requests | engine | anonymous | HTTP | anonymous |")
        print("|---|---|---|---|---|")
        row(0)
        for done in range(0, options.requests, options.every):
            left = iter(range(min(options.every, options.requests - done)))

            async def stream(left=left) -> None:
                for _ in left:
                    (request,) = good(rng).parts
                    await send(server.port, lengthened(request, rng, options.words))

            await asyncio.gather(*(stream() for _ in range(options.streams)))
            row(min(done + options.every, options.requests))
    finally:
        server.process.terminate()
        server.process.wait()
    print(log.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--words", type=int, default=200, help="most words before a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="further options of `strobe serve`, after --")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(parser.parse_args(), Path(directory) / "log"))


if __name__ == "__main__":
    main()
