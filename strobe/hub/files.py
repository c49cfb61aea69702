"""Files in a checkpoint's directory: JSON objects, and the names of weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GGUF_LINK = "model.gguf"
"""Link to a GGUF file, in the directory that describes it."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file if it is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        missing = path if path.parent.is_dir() else path.parent
        problem = "is not a directory" if missing.exists() else "does not exist"
        raise ValueError(
            f"{missing} {problem}; name a directory that holds a Hugging Face checkpoint, such as "
            "'hf download' makes."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); download or save the checkpoint again."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object; save it again.")
    return value


def source_of(directory: Path) -> Path:
    """Return the path that names a checkpoint for the user: its directory, or the GGUF file that
    the directory describes."""
    link = directory / GGUF_LINK
    return link.readlink() if link.is_symlink() else directory


def weight_files(directory: Path) -> list[str]:
    """Return the names of the weight files, present or not. Raises ValueError for a damaged
    index."""
    index = directory / "model.safetensors.index.json"
    if (directory / GGUF_LINK).is_symlink():
        return [GGUF_LINK]
    if not index.exists():
        return ["model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(
            f"{index} is damaged (weight_map must name a file for each tensor); download or save "
            "the checkpoint again."
        )
    return sorted(set(shards.values()))
