"""Run clients that ask for answers against the server, with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from client import HERE, SPECULATION, environment, origin, serving, table
from examples import ANSWERED, questions

KEY = "k-clients"
PACKAGES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "ollama": "ollama",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "langchain_ollama": "langchain-ollama",
    "instructor": "instructor",
    "pydantic_ai": "pydantic-ai-slim",
    "openai_agents": "openai-agents",
}
"""Each client with a program NAME_client.py and requirements NAME.txt, and its package."""


class Talk(NamedTuple):
    """What a client did. versions: of its package; ways: kinds of requests, with how many of their
    answers there are and how many are equal with speculation on and off."""

    versions: str
    ways: dict[str, tuple[int, int]]
    problems: list[str]


@contextmanager
def two_servers(directory: Path) -> Iterator[dict[str, str]]:
    """Run a server with speculation and one without; yield their URLs by "on" and "off"."""
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        yield {
            speculation: stack.enter_context(
                serving(directory / f"server_{speculation}.log", options, key=KEY)
            )
            for speculation, options in SPECULATION.items()
        }


def talk(name: str, directory: Path, count: int, urls: dict[str, str]) -> Talk:
    """Run a client's program, which checks each answer by itself, against both servers."""
    client = environment(directory / name, ["-r", f"{name}.txt"])
    question_file = client.folder / "questions.json"
    texts = [example.messages[0]["content"] for example in questions(count, *ANSWERED)]
    question_file.write_text(json.dumps(texts), encoding="utf-8")
    answers: dict[str, dict[str, list[Any]]] = {}
    for speculation, url in urls.items():
        out = client.folder / f"answers_{speculation}.json"
        words = [HERE / f"{name}_client.py", url, KEY, question_file, out]
        client.run("python", words, client.folder / f"client_{speculation}.log")
        answers[speculation] = json.loads(out.read_text(encoding="utf-8"))

    ways, problems = dict[str, tuple[int, int]](), list[str]()
    on, off = answers["on"], answers["off"]
    for way in on:
        same = sum(a == b for a, b in zip(on[way], off[way], strict=True))
        ways[way] = len(on[way]), same
        if same < len(on[way]):
            problems.append(
                f"{name}, {way}: {same} of {len(on[way])} answers are equal on and off."
            )
        whole = way.partition(",")[0]
        if way.endswith(("streamed", "all at once")) and on[way] != on[whole]:
            problems.append(f"{name}, {way}: not the answers of {whole}.")
    return Talk(client.versions(PACKAGES[name]), ways, problems)


def talker(name: str) -> Callable[[Path, int], list[str]]:
    """Return a function that prints what a client did as a table and returns its problems."""

    def run(directory: Path, count: int) -> list[str]:
        with two_servers(directory / name) as urls:
            done = talk(name, directory, count, urls)
        rows = [
            [way, total, f"{same} equal on and off"] for way, (total, same) in done.ways.items()
        ]
        print(origin(done.versions), end="\n\n")
        print(table(["requests", "count", "answers"], rows))
        return done.problems

    return run


def talk_to_all(directory: Path, count: int) -> list[str]:
    """Run all clients of `PACKAGES`; print one table of them and return their problems."""
    rows, problems = list[list[object]](), list[str]()
    with two_servers(directory) as urls:
        for name in PACKAGES:
            try:
                done = talk(name, directory, count, urls)
            except RuntimeError as error:  # the others still run
                problems.append(f"{name}: {error}")
                continue
            total, same = (sum(column) for column in zip(*done.ways.values(), strict=True))
            package, version = done.versions.split(" ")
            rows.append([package, version, "; ".join(done.ways), f"{same} of {total}"])
            problems += done.problems
    print(origin("each as listed"), end="\n\n")
    print(table(["client", "version", "requests", "answers equal on and off"], rows))
    return problems
