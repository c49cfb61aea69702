"""A checkpoint's tensors: files opened, names known, nothing read before it is asked for."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from strobe.models.formats.fields import read_json

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""What tensors' names may begin with, and are known without."""


def own_name(key: str) -> str:
    return next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), key)


class Checkpoint:
    """The safetensors of one directory, opened but not read.

    Raises ValueError when a file is missing, damaged or cut short.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for name in _file_names(directory):
            path = directory / name
            if not path.exists():
                raise ValueError(f"{path} does not exist; download or save the checkpoint again.")
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is damaged or cut short ({error}); download or save it again."
                ) from None
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                own = own_name(key)
                if own in self._files:
                    raise ValueError(
                        f"{path}: tensor {key} is there twice; download or save the checkpoint "
                        "again."
                    )
                self._files[own] = (file, key)

    def dtypes(self) -> dict[str, str]:
        """The tensors' dtypes under safetensors' names."""
        return {n: f.get_slice(k).get_dtype() for n, (f, k) in self._files.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(f.get_slice(k).get_shape()) for n, (f, k) in self._files.items()}

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU and as it is stored."""
        file, key = self._files[name]
        return file.get_tensor(key)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(
            f"{index} is damaged (weight_map must name a file for each tensor); download or save "
            "the checkpoint again."
        )
    return sorted(set(shards.values()))
