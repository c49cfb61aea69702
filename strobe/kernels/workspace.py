"""Intermediate results of a GEMM, between its programs."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

MIN_KEY = tl.constexpr(-(2**63))
"""Below every key of an argmax."""

MAX_MARGIN = tl.constexpr(40.0)
"""See `strobe.sampling.sampler.MAX_MARGIN`."""


class Workspace:
    """Scratch memory for the programs of a GEMM, shared by all GEMMs on one stream.

    It grows when a GEMM needs more, which must not happen while a graph is captured: run every GEMM
    once before. Outgrown tensors are kept, because captured graphs still point there.
    """

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(0, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)
        self.best = torch.full((256,), MIN_KEY.value, dtype=torch.int64, device=device)
        self.outgrown: list[Tensor] = []

    def reserve(self, sums: int, tiles: int) -> None:
        """Make room for `sums` partial sums and the counters of `tiles` tiles."""
        if sums > self.partials.numel():
            self._grow()
            self.partials = torch.empty(sums, device=self.best.device)
        if tiles > self.arrived.numel():
            self._grow()
            self.arrived = torch.zeros(tiles, dtype=torch.int32, device=self.best.device)

    def _grow(self) -> None:
        if self.best.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "The GEMM workspace is too small to capture a graph; run each GEMM once before."
            )
        self.outgrown += [self.partials, self.arrived]
