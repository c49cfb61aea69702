"""Configurations of attention blocks by head size, rows and dtype, measured on an H200."""

from __future__ import annotations

from typing import NamedTuple

import torch

from strobe.kernels.gemm_table import SHARED_MEMORY


class AttentionConfig(NamedTuple):
    """A configuration of the attention kernel."""

    pairs: int
    """(row, head) pairs of a block, at least 16."""
    keys: int
    """Keys per iteration, a divisor of PIECE_KEYS."""
    warps: int
    stages: int
    unmasked_loop: bool = False
    """Run keys that every row sees in a separate loop without a mask, which pays off if the kernel
    is bound by arithmetic rather than memory."""


# By head size, pairs of the longest span (16, 32, 64, or 128 for more) and bytes of a stored
# number: 4 for float32 models, which use no tensor cores and run out of registers first.
CONFIGS: dict[tuple[int, int, int], AttentionConfig] = {
    (64, 16, 1): AttentionConfig(pairs=16, keys=128, warps=4, stages=4),
    (64, 32, 1): AttentionConfig(pairs=32, keys=128, warps=4, stages=4),
    (64, 64, 1): AttentionConfig(pairs=64, keys=64, warps=4, stages=4),
    (64, 128, 1): AttentionConfig(pairs=128, keys=64, warps=8, stages=3, unmasked_loop=True),
    (64, 16, 2): AttentionConfig(pairs=16, keys=128, warps=4, stages=3),
    (64, 32, 2): AttentionConfig(pairs=32, keys=128, warps=4, stages=3),
    (64, 64, 2): AttentionConfig(pairs=64, keys=64, warps=4, stages=4),
    (64, 128, 2): AttentionConfig(pairs=128, keys=128, warps=8, stages=3, unmasked_loop=True),
    (64, 16, 4): AttentionConfig(pairs=16, keys=32, warps=4, stages=2),
    (64, 32, 4): AttentionConfig(pairs=32, keys=32, warps=8, stages=2),
    (64, 64, 4): AttentionConfig(pairs=64, keys=32, warps=8, stages=2),
    (64, 128, 4): AttentionConfig(pairs=64, keys=32, warps=8, stages=2),
    (128, 16, 1): AttentionConfig(pairs=16, keys=128, warps=4, stages=3),
    (128, 32, 1): AttentionConfig(pairs=32, keys=128, warps=4, stages=3),
    (128, 64, 1): AttentionConfig(pairs=64, keys=64, warps=4, stages=4),
    (128, 128, 1): AttentionConfig(pairs=128, keys=64, warps=8, stages=3, unmasked_loop=True),
    (128, 16, 2): AttentionConfig(pairs=16, keys=32, warps=4, stages=4),
    (128, 32, 2): AttentionConfig(pairs=32, keys=64, warps=4, stages=3),
    (128, 64, 2): AttentionConfig(pairs=64, keys=64, warps=4, stages=3),
    (128, 128, 2): AttentionConfig(pairs=128, keys=128, warps=8, stages=3),
    (128, 16, 4): AttentionConfig(pairs=16, keys=16, warps=4, stages=2),
    (128, 32, 4): AttentionConfig(pairs=32, keys=16, warps=8, stages=2),
    (128, 64, 4): AttentionConfig(pairs=32, keys=16, warps=8, stages=2),
    (128, 128, 4): AttentionConfig(pairs=32, keys=16, warps=8, stages=2),
    (256, 16, 1): AttentionConfig(pairs=16, keys=32, warps=4, stages=4),
    (256, 32, 1): AttentionConfig(pairs=32, keys=32, warps=4, stages=4),
    (256, 64, 1): AttentionConfig(pairs=64, keys=32, warps=8, stages=4),
    (256, 128, 1): AttentionConfig(pairs=64, keys=32, warps=8, stages=3, unmasked_loop=True),
    (256, 16, 2): AttentionConfig(pairs=16, keys=32, warps=4, stages=4),
    (256, 32, 2): AttentionConfig(pairs=32, keys=32, warps=4, stages=3),
    (256, 64, 2): AttentionConfig(pairs=64, keys=32, warps=8, stages=4),
    (256, 128, 2): AttentionConfig(pairs=128, keys=32, warps=8, stages=3, unmasked_loop=True),
    (256, 16, 4): AttentionConfig(pairs=16, keys=16, warps=4, stages=2),
    (256, 32, 4): AttentionConfig(pairs=16, keys=16, warps=4, stages=2),
    (256, 64, 4): AttentionConfig(pairs=16, keys=16, warps=4, stages=2),
    (256, 128, 4): AttentionConfig(pairs=16, keys=16, warps=4, stages=2),
    (512, 16, 1): AttentionConfig(pairs=16, keys=64, warps=8, stages=2),
    (512, 32, 1): AttentionConfig(pairs=32, keys=32, warps=8, stages=2),
    (512, 64, 1): AttentionConfig(pairs=64, keys=64, warps=8, stages=1),
    (512, 128, 1): AttentionConfig(pairs=64, keys=64, warps=8, stages=1),
    (512, 16, 2): AttentionConfig(pairs=16, keys=32, warps=4, stages=3),
    (512, 32, 2): AttentionConfig(pairs=32, keys=32, warps=4, stages=2),
    (512, 64, 2): AttentionConfig(pairs=64, keys=32, warps=8, stages=2),
    (512, 128, 2): AttentionConfig(pairs=64, keys=32, warps=8, stages=2),
    (512, 16, 4): AttentionConfig(pairs=16, keys=16, warps=8, stages=2),
    (512, 32, 4): AttentionConfig(pairs=16, keys=16, warps=8, stages=2),
    (512, 64, 4): AttentionConfig(pairs=16, keys=16, warps=8, stages=2),
    (512, 128, 4): AttentionConfig(pairs=16, keys=16, warps=8, stages=2),
}

