"""Configurations for tune_kernels.py to try: a first round, then variants of the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from strobe.kernels.gemm_table import GROUP, LARGE, Gemm, GemmConfig, block_m
from strobe.kernels.quack_gemm import TILES

SHARED = 225 * 1024
"""Bytes of shared memory per multiprocessor for tiles in flight."""


def estimated_cost(gemm: Gemm, rows: int, config: GemmConfig, fit: int, processors: int) -> float:
    """Return a rough cost, used only to order the measurements.

    fit: programs that fit onto a multiprocessor together.
    """
    programs = config.tiles(gemm) * config.split_k
    resident = min(fit, -(-programs // processors))
    waves = -(-programs // (resident * processors))
    idle = waves * resident * processors / programs - 1
    bytes_in_flight = min(fit, programs / processors) * (config.stages - 1) * config.block_n
    bytes_in_flight *= config.block_k * gemm.item
    return (
        (0.3 if waves == 1 else 0.5) * idle
        + 0.02 * (config.split_k - 1)
        + (config.split_k > 1) * 4 * rows * config.split_k / (gemm.k * gemm.item)
        + 0.3 * max(0.0, 1 - bytes_in_flight / 80_000)
        + max(0.0, 0.65 * (1 + rows / config.block_n) - 1)  # repeated reads of x from L2
        + 0.03 * (config.block_k * gemm.item < 256)
        + 0.05 * (fit < 2 * resident)  # no room to start the next kernel early
    )


def by_quack(gemm: Gemm, bucket: int) -> list[GemmConfig]:
    """Return what to try of quack-kernels."""
    half = gemm.dtype != torch.float32 and not gemm.fp8
    if bucket < 64 or not half or gemm.argmax or (gemm.gated and gemm.residual):
        return []
    tiles = (tile for tile in TILES if tile[0] == 64 or bucket > 64)
    return [GemmConfig(kernel="cublas", quack=tile) for tile in tiles]


def first_round(gemm: Gemm, bucket: int, processors: int) -> list[GemmConfig]:
    if bucket in LARGE:
        return []
    rows = block_m(bucket)
    families: dict[tuple[int, int, int, bool], list[tuple[float, GemmConfig]]] = {}
    shapes = product(
        [n for n in (32, 64, 128, 256) if n >= rows // 2 and (n < 256 or rows >= 64)],
        [k for k in (64, 128, 256) if k <= gemm.k],
        (1, 2, 3, 4),  # programs that fit onto a multiprocessor
        (True, False) if gemm.fp8 else (True,),
    )
    for n, k, fit, groups in shapes:
        grouped = gemm.fp8 and groups
        if (grouped and (k != GROUP or rows > 64)) or (gemm.gated and n < 64):
            continue
        step = n * k * gemm.item + rows * k * (2 if grouped else gemm.item)
        stages = min(8, SHARED // fit // step - (1 if gemm.norm else 0))
        if stages < 3:
            continue
        warps = 8 if n * rows > 64 * 128 or (grouped and rows > 32) else 4
        for split in (1,) if gemm.argmax else range(1, 9):
            if gemm.k // k // split < 4:
                continue
            config = GemmConfig(
                block_n=n,
                block_k=k,
                split_k=split,
                warps=warps,
                stages=stages,
                groups=groups,
                prefetch=1024,
            )
            score = estimated_cost(gemm, rows, config, fit, processors)
            families.setdefault((n, k, fit, groups), []).append((score, config))
    # The two best of each family first, so that every family is tried; then the rest.
    ranked = [sorted(family, key=lambda pair: pair[0]) for family in families.values()]
    order = sorted((pair for f in ranked for pair in f[:2]), key=lambda pair: pair[0])
    order += sorted((pair for f in ranked for pair in f[2:4]), key=lambda pair: pair[0])
    configs = dict.fromkeys(config for _, config in order)
    if not gemm.norm:
        return list(configs)
    return [replace(config, fused_norm=fused) for config in configs for fused in (False, True)]


def second_round(gemm: Gemm, best: list[GemmConfig]) -> list[GemmConfig]:
    """Return variants of the best configurations of the first round."""
    variants: list[GemmConfig] = []
    for rank, config in enumerate(best):
        variants += [
            replace(config, tma=True),
            replace(config, prefetch=0),
            replace(config, prefetch=512),
            replace(config, prefetch=2048),
        ]
        if rank:
            continue
        variants += [replace(config, stages=config.stages + more) for more in (-2, -1, 1)]
        variants += [
            replace(config, prefetch=4096),
            replace(config, tma=True, prefetch=2048),
            replace(config, warps=12 - config.warps),
        ]
    # The gated bulk copy puts W into registers, and triton 3.6 cannot multiply fp8 from there.
    bulk = not (gemm.fp8 and gemm.gated)
    return [c for c in dict.fromkeys(variants) if c.stages > 1 and (bulk or not c.tma)]
