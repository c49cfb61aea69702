"""The residual stream of one forward, in plain torch.

Legend: T rows, H hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Norm(Protocol):
    """An RMSNorm."""

    eps: float

    @property
    def weight(self) -> Tensor:
        """[H]."""
        ...

    def __call__(self, x: Tensor, /) -> Tensor:
        """x [T, H] -> [T, H]."""
        ...


class ResidualStream:
    """The residual stream of one forward, `value` [T, H], and the features captured from it. Layers
    add to it through ops, or assign a new value; no tensor is overwritten."""

    def __init__(self, value: Tensor, capture: tuple[int, ...]):
        self.value = value
        self.capture = capture
        self._captured = {0: value} if 0 in capture else {}

    def begin(self, done: int, next_norm: Norm | None) -> None:
        """Start the layer after `done` finished ones. next_norm: the norm that reads the stream
        after it; None for the last layer."""

    def end(self, done: int) -> None:
        """End the layer after which `done` are finished."""
        if done in self.capture:
            self._captured[done] = self.value

    def features(self) -> Tensor | None:
        """Return the captured features [T, n * H]; None if nothing is captured."""
        return torch.cat([self._captured[k] for k in self.capture], -1) if self.capture else None