# Overrides if each multiprocessor runs at most one program, which can use all its resources.
ONE_PER_SM: dict[tuple[int, int, int], AttentionConfig] = {
    (128, 16, 2): AttentionConfig(pairs=16, keys=128, warps=4, stages=3),
    (128, 128, 2): AttentionConfig(pairs=128, keys=64, warps=8, stages=3),
}


MUCH_SHARED_MEMORY = 160 * 1024
"""Bytes that all configurations above do with: an sm_80 has 163 KB, an sm_90 227 KB."""

# Overrides for GPUs whose programs may use 99 KB of shared memory, such as sm_86, sm_89 and sm_120.
# Not measured.
LESS_SHARED_MEMORY: dict[tuple[int, int, int], AttentionConfig] = {
    (128, 128, 2): AttentionConfig(pairs=128, keys=64, warps=8, stages=2),
    (256, 16, 2): AttentionConfig(pairs=16, keys=32, warps=4, stages=3),
    (256, 64, 2): AttentionConfig(pairs=64, keys=32, warps=8, stages=2),
    (256, 128, 2): AttentionConfig(pairs=64, keys=32, warps=8, stages=2, unmasked_loop=True),
    (512, 16, 2): AttentionConfig(pairs=16, keys=32, warps=4, stages=2),
    (512, 64, 2): AttentionConfig(pairs=32, keys=32, warps=4, stages=2),
    (512, 128, 2): AttentionConfig(pairs=32, keys=32, warps=4, stages=2),
}


def config_of(
    head_dim: int,
    pairs: int,
    spans: int,
    kv_heads: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    programs: int,
    shared: int = SHARED_MEMORY,
) -> AttentionConfig:
    """Return the configuration for a model of `dtype` whose longest span has `pairs` (row, head)
    pairs. programs: target number of programs when blocks are split. shared: bytes of shared memory
    that a program may use. Measured by `python benchmarks/attention.py`."""
    block = next((size for size in (16, 32, 64) if pairs <= size), 128)
    key = head_dim, block, 4 if dtype == torch.float32 else kv_dtype.itemsize
    if shared < MUCH_SHARED_MEMORY:
        return LESS_SHARED_MEMORY.get(key, CONFIGS[key])
    fits_at_once = spans * kv_heads * -(-pairs // block) <= programs
    return ONE_PER_SM.get(key, CONFIGS[key]) if fits_at_once else CONFIGS[key]
