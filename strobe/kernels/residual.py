"""The residual stream of one forward, in one buffer that linear layers add to.

Legend: T rows, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.kernels.linear import Gemms, Scaled, Weight


class FusedResidual:
    """`value` [T, H] is overwritten by each sum; captured features are written where they belong.
    Whoever puts another tensor in the place of `value` gives it up to the stream.

    capture: counts of layers done, in the features' order, side by side.
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
        self._place: Tensor | None = None  # of the feature that the layer ends with
        self._next_norm: Tensor | None = None  # the weight of the norm that reads behind the layer
        self._kept: Tensor | None = None  # the last feature, which must stay as it is
        self._left: tuple[Tensor, Tensor, Scaled] | None = None

    def begin(self, done: int, next_norm: Tensor | None) -> None:
        """Before the layer with which `done` are done. next_norm: the weight of the norm behind
        it."""
        self._place, self._next_norm = self._places.get(done), next_norm

    def end(self, done: int) -> None:
        """After that layer."""
        if self._place is not None and self.value is not self._place:
            self._place.copy_(self.value)

    def features(self) -> Tensor | None:
        return self._features

    def add_linear(
        self,
        gemms: Gemms,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        next_norm: Tensor | None,
    ) -> None:
        """Add x Wᵀ + bias. next_norm: the weight of the norm that reads next; None at a layer's
        end."""
        out = self.value
        if next_norm is None and self._place is not None:
            out = self._kept = self._place
        elif out is self._kept:
            out = torch.empty_like(out, memory_format=torch.contiguous_format)
        next_norm, scaled = self._next_norm if next_norm is None else next_norm, None
        if next_norm is None:
            gemms.linear(x, weight, bias=bias, residual=self.value, out=out)
        else:
            _, scaled = gemms.add(x, weight, self.value, bias=bias, next_norm=next_norm, out=out)
        self.value = out
        self._left = None if scaled is None or next_norm is None else (out, next_norm, scaled)

    def scaled(self, norm: Tensor) -> Scaled | None:
        """The stream as the norm of this weight wants it, where the sum before left it so."""
        if self._left is None or self._left[0] is not self.value or self._left[1] is not norm:
            return None
        return self._left[2]
