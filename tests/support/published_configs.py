"""The configs in tests/corpus, and the right answer to each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[1] / "corpus"
ANSWERS: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (CORPUS / "answers.json").read_text(encoding="utf-8")
)
"""Answers by kind, "drafters" or "targets", and name."""


def names(kind: str) -> list[str]:
    return sorted(file.stem for file in (CORPUS / kind).iterdir())


def published(kind: str, name: str) -> dict[str, Any]:
    return json.loads((CORPUS / kind / f"{name}.json").read_text(encoding="utf-8"))


def checkpoint_of(entry: dict[str, Any], directory: Path, answer: dict[str, Any]) -> Path:
    """Write the entry's files to a directory, and return it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(entry["config"]))
    if entry.get("quant"):
        (directory / "hf_quant_config.json").write_text(json.dumps(entry["quant"]))
    for file in answer.get("files", ()):
        (directory / file).touch()
    return directory
