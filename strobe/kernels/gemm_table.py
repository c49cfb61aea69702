"""Configurations of GEMMs: measured (`table.json`, and in a user's cache what
scripts/tune_kernels.py measured there), or a guess for unknown shapes.

The choice depends on the GEMM and the bucket of its row count, never on the row count itself, so
that a row's result does not depend on the other rows in a bucket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from strobe.hub.cache import cache_directory

BUCKETS = (1, 16, 32, 64, 128)
"""Row counts are rounded up to one of these."""

LARGE = (256, 512)
"""Exact numbers of rows that have entries only for quack-kernels, and otherwise run in cuBLAS."""

PATH = Path(__file__).with_name("table.json")
LEVELS = 6
"""Objects above a configuration; see `GemmTable`."""

GROUP = 128
"""Columns of x that share a scale if W is fp8 and x is quantized inside the GEMM."""

SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory that a program may use on an sm_90 or sm_100."""


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


class Weight(NamedTuple):
    """`data` [N, K] in the model's dtype, or float8_e4m3fn with `scale` [N] fp32, one per row."""

    data: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


@dataclass(frozen=True, slots=True)
class Gemm:
    """A GEMM y = x Wᵀ with the operations fused around it. `n`, `k`: rows and columns of W."""

    n: int
    k: int
    dtype: torch.dtype
    """The model's dtype, of x and y."""
    fp8: bool = False
    """W is float8_e4m3fn."""
    norm: bool = False
    gated: bool = False
    residual: bool = False
    argmax: bool = False

    @property
    def kind(self) -> str:
        """The key in the table: the model's dtype, and W's if it differs."""
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
    """A GEMM's configuration. The fields after `kernel` are for Triton."""

    kernel: Literal["triton", "cublas"] = "triton"
    block_n: int = 64
    """Rows of W in a tile; gated: half of them gate rows, half up rows."""
    block_k: int = 128
    split_k: int = 1
    """Programs that share a tile, each with its range of K."""
    warps: int = 4
    stages: int = 4
    """Stages of the software pipeline that loads W."""
    fused_norm: bool = True
    """Compute the norm inside the GEMM, not in a kernel before it."""
    groups: bool = True
    """fp8: quantize x inside the kernel by groups of columns, not before it by rows."""
    tma: bool = False
    """Load W by the tensor memory accelerator."""
    prefetch: int = 0
    """Bytes of each row of W to prefetch into L2 while the previous kernel still runs."""
    quack: Sequence[int] | None = None
    """The tile with which quack-kernels are faster, where they are installed; see quack_gemm.py."""

    def tiles(self, gemm: Gemm) -> int:
        columns = self.block_n // 2 if gemm.gated else self.block_n
        return -(-gemm.outputs // columns)


def bucket_of(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def block_m(bucket: int) -> int:
    """Return the rows of x in a tile, at least 16 for the tensor cores."""
    return max(bucket, 16)


def balanced_split(tiles: int, blocks: int, slots: int) -> int:
    """Return the number of ranges to split K into, so that tiles * ranges fill `slots` programs.

    A split's cost counts its last wave in full, and about 3 % per range for adding partial sums.
    """

    def cost(split: int) -> float:
        waves = -(-tiles * split // slots)
        return waves * slots / (tiles * split) + 0.03 * (split - 1)

    return min((split for split in range(1, 9) if split == 1 or blocks // split >= 4), key=cost)


def guess(
    gemm: Gemm, bucket: int, processors: int = 132, shared: int = SHARED_MEMORY
) -> GemmConfig:
    """Return a configuration for a shape without measurements. shared: bytes of shared memory that
    a program may use.

    64 rows of W per tile (128 if the tile of x is large or W is gated), 128 columns per iteration,
    as many stages as let two programs share a multiprocessor, and a split that fills all of them
    evenly. GEMMs of more than 32 rows go to cuBLAS, whose own heuristics are better.
    """
    m = block_m(bucket)
    half = gemm.dtype != torch.float32 and not gemm.fp8
    if bucket in LARGE or (m >= 64 and half and not gemm.argmax):
        return GemmConfig(kernel="cublas")
    if gemm.dtype == torch.float32 and not gemm.fp8:  # no tensor cores: small tiles
        n = 32
        k = 32
        stages = 3
        warps = 4
    else:
        n = 128 if gemm.gated or m > 64 else 64
        k = 128 if m < 128 or gemm.fp8 else 64
        warps = 8 if m * n >= 128 * 64 else 4
        step = (n + m) * k * gemm.item
        stages = max(3, min(6, shared // 2 // step))
    config = GemmConfig(
        block_n=n, block_k=k, warps=warps, stages=stages, groups=bucket <= 32, prefetch=512
    )
    if gemm.argmax:
        return config
    split = balanced_split(config.tiles(gemm), -(-gemm.k // k), 2 * processors)
    return replace(config, split_k=split)


class GemmTable:
    """Measured configurations for one GPU, by GEMM and bucket.

    `data`: GPU name -> {"capability": "9.0", "gemms": {kind: {fusion: {"NxK": {bucket: fields of
    GemmConfig that differ from the defaults}}}}}. Missing entries come from
    other GPUs of the same compute capability.
    """

    def __init__(self, data: dict[str, Any], gpu: str = "", capability: str = "") -> None:
        self.gemms: dict[str, Any] = entry_of(data, gpu, capability, LEVELS).get("gemms", {})
        self.processors = 132
        self.shared_memory = SHARED_MEMORY

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
        """Return the measured configuration, or one of the same GEMM with or without norm or
        residual, or a `guess`."""
        kind = self.gemms.get(gemm.kind, {})
        for norm, residual in ((0, 0), (0, 1), (1, 0), (1, 1)):
            like = replace(
                gemm, norm=gemm.norm ^ bool(norm), residual=gemm.residual ^ bool(residual)
            )
            sizes = kind.get(like.fusion, {})
            entry = sizes.get(f"{gemm.n}x{gemm.k}", {}).get(str(bucket))
            if entry is not None:
                config = GemmConfig(**entry)
                # All that were tuned with a norm leave it to a launch of its own.
                return replace(config, fused_norm=config.fused_norm and not (gemm.norm and norm))
        return guess(gemm, bucket, self.processors, self.shared_memory)

    @classmethod
    def of(cls, device: torch.device) -> GemmTable:
        """Load the table for `device`; a CPU has only guesses."""
        if device.type != "cuda":
            return cls({})
        properties = torch.cuda.get_device_properties(device)
        table = cls(load(), properties.name, f"{properties.major}.{properties.minor}")
        table.processors = properties.multi_processor_count
        table.shared_memory = shared_memory(device)
        return table


@cache
def load() -> dict[str, Any]:
    return read(PATH, LEVELS, lambda config: GemmConfig(**config))


def read(path: Path, levels: int, build: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return a table of the package, with this user's measurements over it. levels: of objects
    above a configuration, which `build` turns into one. Raises ValueError if the user's file
    cannot be read."""
    data = json.loads(path.read_text())
    own = own_path(path)
    if own is None or not own.is_file():
        return data
    try:
        measured = json.loads(own.read_text())
        for entry in measured.values():
            entry["capability"]
        for config in _configs(measured, levels):
            build(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{own} is no table of kernel configurations of this version ({error}); delete it, or "
            "replace it with scripts/tune_kernels.py."
        ) from None
    return merge(data, measured, levels)


def _configs(entry: dict[str, Any], levels: int) -> Iterator[dict[str, Any]]:
    if not levels:
        yield entry
        return
    for key, value in entry.items():
        if key != "capability":
            yield from _configs(value, levels - 1)


def own_path(path: Path) -> Path | None:
    """Return the user's file of the same name, which may not exist; None without a home."""
    try:
        return cache_directory("kernels") / path.name
    except ValueError:
        return None


def merge(data: Any, own: Any, levels: int) -> Any:
    """Return the entries of both; `own` ones replace others as whole configurations."""
    if not levels or not isinstance(own, dict) or not isinstance(data, dict):
        return own
    return data | {k: merge(data.get(k), value, levels - 1) for k, value in own.items()}


def entry_of(data: dict[str, Any], gpu: str, capability: str, levels: int) -> dict[str, Any]:
    """Return a GPU's entries, completed by other GPUs' of the same compute capability."""
    similar = [entry for entry in data.values() if entry["capability"] == capability]
    entry: dict[str, Any] = {}
    for more in [*reversed(similar), *(data[name] for name in [gpu] if name in data)]:
        entry = merge(entry, more, levels - 1)
    return entry


def save(data: dict[str, Any], path: Path = PATH) -> None:
    write(data, path, LEVELS)


def write(data: dict[str, Any], path: Path, levels: int) -> None:
    """Write JSON with a line per bucket; concurrent readers see either the old or the new file."""
    new = path.with_suffix(".new")
    new.write_text(to_json(data, levels) + "\n")
    new.replace(path)


def to_json(data: dict[str, Any], levels: int) -> str:
    """Return JSON whose objects below so many levels are each on one line."""

    def text(value: Any, depth: int) -> str:
        if depth == levels or not value or not isinstance(value, dict):
            return json.dumps(value)
        lines = ",\n".join(
            f"{'  ' * (depth + 1)}{json.dumps(key)}: {text(value[key], depth + 1)}" for key in value
        )
        return f"{{\n{lines}\n{'  ' * depth}}}"

    return text(data, 0)


def record(
    data: dict[str, Any], gpu: str, capability: str, gemm: Gemm, bucket: int, config: GemmConfig
) -> None:
    """Add `config` to `data` in the form that `GemmTable` reads."""
    defaults = GemmConfig()
    changed = {
        field.name: getattr(config, field.name)
        for field in fields(GemmConfig)
        if getattr(config, field.name) != getattr(defaults, field.name)
    }
    entry = data.setdefault(gpu, {"capability": capability, "gemms": {}})
    sizes = entry["gemms"].setdefault(gemm.kind, {}).setdefault(gemm.fusion, {})
    sizes.setdefault(f"{gemm.n}x{gemm.k}", {})[str(bucket)] = changed
