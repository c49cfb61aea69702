"""Tiles of the grouped GEMMs of experts, by GPU, shape and bucket of row counts.

The choice depends on the bucket of the row count, never on the row count itself, so that a row's
result does not depend on the other rows in a bucket.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from strobe.kernels.gemm_table import SHARED_MEMORY, entry_of, read, shared_memory, write

MAX_ROWS = 2048
"""More rows run in torch's grouped GEMM."""


class Tile(NamedTuple):
    """A program's part of a grouped GEMM."""

    block_n: int = 64
    """Rows of W."""
    block_k: int = 128
    """Columns of an iteration (MXFP4: always 128)."""
    warps: int = 4
    stages: int = 4
    """Of the pipeline that loads W."""


TILE = Tile()


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A configuration of a layer's two grouped GEMMs."""

    block_m: int = 16
    """Rows of x in a tile."""
    by_pair: bool = False
    """A block is one pair of a row and an expert, which need not be sorted."""
    gate_up: Tile = TILE
    """Of the first GEMM."""
    down: Tile = TILE
    """Of the second GEMM."""


BUCKETS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Row counts are rounded up to one of these."""

PATH = Path(__file__).with_name("experts.json")
LEVELS = 4
"""Objects above a configuration; see `load`."""


Shape = tuple[int, ...]


def guess(
    bucket: int,
    shape: Shape,
    dtype: torch.dtype,
    packed: str = "",
    shared: int = SHARED_MEMORY,
) -> ExpertsConfig:
    """Return a configuration for a shape without measurements. shared: bytes of shared memory that
    a program may use."""
    by_pair = bucket <= 4
    if dtype == torch.float32:  # no tensor cores: small tiles
        block_k = 128 if packed == "e2m1" else 32
        small = Tile(block_n=32, block_k=block_k, warps=4, stages=2)
        return ExpertsConfig(block_m=16, by_pair=by_pair, gate_up=small, down=small)
    if packed == "e2m1":
        if by_pair:
            deep = Tile(block_n=32, block_k=128, warps=2, stages=6)
            return ExpertsConfig(block_m=8, by_pair=True, gate_up=deep, down=deep)
        if bucket <= 2 * shape[0]:
            return ExpertsConfig(block_m=16)
        wide = Tile(block_n=128, block_k=128, warps=4, stages=3)
        if bucket <= 4 * shape[0]:
            return ExpertsConfig(block_m=32, gate_up=wide, down=wide)
        wide = wide._replace(warps=8)
        return ExpertsConfig(block_m=64, gate_up=wide, down=wide)
    if bucket * 8 <= 8 * shape[0]:
        return ExpertsConfig(block_m=16, by_pair=by_pair)
    if bucket <= 256:
        return ExpertsConfig(block_m=32, down=Tile(stages=3))
    return ExpertsConfig(
        block_m=64,
        gate_up=Tile(block_n=128, block_k=64, warps=4, stages=3),
        down=Tile(block_n=128, block_k=64, warps=8, stages=4),
    )


@cache
def choose(
    rows: int, shape: Shape, dtype: torch.dtype, device: torch.device, packed: str = ""
) -> ExpertsConfig:
    """Return the configuration measured on this GPU, on a similar one, or a `guess`. shape [E, N,
    K]: of the first GEMM's weights; packed: their format."""
    bucket = next((bucket for bucket in BUCKETS if rows <= bucket), BUCKETS[-1])
    kind = kind_of(dtype, packed)
    name = "x".join(map(str, shape))
    entry = _measured(device).get(kind, {}).get(name, {}).get(str(bucket))
    if entry is None:
        return guess(bucket, shape, dtype, packed=packed, shared=shared_memory(device))
    return _build(entry)


def _build(entry: dict[str, Any]) -> ExpertsConfig:
    tiles: dict[str, Any] = {key: Tile(*entry[key]) for key in ("gate_up", "down")}
    return ExpertsConfig(**entry | tiles)


def kind_of(dtype: torch.dtype, packed: str) -> str:
    """Return the table's key of a model's dtype and the format of packed weights, if any."""
    return "/".join(filter(None, (str(dtype).removeprefix("torch."), packed)))


def _measured(device: torch.device) -> dict[str, Any]:
    """Return the device's entries, completed by entries of other devices of its capability."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return entry_of(load(), properties.name, f"{properties.major}.{properties.minor}", LEVELS)


@cache
def load() -> dict[str, Any]:
    """Return GPU name -> {"capability": "9.0", kind -> "ExNxK" -> bucket -> fields of
    ExpertsConfig}."""
    return read(PATH, LEVELS, _build)


def record(data: dict[str, Any], kind: str, shape: str, bucket: int, config: ExpertsConfig) -> None:
    """Add a configuration of this machine's GPU to `data`."""
    properties = torch.cuda.get_device_properties(torch.device("cuda"))
    capability = f"{properties.major}.{properties.minor}"
    entry = data.setdefault(properties.name, {"capability": capability})
    entry.setdefault(kind, {}).setdefault(shape, {})[str(bucket)] = asdict(config)


def save(data: dict[str, Any], path: Path = PATH) -> None:
    write(data, path, LEVELS)
