"""Which configurations tune_kernels.py tries: the likeliest first, then variants of the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as product_

from strobe.kernels.table import GROUP, Config, Product, block_m

SHARED = 225 * 1024
"""Bytes of shared memory that tiles in flight may take on a multiprocessor."""


def promise(product: Product, rows: int, config: Config, programs: int, processors: int) -> float:
    """The smaller, the likelier to be fast: a guess for the order of measuring only."""
    tiles = config.tiles(product) * config.split_k
    slots = programs * processors
    waves = -(-tiles // slots)
    waste = (0.3 if waves == 1 else 0.5) * (waves * slots / tiles - 1)
    flying = min(programs, tiles / processors) * (config.stages - 1) * config.block_n
    flying *= config.block_k * product.item
    return (
        waste
        + 0.02 * (config.split_k - 1)
        + (config.split_k > 1) * 4 * rows * config.split_k / (product.k * product.item)
        + 0.3 * max(0.0, 1 - flying / 80_000)
        + max(0.0, 0.65 * (1 + rows / config.block_n) - 1)  # x from L2, over and over
        + 0.03 * (config.block_k * product.item < 256)
    )


def first_round(product: Product, bucket: int, processors: int) -> list[Config]:
    rows = block_m(bucket)
    found: dict[tuple[int, int, int, bool], list[tuple[float, Config]]] = {}
    shapes = product_(
        [n for n in (32, 64, 128, 256) if n >= rows // 2 and (n < 256 or rows >= 64)],
        [k for k in (64, 128, 256) if k <= product.k],
        (1, 2, 3, 4),  # programs that share a multiprocessor
        (True, False) if product.fp8 else (True,),
    )
    for n, k, programs, groups in shapes:
        grouped = product.fp8 and groups
        if (grouped and (k != GROUP or rows > 64)) or (product.gated and n < 64):
            continue
        step = n * k * product.item + rows * k * (2 if grouped else product.item)
        stages = min(8, SHARED // programs // step - (1 if product.norm else 0))
        if stages < 3:
            continue
        warps = 8 if n * rows > 64 * 128 or (grouped and rows > 32) else 4
        for split in (1,) if product.argmax else range(1, 9):
            if product.k // k // split < 4:
                continue
            config = Config(
                block_n=n, block_k=k, split_k=split, warps=warps, stages=stages, groups=groups
            )
            score = promise(product, rows, config, programs, processors)
            found.setdefault((n, k, programs, groups), []).append((score, config))
    # The best of each family first, so that no family goes untried; then the rest.
    ranked = [sorted(family, key=lambda pair: pair[0]) for family in found.values()]
    order = sorted((f[0] for f in ranked), key=lambda pair: pair[0])
    order += sorted((pair for f in ranked for pair in f[1:3]), key=lambda pair: pair[0])
    return list(dict.fromkeys(config for _, config in order))


def second_round(product: Product, best: list[Config]) -> list[Config]:
    """Variants of the best of the first round."""
    variants: list[Config] = []
    for place, config in enumerate(best):
        variants += [
            replace(config, pdl=True, prefetch=1024),
            replace(config, tma=True, pdl=True, prefetch=1024),
        ]
        if place:
            continue
        variants += [replace(config, pdl=True, prefetch=size) for size in (0, 512, 2048)]
        variants += [
            replace(config, tma=True),
            replace(config, stages=config.stages - 1),
            replace(config, warps=12 - config.warps),
        ]
        if product.norm:
            variants += [
                replace(config, fused_norm=False),
                replace(config, fused_norm=False, pdl=True, prefetch=1024),
            ]
    return variants
