"""The operations of layers on one of several ranks, by Triton kernels; legend in `rank_ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from strobe.kernels.operands import Input
from strobe.kernels.residual import FusedResidual
from strobe.kernels.sampling import argmax
from strobe.models.linear import AnyLinear
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import Activation, ExpertsLayer, ForwardRows, Residual
from strobe.models.ops.triton_ops import TritonOps
from strobe.parallel.rank_ops import RankOps
from strobe.parallel.torch_group import TorchGroup


class RankTritonOps(RankOps, TritonOps):
    """A sum is one launch, with the residual stream and the next norm; so is the choice among the
    ranks' largest logits."""

    group: TorchGroup  # pyright: ignore[reportIncompatibleVariableOverride]

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        x = self.group.embed(ids, weight, self.first_row)
        return super().embed(ids, weight) if x is None else x

    def norm_linear(
        self, x: Residual, norm: RMSNorm, linear: AnyLinear, activation: Activation | None = None
    ) -> Tensor:
        normed = x.normed(norm.weight) if isinstance(x, FusedResidual) else None
        if normed is not None:
            return self.linear(normed, linear, activation)
        return self.summed(super().norm_linear(x, norm, linear, activation), linear)

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        if linear not in self.partial or not isinstance(x, FusedResidual):
            return super().add_linear(x, y, linear, next_norm)
        part = TritonOps.linear(self, y, linear)
        x.add_parts(self.group.add, part, next_norm)

    def experts(
        self, x: Tensor, logits: Tensor, layer: ExpertsLayer, onto: Tensor | None, rows: ForwardRows
    ) -> Tensor:
        if layer.down not in self.partial:
            return super().experts(x, logits, layer, onto=onto, rows=rows)
        part = TritonOps.experts(self, x, logits, layer, onto=None, rows=rows)
        return self.group.add(part, onto)[0]

    def best_two(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> tuple[Tensor, Tensor]:
        if not self.group.fits(x[:, :1]):
            return super().best_two(x, norm, head)
        weight, _ = self._weight(head)
        rows = Input(rows=self.norm(x, norm))
        return self._best(x, partial(self.gemms.head_argmax, rows, weight))

    def best_two_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        own = logits[:, : self.head_rows - self.first_id]
        if logits.shape[1] >= self.head_rows or not self.group.fits(own[:, :1]):
            return super().best_two_of(logits)
        return self._best(own, partial(argmax, own))

    def _best(self, rows: Tensor, find: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Choose among the ranks' largest logits. find(margins, largest): returns this rank's ids
        and fills both."""
        margins, largest = torch.empty(2, len(rows), dtype=torch.float32, device=rows.device)
        ids = find(margins=margins, largest=largest)
        return self.group.best(largest, ids, margins, self.first_id), margins
