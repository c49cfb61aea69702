"""What GEMMs leave: for each other's programs, and for the GEMM behind them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

LEAST = tl.constexpr(-(2**63))
"""Below every key of an argmax."""

MAX_MARGIN = tl.constexpr(40.0)
"""As `strobe.sampling.sampler` has it."""


class Scaled(NamedTuple):
    """x in front of its norm, as a GEMM left it: `data` [M, K] is x times the norm's weight, not
    yet divided by x's root mean square, which follows from `sums` [M, parts] of squares in fp32."""

    data: Tensor
    sums: Tensor


class Workspace:
    """What programs of one GEMM leave for each other. One per stream: GEMMs share it in turn.

    Grows when a GEMM needs more, which must not happen while a graph is captured: run every
    GEMM once before. What it outgrows is kept, because captured graphs still point there.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(0, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self.best = torch.full((256,), LEAST.value, dtype=torch.int64, device=device)
        self.outgrown: list[Tensor] = []

    def reserve(self, sums: int, tiles: int) -> None:
        """Room for `sums` partial sums and the counters of `tiles` tiles."""
        if sums > self.partials.numel():
            self._grow()
            self.partials = torch.empty(sums, device=self.best.device)
        if tiles > self.arrived.numel():
            self._grow()
            self.arrived = torch.zeros(tiles, dtype=torch.int32, device=self.best.device)

    def _grow(self) -> None:
        if self.best.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("run each GEMM once before its graph is captured: no workspace yet")
        self.outgrown += [self.partials, self.arrived]
