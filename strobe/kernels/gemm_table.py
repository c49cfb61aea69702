"""Which configuration serves which GEMM: measured (`table.json`), or a guess for unknown shapes.

The choice depends on the GEMM and on the bucket of its row count, never on the row count itself,
so that a row's result does not change with its company inside a bucket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

BUCKETS = (1, 16, 32, 64, 128)
"""Row counts are rounded up to one of these."""

PATH = Path(__file__).with_name("table.json")

GROUP = 128
"""Columns of x that share a scale where W is fp8 and x is quantised inside the GEMM."""

SHARED_MEMORY = 227 * 1024
"""Bytes that the programs on one multiprocessor of an sm_90 share."""


class Weight(NamedTuple):
    """`data` [N, K] in the model's dtype, or float8_e4m3fn with `scale` [N] fp32, one per row."""

    data: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gemm:
    """What is computed: y = x Wᵀ with what is fused around it. `n`, `k`: rows and columns of W."""

    n: int
    k: int
    dtype: torch.dtype
    """Of the model: of x and y."""
    fp8: bool = False
    """W is float8_e4m3fn."""
    norm: bool = False
    gated: bool = False
    residual: bool = False
    argmax: bool = False

    @property
    def kind(self) -> str:
        """The row of the table: dtype of the model, and of W where it is another."""
        return str(self.dtype).removeprefix("torch.") + ("/float8_e4m3fn" if self.fp8 else "")

    @property
    def fusion(self) -> str:
        names = ("norm", "gated", "residual", "argmax")
        return "+".join(name for name in names if getattr(self, name)) or "plain"

    @property
    def outputs(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.gated else self.n

    @property
    def item(self) -> int:
        """Bytes of an element of W."""
        return 1 if self.fp8 else self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How a GEMM is computed. The fields behind `kernel` are for triton."""

    kernel: Literal["triton", "cublas"] = "triton"
    block_n: int = 64
    """Rows of W in a tile; gated: half of them gate rows, half up rows."""
    block_k: int = 128
    split_k: int = 1
    """Programs that share a tile, each with its range of K."""
    warps: int = 4
    stages: int = 4
    """Tiles of W in flight in one program, and one in use."""
    fused_norm: bool = True
    """The norm in the GEMM's own kernel, not in one before it."""
    groups: bool = True
    """fp8: x is quantised inside the kernel by groups of columns, not before by rows."""
    tma: bool = False
    """W comes through the bulk copy engine."""
    prefetch: int = 0
    """Bytes of each row of W brought into L2 while the kernel before still runs."""

    def tiles(self, gemm: Gemm) -> int:
        columns = self.block_n // 2 if gemm.gated else self.block_n
        return -(-gemm.outputs // columns)


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def block_m(bucket: int) -> int:
    """Rows of x in a tile: the tensor cores take no fewer than 16 (well: 8)."""
    return max(bucket, 16)


def balanced_split(tiles: int, blocks: int, slots: int) -> int:
    """Into how many ranges to cut K, so that tiles times ranges fill `slots` programs evenly.

    The cost of a split: the last wave counts whole, and adding up partials costs about 3 % a range.
    """

    def cost(split: int) -> float:
        waves = -(-tiles * split // slots)
        return waves * slots / (tiles * split) + 0.03 * (split - 1)

    return min((split for split in range(1, 9) if split == 1 or blocks // split >= 4), key=cost)


def guess(gemm: Gemm, bucket: int, processors: int = 132) -> GemmConfig:
    """A configuration for a shape that nobody measured.

    64 rows of W a tile (128 where a tile of x is large or W is gated), 128 columns a step, as many
    stages as let two programs share a multiprocessor, and the split that fills all of them evenly.
    GEMMs of more than 32 rows are cuBLAS's, which chooses better without having measured.
    """
    m = block_m(bucket)
    if m >= 64 and gemm.dtype != torch.float32 and not gemm.fp8 and not gemm.argmax:
        return GemmConfig("cublas")
    if gemm.dtype == torch.float32 and not gemm.fp8:  # no tensor cores: small tiles
        n, k, stages, warps = 32, 32, 3, 4
    else:
        n = 128 if gemm.gated or m > 64 else 64
        k = 128 if m < 128 or gemm.fp8 else 64
        warps = 8 if m * n >= 128 * 64 else 4
        step = (n + m) * k * gemm.item
        stages = max(3, min(6, SHARED_MEMORY // 2 // step))
    config = GemmConfig(
        block_n=n, block_k=k, warps=warps, stages=stages, groups=bucket <= 32, prefetch=512
    )
    if gemm.argmax:
        return config
    split = balanced_split(config.tiles(gemm), -(-gemm.k // k), 2 * processors)
    return replace(config, split_k=split)


class GemmTable:
    """Measured configurations of one GPU, by GEMM and bucket.

    `data`: name of the GPU -> {"capability": "9.0", "gemms": {kind: {fusion: {"NxK": {bucket:
    fields of Config that differ from the defaults}}}}}. A GPU that is not in it takes the entries
    of one with its compute capability.
    """

    def __init__(self, data: dict[str, Any], gpu: str = "", capability: str = "") -> None:
        same = [entry for entry in data.values() if entry["capability"] == capability]
        entry = data.get(gpu) or (same[0] if same else {"gemms": {}})
        self.gemms: dict[str, Any] = entry["gemms"]
        self.processors = 132

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
        """What was measured for it, or for it without norm or residual or with them; or `guess`."""
        kind = self.gemms.get(gemm.kind, {})
        for norm, residual in ((0, 0), (0, 1), (1, 0), (1, 1)):
            like = replace(
                gemm, norm=gemm.norm ^ bool(norm), residual=gemm.residual ^ bool(residual)
            )
            sizes = kind.get(like.fusion, {})
            entry = sizes.get(f"{gemm.n}x{gemm.k}", {}).get(str(bucket))
            if entry is not None:
                return GemmConfig(**entry)
        return guess(gemm, bucket, self.processors)

    @classmethod
    def of(cls, device: torch.device) -> GemmTable:
        """The persisted table for `device`; on a CPU: guesses only."""
        if device.type != "cuda":
            return cls({})
        properties = torch.cuda.get_device_properties(device)
        table = cls(load(), properties.name, f"{properties.major}.{properties.minor}")
        table.processors = properties.multi_processor_count
        return table


@cache
def load() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def save(data: dict[str, Any], path: Path = PATH) -> None:
    """As JSON, the buckets of one GEMM on a line each."""

    def text(value: Any, depth: int) -> str:
        if depth == 6 or not value or not isinstance(value, dict):
            return json.dumps(value)
        lines = ",\n".join(
            f"{'  ' * (depth + 1)}{json.dumps(key)}: {text(value[key], depth + 1)}" for key in value
        )
        return f"{{\n{lines}\n{'  ' * depth}}}"

    path.write_text(text(data, 0) + "\n")


def record(
    data: dict[str, Any], gpu: str, capability: str, gemm: Gemm, bucket: int, config: GemmConfig
) -> None:
    """Put `config` into `data`, in the form that `Table` reads."""
    defaults = GemmConfig()
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(GemmConfig)
        if getattr(config, field.name) != getattr(defaults, field.name)
    }
    entry = data.setdefault(gpu, {"capability": capability, "gemms": {}})
    sizes = entry["gemms"].setdefault(gemm.kind, {}).setdefault(gemm.fusion, {})
    sizes.setdefault(f"{gemm.n}x{gemm.k}", {})[str(bucket)] = changed
