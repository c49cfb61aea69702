"""A checkpoint's tensors: files are mapped and named, and read on demand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strobe.host.mapped_file import MappedFile
from strobe.hub.files import GGUF_LINK, source_of, weight_files
from strobe.models.config_readers.tensor_names import own_name
from strobe.models.quantization.gguf import FLOATS as GGUF_FLOATS
from strobe.models.quantization.gguf import GGUFFile
from strobe.models.quantization.grouped import GroupWeight
from strobe.models.weight_mapping import (
    FLOATS,
    Blocks,
    Check,
    CheckpointTensors,
    WeightPart,
    copy,
)

TORCH = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E8M0": torch.uint8,
}  # fmt: skip
"""Dtypes by safetensors' names. F8_E8M0 are exponents of scales."""

AT_ONCE = 8 << 20
"""Bytes to copy before their pages are released."""


class _File(MappedFile):
    """A safetensors file. Raises ValueError if it is damaged."""

    def __init__(self, path: Path):
        if not path.exists():
            raise ValueError(f"{path} does not exist; download or save the checkpoint again.")
        try:
            with safe_open(path, framework="pt", device="cpu"):
                pass  # checks the header against the file
            super().__init__(path)
        except RuntimeError as error:
            raise ValueError(
                f"{path} could not be mapped ({error}); raise the limit on this process's memory."
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is damaged or cut short ({error}); download or save it again."
            ) from None

    def header(self) -> tuple[dict[str, Any], int]:
        """Return the file's entry for each tensor, and the byte that their offsets count from."""
        start = 8 + int.from_bytes(self.map[:8], "little")
        header = json.loads(self.map[8:start])
        header.pop("__metadata__", None)
        return header, start


