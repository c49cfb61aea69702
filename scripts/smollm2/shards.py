"""Weights in files of at most 16 MiB."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

SHARD = 16 << 20
"""Maximum bytes of a file of weights."""
_HEADER = 65536
"""Bytes of a file that may be its header."""


def save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write tensors on the CPU to one file, or to several with their index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > SHARD - _HEADER:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        _save(shards[0], directory / "model.safetensors")
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _save(shard, directory / name)
    places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(index, indent=2) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, path)
