"""Read rows of a data set from a local file or the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from strobe.hub.download import check_cache

Row = dict[str, Any]


class Placed(NamedTuple):
    """A row and its location, for error messages."""

    location: str
    row: Row


def read_rows(path: Path, option: str = "data") -> list[Placed]:
    """Read a JSON-lines, JSON (a list of objects) or parquet file, the first two also gzipped.
    Raises ValueError for a file that cannot be read or holds no row."""
    if not path.is_file():
        raise ValueError(
            f"{option} is {str(path)!r}, which is not a file; name a file of JSON lines."
        )
    if path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        text = _text(path, option)
        is_json = path.name.removesuffix(".gz").endswith(".json")
        rows = (_json_list(path, text) if is_json else None) or _json_lines(path, text)
    if not rows:
        raise ValueError(f"{option} is {str(path)!r}, which holds no row; give one or more.")
    return rows


def _text(path: Path, option: str) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(
            f"{option} is {str(path)!r}, which cannot be read ({error}); name a file of JSON lines."
        ) from None


def _json_list(path: Path, text: str) -> list[Placed] | None:
    """Return None if the file holds no list, such as JSON lines named .json."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, list):
        return None
    return [_placed(row, f"{path} entry {i}") for i, row in enumerate(value, start=1)]


def _json_lines(path: Path, text: str) -> list[Placed]:
    rows: list[Placed] = []
    for i, line in enumerate(text.split("\n"), start=1):  # JSON may hold other line ends
        if not line.strip():
            continue
        location = f"{path} line {i}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(
                f"{location} is {reprlib.repr(line)}, but must be one JSON object."
            ) from None
        rows.append(_placed(value, location))
    return rows


def _placed(value: object, location: str) -> Placed:
    if not isinstance(value, dict):
        raise ValueError(f"{location} is {reprlib.repr(value)}, but must be one JSON object.")
    return Placed(location, value)


def _parquet(path: Path) -> list[Placed]:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{path} is a parquet file, which pyarrow reads; install it with pip install "
            "'strobe[eval]', or give JSON lines with --data."
        ) from None
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise ValueError(f"{path} cannot be read as parquet ({_line(error)}).") from None
    return [Placed(f"{path} row {i}", row) for i, row in enumerate(rows, start=1)]


def fetch(repo: str, patterns: Sequence[str], name: str) -> list[Path]:
    """Return a data set's files that match the first pattern with any match, sorted, from the cache
    or the hub. Raises ValueError if they are not available."""
    from huggingface_hub import snapshot_download

    check_cache(f"The data set {repo}")
    hint = f"check the connection, or give a local copy: --dataset {name} --data FILE."
    try:
        folder = Path(snapshot_download(repo, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as error:  # errors of the hub and of its HTTP library
        raise ValueError(
            f"The data set {repo} could not be fetched from the hub ({_line(error)}); {hint}"
        ) from None
    for pattern in patterns:
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"The data set {repo} has no file like {patterns[0]} on the hub; {hint}")


def _line(error: Exception) -> str:
    """Return the first sentence of a library's error."""
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")
