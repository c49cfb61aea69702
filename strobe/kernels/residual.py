"""The residual stream of one forward, which linear layers add to in place.

Legend: T rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strobe.kernels.linear import AnyWeight, Gemms
from strobe.kernels.operands import Epilogue, Input, RowNorm, Scaled
from strobe.kernels.reference_residual import Norm


class FusedResidual:
    """A residual stream `value` [T, H], overwritten by each sum. Sums at captured layers go
    directly into the features. A tensor assigned to `value` belongs to the stream.

    capture: numbers of layers done, in the order in which the features are concatenated.
    """

    def __init__(self, value: Tensor, capture: tuple[int, ...] = ()):
        self.value = value
        self._features: Tensor | None = None
        self._places: dict[int, Tensor] = {}
        if capture:
            features = value.new_empty(value.shape[0], len(capture) * value.shape[1])
            self._places = dict(zip(capture, features.split(value.shape[1], 1), strict=True))
            self._features = features
        if 0 in self._places:
            self._places[0].copy_(value)
        self._place: Tensor | None = None  # where the current layer's feature is written
        self._next_norm: Norm | None = None  # after the current layer
        self._last_feature: Tensor | None = None  # must not be overwritten
        self._prepared: tuple[Tensor, Tensor, Scaled | Tensor] | None = None

    def begin(self, done: int, next_norm: Norm | None) -> None:
        """Begin a layer, after which `done` layers are done. next_norm: the norm after it."""
        self._place = self._places.get(done)
        self._next_norm = next_norm

    def end(self, done: int) -> None:
        """End the layer."""
        if self._place is not None and self.value is not self._place:
            self._place.copy_(self.value)

    def features(self) -> Tensor | None:
        return self._features

    def add_linear(
        self,
        gemms: Gemms,
        x: Tensor,
        weight: AnyWeight,
        bias: Tensor | None,
        next_norm: Norm | None,
    ) -> None:
        """Add x Wᵀ + bias. next_norm: the norm that reads the sum; None at the end of a layer."""
        out, next_norm = self._begin_sum(next_norm)
        epilogue = Epilogue(
            bias=bias,
            residual=self.value,
            next_norm=None if next_norm is None else next_norm.weight,
            out=out,
        )
        _, scaled = gemms.add(Input(rows=x), weight, epilogue)
        self._end_sum(out, next_norm, scaled)

    def add_parts(
        self,
        add: Callable[..., tuple[Tensor, Tensor | None]],
        part: Tensor,
        next_norm: Norm | None,
    ) -> None:
        """Add the sum of the ranks' parts [T, H]. add: as `RankMemory.add`. next_norm: as for
        `add_linear`."""
        out, next_norm = self._begin_sum(next_norm)
        norm = None if next_norm is None else RowNorm(next_norm.weight, next_norm.eps)
        _, normed = add(part, self.value, next_norm=norm, out=out)
        self._end_sum(out, next_norm, normed)

    def _begin_sum(self, next_norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """Return the tensor to write, and the norm that reads it."""
        out = self.value
        if next_norm is None and self._place is not None:
            out = self._last_feature = self._place
        elif out is self._last_feature:
            out = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out, self._next_norm if next_norm is None else next_norm

    def _end_sum(
        self, out: Tensor, next_norm: Norm | None, prepared: Scaled | Tensor | None
    ) -> None:
        self.value = out
        self._prepared = None
        if next_norm is not None and prepared is not None:
            self._prepared = out, next_norm.weight, prepared

    def scaled(self, norm: Tensor) -> Scaled | None:
        """Return the stream as the last sum prepared it for the norm of this weight, or None."""
        prepared = self._prepared_for(norm)
        return prepared if isinstance(prepared, Scaled) else None

    def normed(self, norm: Tensor) -> Tensor | None:
        """Return the stream after the norm of this weight if the last sum computed it."""
        prepared = self._prepared_for(norm)
        return prepared if isinstance(prepared, Tensor) else None

    def _prepared_for(self, norm: Tensor) -> Scaled | Tensor | None:
        if self._prepared is None or self._prepared[0] is not self.value:
            return None
        return self._prepared[2] if self._prepared[1] is norm else None
