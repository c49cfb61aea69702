# pyright: basic, reportMissingImports=false
"""GEMMs by quack-kernels, an optional package of kernels for Hopper GPUs, for 64 to 512 rows.

A tile: rows of x, rows of W, programs along x that share loads of W, whether two tiles take turns
on a multiprocessor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

TILES = tuple(
    (rows, columns, cluster, pingpong)
    for rows, columns, pingpong in (
        (64, 128, 1), (64, 192, 1), (128, 128, 1), (128, 160, 1), (128, 192, 1), (128, 256, 0),
        (256, 128, 0), (256, 192, 0),
    )
    for cluster in (1, 2)
)  # fmt: skip
"""Configurations that the tuner tries."""

QuackGemm = Callable[..., Tensor]


@cache
def _config(kind: type, tile: tuple[int, ...]) -> object:
    """Make a configuration that lives as long as the process: quack-kernels tell compiled GEMMs
    apart by the identity of the configuration object."""
    rows, columns, cluster, pingpong = tile
    options = {"cluster_m": cluster, "pingpong": bool(pingpong), "is_dynamic_persistent": False}
    return kind(tile_m=rows, tile_n=columns, **options)


def load() -> QuackGemm | None:
    """Return the GEMM, or None if quack-kernels are not installed or cannot be loaded."""
    try:
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_act
    except Exception as error:  # of any kind, as with versions that do not go together
        if not (isinstance(error, ModuleNotFoundError) and error.name == "quack"):
            logger.warning("quack-kernels cannot be loaded, so other kernels are used: %s", error)
        return None

    def gemm(
        x: Tensor,
        weight: Tensor,
        tile: Sequence[int],
        *,
        residual: Tensor | None = None,
        gated: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [M, K], weight [N, K] -> residual + x Wᵀ [M, N], or silu(gate) * up [M, N / 2]."""
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
        gemm_act(
            x,
            weight.t(),
            C=residual,
            activation="swiglu" if gated else None,
            postact_out=out,
            store_preact=False,
            tuned=False,
            config=_config(GemmConfig, tuple(tile)),
            concat_layout=("B",) if gated else None,
        )
        return out

    return gemm


def takes(x: Tensor, weight: Tensor, *results: Tensor | None) -> bool:
    """Whether the GEMM can compute x Wᵀ: in bfloat16 or float16, with rows of x, W and the results
    that begin at multiples of 16 bytes. results: the residual and the output, if any."""
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    tensors = [x, weight, *(tensor for tensor in results if tensor is not None)]
    aligned = (
        t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) == 1 for t in tensors
    )
    return all(aligned) and weight.shape[1] % 8 == 0 and weight.shape[0] % 16 == 0
