"""GGUF files as checkpoints: their metadata is written as a directory, once for each file.

The directory holds config.json, the tokenizer and a link to the file, whose weights are read in
place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from strobe.hub.cache import cache_directory
from strobe.hub.files import GGUF_LINK
from strobe.hub.gguf_config import make_config
from strobe.hub.gguf_drafter import is_drafter, make_draft_config
from strobe.hub.gguf_file import AGAIN, GGUFHeader, read_header
from strobe.hub.gguf_tokenizer import make_tokenizer, tokenizer_config

FORM = 4
"""Counts up with each change of what is written, so that older directories are not used."""


def gguf_directory(path: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return a directory that describes the GGUF file as a checkpoint. sampling: default values for
    generation_config.json. Raises ValueError with one sentence if the file is damaged or not
    supported."""
    header = read_header(path)
    target = path.absolute()
    stats = [file.stat() for file in header.files]
    states = [(status.st_size, status.st_mtime_ns) for status in stats]
    key = f"{FORM} {target} {states} {dict(sampling)}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    directory = cache_directory("gguf") / name
    if directory.exists():
        return directory
    try:
        files, tokenizer = _files(header, path, sampling)
    except Exception as error:  # the tokenizer's library raises no other kind
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} has metadata that is damaged ({error!r}); {AGAIN}") from None
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=directory.parent))
    try:
        for file, content in files.items():
            (part / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(str(part / "tokenizer.json"))
        (part / GGUF_LINK).symlink_to(target)
        os.rename(part, directory)
    except OSError as error:
        if not directory.exists():  # else another process was faster
            raise ValueError(
                f"{directory.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a "
                "directory with free space."
            ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def _files(
    header: GGUFHeader, path: Path, sampling: Mapping[str, float]
) -> tuple[dict[str, dict[str, Any]], Tokenizer | None]:
    """Return the contents of the directory's files, and the tokenizer. A drafter has only a
    config.json: its tokens are the target's."""
    if is_drafter(header):
        return {"config.json": make_draft_config(header, path)}, None
    config = make_config(header, path)
    files = {
        "config.json": config,
        "tokenizer_config.json": tokenizer_config(header.metadata),
        "generation_config.json": {"eos_token_id": config["eos_token_id"], **sampling},
    }
    return files, make_tokenizer(header.metadata, path)
