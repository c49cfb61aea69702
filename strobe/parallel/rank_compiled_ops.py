"""The operations of layers on one of several ranks, in compiled C; legend in `rank_ops.py`."""

from __future__ import annotations

from torch import Tensor

from strobe.models.linear import AnyLinear
from strobe.models.modules import RMSNorm
from strobe.models.ops.compiled_ops import CompiledOps
from strobe.models.ops.torch_ops import Residual
from strobe.parallel.rank_ops import RankOps


class RankCompiledOps(RankOps, CompiledOps):
    """Compiled operations between products whose parts are added up."""

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        # Not `RankOps.add_linear`: `CompiledOps.add_linear` calls `linear`, which adds up parts.
        CompiledOps.add_linear(self, x, y, linear, next_norm)
