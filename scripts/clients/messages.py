"""Run Anthropic's client against the server, with and without speculation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from client import HERE, SPECULATION, environment, origin, serving, table
from examples import ANSWERED, questions

KEY = "k-clients"


def talk(directory: Path, count: int) -> list[str]:
    """Print the requests as a Markdown table; return sentences on failures.

    The client's program checks each answer by itself.
    """
    client = environment(directory / "anthropic", ["-r", "anthropic.txt"])
    question_file = client.folder / "questions.json"
    texts = [example.messages[0]["content"] for example in questions(count, *ANSWERED)]
    question_file.write_text(json.dumps(texts), encoding="utf-8")
    answers: dict[str, dict[str, list[Any]]] = {}
    for speculation, options in SPECULATION.items():
        out = client.folder / f"answers_{speculation}.json"
        with serving(client.folder / f"server_{speculation}.log", options, key=KEY) as url:
            words = [HERE / "messages_client.py", url, KEY, question_file, out]
            client.run("python", words, client.folder / f"client_{speculation}.log")
        answers[speculation] = json.loads(out.read_text(encoding="utf-8"))

    rows, problems = [], []
    on, off = answers["on"], answers["off"]
    for way in on:
        same = sum(a == b for a, b in zip(on[way], off[way], strict=True))
        rows.append([way, len(on[way]), f"{same} equal on and off"])
        if same < len(on[way]):
            problems.append(f"{way}: {same} of {len(on[way])} answers are equal on and off.")
    for way in ("stream", "async, all at once"):
        if on[way] != on["create"]:
            problems.append(f"{way}: not the answers of create.")
    print(origin(client.versions("anthropic")), end="\n\n")
    print(table(["requests", "count", "answers"], rows))
    return problems
