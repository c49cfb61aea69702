"""Files and batches of requests, stored in a directory so that they survive restarts.

A file or batch ID is ID.json, and the lines of a file are ID.jsonl. The answers of a batch are an
output file of `strobe run-batch`, ID.answers.jsonl.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ID = re.compile(r"(file|batch|msgbatch)_[0-9a-f]{24}")
OUTPUT = "_output"
ERRORS = "_errors"
"""Suffixes of a batch's id in the ids of its output files."""

RUNNING = ("validating", "in_progress", "cancelling")


class BatchStore:
    """The files and batches in a directory. Raises ValueError if it cannot be used."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(directory / ".writable", b"")
        except OSError as error:
            raise ValueError(
                f"batch_dir is {str(directory)!r}, which cannot be written ({error.strerror}); "
                "name another directory."
            ) from None

    def add(self, kind: str, owner: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Store a new record of the kind "file", "batch" or "msgbatch". owner: digest of the
        client's API key, "" without keys."""
        record = {"id": f"{kind}_{secrets.token_hex(12)}", "created_at": int(time.time()), **fields}
        self.save({**record, "owner": owner})
        return record

    def save(self, record: dict[str, Any]) -> None:
        """Store a record under its id."""
        self._write(self.directory / f"{record['id']}.json", json.dumps(record).encode())

    def get(self, name: str, owner: str | None = None) -> dict[str, Any] | None:
        """Return a record, None if the owner has none with that id. owner: None finds any."""
        path = self.directory / f"{name}.json"
        if ID.fullmatch(name) is None or not path.exists():
            return None
        record = json.loads(path.read_bytes())
        return record if owner in (None, record["owner"]) else None

    def records(self, kind: str, owner: str | None = None) -> list[dict[str, Any]]:
        """Return the owner's records of a kind, newest first."""
        names = [path.stem for path in self.directory.glob(f"{kind}_*.json")]
        records = [record for name in names if (record := self.get(name, owner)) is not None]
        return sorted(
            records, key=lambda record: (record["created_at"], record["id"]), reverse=True
        )

    def delete(self, name: str) -> None:
        """Delete a record and its lines."""
        for path in (f"{name}.json", f"{name}.jsonl", f"{name}.answers.jsonl"):
            (self.directory / path).unlink(missing_ok=True)

    def lines_path(self, name: str) -> Path:
        """Return the path of a file's or a batch's requests."""
        return self.directory / f"{name}.jsonl"

    def answers_path(self, name: str) -> Path:
        """Return the path of a batch's answers."""
        return self.directory / f"{name}.answers.jsonl"

    def write_lines(self, name: str, content: bytes) -> None:
        self._write(self.lines_path(name), content)

    def answers(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a batch's answers, the last one of each request."""
        path = self.answers_path(name)
        lines = path.read_bytes().splitlines() if path.exists() else []
        newest = {line["custom_id"]: line for line in map(json.loads, filter(None, lines))}
        yield from newest.values()

    def content(self, name: str, owner: str) -> bytes | None:
        """Return the lines of a file: an uploaded one, or a batch's answers or errors. None if
        there is no such file."""
        for suffix in (OUTPUT, ERRORS):
            batch = name.removesuffix(suffix)
            if batch != name:
                if self.get(batch, owner) is None:
                    return None
                lines = [a for a in self.answers(batch) if succeeded(a) == (suffix == OUTPUT)]
                return b"".join([json.dumps(line).encode() + b"\n" for line in lines])
        if self.get(name, owner) is None or not name.startswith("file_"):
            return None
        return self.lines_path(name).read_bytes()

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        """Replace a file at once, readable only by its owner."""
        part = path.with_name(f"{path.name}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def succeeded(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is one with the status 200."""
    return answer["response"]["status_code"] == 200
