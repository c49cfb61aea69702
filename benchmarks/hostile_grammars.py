"""Hostile grammars next to honest requests: they cause no 5xx and do not delay the honest ones.

    python benchmarks/hostile_grammars.py [--count 2000] [--at-once 16] [--honest 4] [--alone 5]
                                          [--most-wait 1] [--most-memory 50] [--json FILE]

Starts `strobe serve` with the demo models. Honest clients send requests, for --alone seconds next
to --at-once more honest clients, then next to as many hostile ones, which send regular expressions,
schemas, Lark and EBNF grammars that are huge, empty, random, grow without bounds or never end.
Every second honest request uses structured output. Exits with 1 if an answer is a 5xx or dumps
state, if an honest request fails, if the 99th percentile of honest waits grows by --most-wait
seconds or more, or if, after a fifth of the grammars has filled the caches, the memory of the
server's processes grows by more than --most-memory MB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
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
    """Return a hostile constraint for structured output."""
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
            {"grammar": 'start: /a*/ start "a"'},
            {"grammar": f'start: ("b"|"c"){{{n % 30}}} /(ab)+/ "ab"'},
            {"grammar": f'root ::= "b"{{{n % 30}}} [a]* "a" [a]* "a"'},
            *[{"grammar": random_rules(rng, lark=True)} for _ in range(6)],
            *[{"grammar": random_rules(rng, lark=False)} for _ in range(4)],
            *[{"regex": random_regex(rng)} for _ in range(2)],
            *[{"json": random_schema(rng)} for _ in range(3)],
        ]
    )


LETTERS = ("a", "b", "ab", '"', " ", "é")
REPEATS = ("", "", "", "*", "+", "?", "{0,3}", "{2}", "{3,}")


def random_regex(rng: random.Random, depth: int = 3) -> str:
    """Return a short expression, often one that matches nothing or everything."""
    if depth == 0 or rng.random() < 0.4:
        return rng.choice(("a", "b", "ab", "[ab]", "[^a]", ".", " ", r"\d", "a*", "", "(?s:.)"))
    parts = [random_regex(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return f"({rng.choice(('', '|')).join(parts)}){rng.choice(REPEATS)}"


def random_rules(rng: random.Random, *, lark: bool) -> str:
    """Return a grammar of a few rules that refer to each other and may never end."""
    names = ["start" if lark else "root", *"xyz"[: rng.randint(0, 3)]]

    def terminal() -> str:
        if lark and rng.random() < 0.5:
            return f"/{random_regex(rng, 2) or 'a'}/"
        if lark and rng.random() < 0.1:
            return rng.choice(('%json {"type": "integer"}', "<[5]>", "<[^5]>", '%regex {"x": 1}'))
        return (
            json.dumps(rng.choice(LETTERS), ensure_ascii=False)
            if lark
            else rng.choice(('"a"', '"b"', '"ab"', "[ab]", "[^a]", "[a-z]*", '" "'))
        )

    def part(depth: int) -> str:
        if depth == 0 or rng.random() < 0.6:
            return terminal() if rng.random() < 0.6 else rng.choice(names)
        inner = (" " if rng.random() < 0.6 else " | ").join(
            part(depth - 1) for _ in range(rng.randint(1, 3))
        )
        return f"({inner}){rng.choice(REPEATS[:6])}"

    def body() -> str:
        ways = (
            " ".join(part(2) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 2))
        )
        return " | ".join(ways)

    lines = [f"{name}{': ' if lark else ' ::= '}{body()}" for name in names]
    if lark and rng.random() < 0.2:
        lines.insert(0, rng.choice(('%llguidance {"no_forcing": false}', "%ignore /a+/")))
    return "\n".join(lines)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema; sometimes its whitespace or patterns swallow the following text."""
    kind = rng.choice(("string", "integer", "array", "object", "enum"))
    schema: dict[str, Any] = {"type": kind}
    if kind == "enum":
        schema = {"enum": rng.sample([1, "a", None, True, [1], {"a": 1}], rng.randint(1, 4))}
    elif kind == "string" and rng.random() < 0.5:
        schema["pattern"] = random_regex(rng, 2)
    elif kind == "integer" and rng.random() < 0.5:
        schema |= {"minimum": rng.randint(-5, 5), "multipleOf": rng.choice((1, 10, 7))}
    elif kind == "array" and depth:
        schema["items"] = random_schema(rng, depth - 1)
        schema["minItems"] = rng.choice((0, 1, 3))
    elif kind == "object" and depth:
        schema["properties"] = {name: random_schema(rng, depth - 1) for name in "ab"}
        schema["required"] = ["a"]
    if rng.random() < 0.3:
        schema["x-guidance"] = {
            "whitespace_pattern": random_regex(rng, 1),
            "item_separator": rng.choice((",", "a", " ", "1")),
            "key_separator": rng.choice((":", "a", '"')),
        }
    return schema