class Checkpoint:
    """The weights of one directory, mapped but not read.

    source: the directory, or the GGUF file that it describes; errors name it.
    shapes, dtypes: of the tensors, in stored order; dtypes by safetensors' names, F32 for quantized
    tensors of GGUF files, which are dequantized when read. types, coded: see `CheckpointTensors`.
    Raises ValueError if a file is missing, damaged or cut short.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.source = source_of(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.types: dict[str, str] = {}
        self.coded = set[str]()
        self._places: dict[str, tuple[MappedFile, int, int]] = {}  # first byte, end
        self._gguf: GGUFFile | None = None
        for name in weight_files(directory):
            if name == GGUF_LINK:
                self._add_gguf(GGUFFile(self.source))
                continue
            file = _File(directory / name)
            header, first = file.header()
            for key, value in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                tensor_name = own_name(key)
                if tensor_name in self._places:
                    raise ValueError(
                        f"{directory / name}: tensor {key} is there twice; download or save the "
                        "checkpoint again."
                    )
                self.shapes[tensor_name] = tuple(value["shape"])
                self.dtypes[tensor_name] = value["dtype"]
                start, end = value["data_offsets"]
                self._places[tensor_name] = file, first + start, first + end

    def _add_gguf(self, file: GGUFFile) -> None:
        self._gguf = file
        for name, tensor in file.tensors.items():
            self.shapes[name] = tensor.shape
            self.dtypes[name] = tensor.dtype
            self._places[name] = file.file_of(name), tensor.stored.start, tensor.stored.end
            if tensor.stored.type not in GGUF_FLOATS:
                self.types[name] = tensor.stored.type
            if tensor.has_codes:
                self.coded.add(name)

    @property
    def tensors(self) -> CheckpointTensors:
        """What is known of the tensors before they are read."""
        return CheckpointTensors(
            source=self.source,
            dtypes=self.dtypes,
            shapes=self.shapes,
            types=self.types,
            coded=self.coded,
        )

    def fit(
        self,
        name: str,
        shape: tuple[int, ...],
        stacked: tuple[int, ...],
        blocks: Blocks | None = None,
    ) -> None:
        """Check the shape that a module asks for. stacked, blocks: see `WeightPart`. Raises
        ValueError."""
        if self.shapes[name] != shape:
            raise ValueError(
                f"{self.source}: tensor {name} has shape {list(self.shapes[name])}, config.json "
                f"asks for {list(shape)}; weights and config.json must come from one checkpoint."
            )

    def equal(self, first: str, second: str) -> bool:
        """Whether two unquantized tensors, or two of a GGUF file, are stored as the same bytes.
        Reads them up to the first difference."""
        if self.shapes[first] != self.shapes[second] or self._type(first) != self._type(second):
            return False
        if self.dtypes[first] not in FLOATS:
            return False
        file, start, end = self._places[first]
        other_file, other_start, _ = self._places[second]
        for offset in range(0, end - start, AT_ONCE):
            size = min(AT_ONCE, end - start - offset)
            here = start + offset
            there = other_start + offset
            values = file.bytes[here : here + size]
            is_equal = torch.equal(values, other_file.bytes[there : there + size])
            file.release(here, here + size)
            other_file.release(there, there + size)
            if not is_equal:
                return False
        return True

    def _type(self, name: str) -> str:
        """Return the tensor's stored dtype, or its type in a GGUF file."""
        return self.dtypes[name] if self._gguf is None else self._gguf.tensors[name].stored.type

    def bytes_of(self, name: str) -> int:
        if self._gguf is not None:
            return self._gguf.tensors[name].nbytes
        _, start, end = self._places[name]
        return end - start

    def read(self, name: str) -> Tensor:
        """Return the tensor as stored, over the file's own pages. Read-only. Tensors of GGUF files
        are copies, dequantized and in the order of the checkpoint's format."""
        if self._gguf is not None:
            return self._gguf.read(name)
        file, start, end = self._places[name]
        data = file.bytes[start:end]
        dtype = TORCH[self.dtypes[name]]
        if start % dtype.itemsize:  # older writers did not align tensors
            data = data.clone()
        return data.view(dtype).view(self.shapes[name])

    def read_codes(self, name: str) -> GroupWeight:
        """Return one of `coded` as codes, in memory of its own, and release its pages."""
        assert self._gguf is not None
        weight = self._gguf.codes(name)
        self.release(name)
        return weight

    def release(self, name: str) -> None:
        """Release the tensor's pages after reading it."""
        if self._gguf is not None:
            self._gguf.release(name)
            return
        file, start, end = self._places[name]
        file.release(start, end)

    def check_values(self, parts: Iterable[WeightPart]) -> None:
        """Read the tensors of parts that have checks, in stored order. Raises ValueError that names
        a tensor and a wrong value. GGUF files, whose scales are inside their weights, are not
        read."""
        if self._gguf is not None:
            return
        checks = dict[str, Check]()
        for part in parts:
            checks |= part.checks
        for name in (name for name in self.shapes if name in checks):
            value = self.read(name)
            problem = checks[name](value, value.shape != self.shapes[name])
            self.release(name)
            if problem is not None:
                raise ValueError(f"{self.source}: tensor {name} {problem}")

    def fill(self, out: Tensor, part: WeightPart) -> None:
        """Fill one part of a parameter, and release each page after reading it, so that the host
        does not hold a second copy of the weights."""
        first = next(iter(part.sources))
        if part.as_codes:
            part.fill(out, *map(self.read_codes, part.sources))
            return
        if self._gguf is not None and part.fill is copy and out.ndim > 0:
            start = 0
            for values in self._gguf.chunks(first, AT_ONCE):
                copy(out[start : start + len(values)], values)
                start += len(values)
            return
        file, start, _ = self._places[first]
        if part.fill is not copy or out.ndim == 0 or self._gguf is not None:
            part.fill(out, *map(self.read, part.sources))
            for name in part.sources:
                self.release(name)
            return
        stored = self.read(first)
        count = max(AT_ONCE // stored[:1].nbytes, 1)
        for target, values in zip(out.split(count), stored.split(count), strict=True):
            copy(target, values)
            file.release(start, start + values.nbytes)
            start += values.nbytes
