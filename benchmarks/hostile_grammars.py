"""Grammars that no one could follow, beside honest requests: no 5xx, and nobody waits for them.

    python benchmarks/hostile_grammars.py [--count 1000] [--at-once 16] [--honest 4] [--alone 5]
                                          [--most-wait 1] [--json FILE]

Starts `strobe serve` with the demo models, has honest clients ask alone for some seconds, then
beside clients that send regular expressions, schemas and grammars which are huge, empty, or grow
without bounds. Exits with 1 where an answer is a 5xx or dumps state, or the worst honest wait grows
by --most-wait seconds or more.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def hostile(rng: random.Random) -> dict[str, Any]:
    """What a request is to be held to."""
    n = rng.randint(200, 2000)
    nested: Any = {"type": "string"}
    for _ in range(rng.randint(50, 400)):
        nested = {"type": "array", "items": nested}
    properties = {f"k{i}": {"type": "string", "pattern": f"^(a|b){{{n}}}$"} for i in range(n)}
    return rng.choice(
        [
            {"regex": f"(x{{{n}}}){{{n}}}"},
            {"regex": rf"a?[^\s\S]{'b' * (n % 9)}"},
            {"regex": f"x(.*y{{{n}}}z){{{n}}}"},
            {"regex": f"(.*[a-z]{{{n}}}){{9}}(a|b){{{n}}}"},
            {"regex": "(" * n + "a" + ")" * n},
            {"json": {"type": "object", "properties": properties, "required": list(properties)}},
            {"json": nested},
            {"json": {"type": "string", "maxLength": n * n, "minLength": n * n - 1}},
            {"json": {"enum": [f"{n}-{i}" * 3 for i in range(6 * n)]}},
            {"grammar": "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(n))},
            {"grammar": f"start: x\nx: /(a|b)*a(a|b){{{n}}}/ x | /c{{{n}}}/"},
            {"grammar": "start: x\nx: x x | /a?/"},
        ]
    )


def ask(port: int, **fields: Any) -> tuple[int, bytes, float]:
    """Status, body and seconds of a completion."""
    body = json.dumps({"prompt": "Sort: pear, fig", "max_tokens": 24, **fields}).encode()
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    try:
        with urlopen(request, timeout=300) as answer:
            return answer.status, answer.read(), time.perf_counter() - began
    except HTTPError as error:
        return error.code, error.read(), time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--honest", type=int, default=4)
    parser.add_argument("--alone", type=float, default=5.0)
    parser.add_argument("--most-wait", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "strobe", "serve", "--port", str(port)]
    server = subprocess.Popen([*command, "--log-level=warning"])
    try:
        while server.poll() is None:
            try:
                if ask(port)[0] == 200:
                    break
            except OSError:
                time.sleep(0.2)
        report = measure(port, options)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report))
    return int(bool(report["faults"]))


def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    done, waits, faults = (
        threading.Event(),
        {False: list[float](), True: list[float]()},
        list[str](),
    )
    attacked = threading.Event()

    def honest() -> None:
        while not done.is_set():
            during = attacked.is_set()
            status, body, seconds = ask(port)
            waits[during].append(seconds)
            if status != 200:
                faults.append(f"an honest request was answered with {status}: {body[:200]!r}")

    def attack(seed: int) -> int:
        given = hostile(random.Random(seed))
        status, body, _ = ask(port, structured_outputs=given)
        if status >= 500 or b"<state>" in body:
            faults.append(f"{str(given)[:100]} was answered with {status}: {body[:200]!r}")
        return status

    threads = [threading.Thread(target=honest) for _ in range(options.honest)]
    for thread in threads:
        thread.start()
    time.sleep(options.alone)
    attacked.set()
    began = time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        seeds = range(options.seed, options.seed + options.count)
        statuses = Counter(pool.map(attack, seeds))
    seconds = time.perf_counter() - began
    done.set()
    for thread in threads:
        thread.join()
    if not waits[True] or max(waits[True]) >= max(waits[False], default=0.0) + options.most_wait:
        faults.append(f"an honest request waited {options.most_wait:g} s longer than without them")
    return {
        "hostile": {str(status): n for status, n in sorted(statuses.items())},
        "seconds": round(seconds, 1),
        "worst_alone_s": round(max(waits[False], default=0.0), 3),
        "worst_beside_s": round(max(waits[True], default=0.0), 3),
        "honest": [len(waits[False]), len(waits[True])],
        "faults": faults[:10],
    }


if __name__ == "__main__":
    sys.exit(main())