def ask(port: int, **fields: Any) -> tuple[int, bytes, float]:
    """Request a completion; return status, body and seconds."""
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
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--honest", type=int, default=4)
    parser.add_argument("--alone", type=float, default=5.0)
    parser.add_argument("--most-wait", type=float, default=1.0)
    parser.add_argument("--most-memory", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "strobe", "serve", "--port", str(port)]
    pages = "--kv-cache-memory=40MiB"  # small enough to be filled before the grammars come
    server = subprocess.Popen([*command, pages, "--log-level=warning"])
    try:
        while server.poll() is None:
            try:
                if ask(port)[0] == 200:
                    break
            except OSError:
                time.sleep(0.2)
        report = measure(server.pid, port, options)
    finally:
        server.terminate()
        server.wait()
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report))
    return int(bool(report["faults"]))


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            total += memory_mb(int(child)) * 1e6
    return total / 1e6


def settled_memory_mb(pid: int, goal: float = 0.0) -> float:
    """Return the memory once it is at most `goal`, or after 5 s."""
    for _ in range(20):
        if memory_mb(pid) <= goal:
            break
        time.sleep(0.25)
    return memory_mb(pid)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def measure(pid: int, port: int, options: argparse.Namespace) -> dict[str, Any]:
    done, waits, faults = (
        threading.Event(),
        {False: list[float](), True: list[float]()},
        list[str](),
    )
    attacked, numbers = threading.Event(), itertools.count()

    def honest_ask() -> tuple[int, bytes, float]:
        number = next(numbers)
        words = [f"word {number}", f"Word {number}"]
        form = {"choice": words} if number % 4 == 1 else {"json_object": True}
        return ask(port, **({"structured_outputs": form} if number % 2 else {}))

    def honest() -> None:
        while not done.is_set():
            during = attacked.is_set()
            status, body, seconds = honest_ask()
            waits[during].append(seconds)
            if status != 200:
                faults.append(f"an honest request was answered with {status}: {body[:200]!r}")

    def attack(seed: int) -> int:
        constraint = hostile(random.Random(seed))
        status, body, _ = ask(port, structured_outputs=constraint)
        if status >= 500 or b"<state>" in body:
            faults.append(f"{str(constraint)[:100]} was answered with {status}: {body[:200]!r}")
        return status

    def send_honest_requests(_: int) -> None:
        until = time.perf_counter() + options.alone
        while time.perf_counter() < until:
            honest_ask()

    threads = [threading.Thread(target=honest) for _ in range(options.honest)]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(send_honest_requests, range(options.at_once)))
    fresh = memory_mb(pid)
    attacked.set()
    began = time.perf_counter()
    with ThreadPoolExecutor(options.at_once) as pool:
        seeds = range(options.seed, options.seed + options.count)
        statuses = Counter(pool.map(attack, seeds[: options.count // 5]))
        before = memory_mb(pid)
        statuses += Counter(pool.map(attack, seeds[options.count // 5 :]))
    seconds = time.perf_counter() - began
    done.set()
    for thread in threads:
        thread.join()
    alone, during_attack = (percentile(waits[during], 0.99) for during in (False, True))
    if not waits[True] or during_attack >= alone + options.most_wait:
        faults.append(f"1 % of honest requests waited {options.most_wait:g} s longer or more")
    after = settled_memory_mb(pid, before + options.most_memory)
    if after > before + options.most_memory:
        faults.append(f"memory grew from {before:.0f} to {after:.0f} MB")
    return {
        "hostile": {str(status): n for status, n in sorted(statuses.items())},
        "seconds": round(seconds, 1),
        "p99_alone_s": round(alone, 3),
        "p99_beside_s": round(during_attack, 3),
        "memory_mb": [round(fresh), round(before), round(after)],
        "worst_alone_s": round(max(waits[False], default=0.0), 3),
        "worst_beside_s": round(max(waits[True], default=0.0), 3),
        "honest": [len(waits[False]), len(waits[True])],
        "faults": faults[:10],
    }


if __name__ == "__main__":
    sys.exit(main())
