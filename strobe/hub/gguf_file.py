"""The header of a GGUF file: metadata, and where each tensor is stored.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
VERSIONS = 2, 3
STRING = 8
ARRAY = 9
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Formats of struct by the number of a metadata value's type."""
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""Supported types of tensors by their number: name, values of a block, bytes of a block."""
INTEGERS = {26: ("I32", 1, 4), 27: ("I64", 1, 8)}
"""Types of tables of tokens (d2t), which headers may name; no such tensor is read."""
AGAIN = "download or save the file again."
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Names of the parts of a split model."""


class StoredTensor(NamedTuple):
    """shape: outermost dimension first. type: a name in TYPES. start, end: bytes of the file. file:
    its number among the parts of a split model."""

    shape: tuple[int, ...]
    type: str
    start: int
    end: int
    file: int = 0


class GGUFHeader(NamedTuple):
    """files: the file, or all parts of a split model, whose metadata is the first's."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]

    def floats(self, name: str) -> list[float]:
        """Return the values of a small tensor in float32."""
        stored = self.tensors[name]
        with self.files[stored.file].open("rb") as file:
            file.seek(stored.start)
            data = file.read(stored.end - stored.start)
        return [value for (value,) in struct.iter_unpack("<f", data)]


class _Truncated(Exception):
    pass


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise _Truncated
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize(f"<{kind}")))

    def number(self, kind: str) -> float:
        return self.numbers(kind, 1)[0]

    def type_id(self) -> int:
        """Read a number of 32 bits, which versions, types and numbers of dimensions have."""
        return self.numbers("I", 1)[0]

    def size(self) -> int:
        """Read a number of 64 bits, which counts and offsets have."""
        return self.numbers("Q", 1)[0]

    def text(self) -> str:
        return self.take(self.size()).decode("utf-8", errors="replace")

    def value(self, kind: int) -> float | str | list[float] | list[str]:
        """Read a metadata value. Raises KeyError for an unknown type."""
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        kind = self.type_id()
        count = self.size()
        if kind == STRING:
            return [self.text() for _ in range(count)]
        return list(self.numbers(SCALARS[kind], count))


def is_gguf(path: Path) -> bool:
    """Whether the path is named as a GGUF file, or starts as one."""
    if path.suffix == ".gguf":
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> GGUFHeader:
    """Read the header, and for a split model the headers of its other parts. Raises ValueError with
    one sentence if a file is missing, damaged, cut short, or holds a tensor of a type that is not
    supported."""
    first = _read_part(path)
    paths = _parts(path, first.metadata)
    tensors = dict(first.tensors)
    for number, part_path in enumerate(paths[1:], start=1):
        part = _read_part(part_path)
        for name, stored in part.tensors.items():
            if name in tensors:
                raise ValueError(f"{part_path}: tensor {name} is there twice; {AGAIN}")
            tensors[name] = stored._replace(file=number)
    count = first.metadata.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise ValueError(
            f"{path}: its parts hold {len(tensors)} tensors, but split.tensors.count is {count}; "
            f"{AGAIN}"
        )
    return GGUFHeader(first.metadata, tensors, paths)


def part_paths(path: Path) -> list[Path]:
    """Return the files of a model by the name of its first: the file, or all parts of a split
    model."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['name']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]


def _parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files of a model by the metadata of the one that was named. Raises ValueError
    unless that is the first, and the others are in its directory."""
    count = metadata.get("split.count", 0)
    if count <= 1:
        return (path,)
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ValueError(
            f"{path} is one of {count} parts of a split model, whose name must end with "
            f"-00001-of-{count:05}.gguf; give it the name that it was published with."
        )
    paths = tuple(part_paths(path))
    if metadata.get("split.no", 0) != 0:
        raise ValueError(f"{path} is not the first part of a split model; name {paths[0].name}.")
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ValueError(
            f"{path} is one of {count} parts of a split model, but {missing[0]} is not beside it; "
            "download all of them into one directory."
        )
    return paths


def _read_part(path: Path) -> GGUFHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data), path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name a GGUF file.") from None
    except _Truncated:
        raise ValueError(f"{path} is cut short within its header; {AGAIN}") from None
    except (OSError, ValueError, KeyError, MemoryError) as error:
        if isinstance(error, ValueError) and str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is damaged ({error!r}); {AGAIN}") from None


def metadata_value(metadata: Mapping[str, Any], key: str, path: Path) -> Any:
    """Return a value. Raises ValueError if it is missing."""
    if key not in metadata:
        raise ValueError(
            f"{path} lacks the metadata {key}; convert the model again, with a current llama.cpp."
        )
    return metadata[key]


def _parse(cursor: _Cursor, path: Path) -> GGUFHeader:
    if cursor.take(len(MAGIC)) != MAGIC:
        raise ValueError(f"{path} is no GGUF file: it does not start with 'GGUF'; name one.")
    version = cursor.type_id()
    if version not in VERSIONS:
        raise ValueError(
            f"{path} has version {version} of the GGUF format, but only 2 and 3 are supported; "
            "convert the model again, with a current llama.cpp."
        )
    num_tensors = cursor.size()
    num_values = cursor.size()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.type_id())
    places: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name = cursor.text()
        shape = cursor.numbers("Q", cursor.type_id())
        places.append((name, shape[::-1], cursor.type_id(), cursor.size()))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"{path}: general.alignment is {alignment!r}, but must be 1 or more.")
    first = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in places:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name} is there twice; {AGAIN}")
        type_name, values, size = _type_of(kind, name, path)
        if not shape or shape[-1] % values:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(shape)}, but {type_name} needs rows of a "
                f"multiple of {values} values; {AGAIN}"
            )
        start = first + offset
        end = start + math.prod(shape) // values * size
        if end > len(cursor.data):
            raise ValueError(
                f"{path} is cut short: tensor {name} ends at byte {end}, the file at "
                f"{len(cursor.data)}; {AGAIN}"
            )
        tensors[name] = StoredTensor(shape=shape, type=type_name, start=start, end=end)
    return GGUFHeader(metadata, tensors, (path,))


def _type_of(kind: int, name: str, path: Path) -> tuple[str, int, int]:
    if kind in INTEGERS:
        return INTEGERS[kind]
    if kind not in TYPES:
        supported = ", ".join(type_name for type_name, *_ in TYPES.values())
        raise ValueError(
            f"{path}: tensor {name} is stored in GGUF's type {kind}, but only {supported} are "
            "supported; use a file in one of them."
        )
    return TYPES[kind]
