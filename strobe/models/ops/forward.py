"""What one forward carries from layer to layer: the residual stream, and what its rows are.

Legend: T rows, H hidden size, Hq / Hkv query and key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strobe.models.modules import RMSNorm, Rope, RotaryTable

Attend = Callable[..., Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq * D]; sinks [Hq] come fifth, to
layers that have some.

Stores the rows' keys and values and attends over what each row may see. Models know nothing else
about caches, masks or batches: the engine passes one of these, training passes another.
"""


class Rows:
    """The rows of one forward. tables: the rotary table of each layer with attention; attend: any
    `Attend`, with more methods where recurrent layers or kernels need them."""

    __slots__ = ("_angles", "attend", "positions", "tables")

    def __init__(self, positions: Tensor, attend: Any, tables: Sequence[RotaryTable]):
        self.positions, self.attend, self.tables = positions, attend, tables
        self._angles: dict[RotaryTable, Rope] = {}

    def angles(self, layer: int) -> Rope:
        """By which the layer rotates; computed once for all layers of one table."""
        table = self.tables[layer]
        found = self._angles.get(table)
        if found is None:
            found = self._angles[table] = table(self.positions)
        return found


class Residual:
    """The residual stream of one forward, `value` [T, H], and the features captured from it.

    Layers add to it through ops only. capture: counts of layers done, in the features' order.
    """

    __slots__ = ("_captured", "capture", "value")

    def __init__(self, value: Tensor, capture: tuple[int, ...] = ()):
        self.value, self.capture = value, capture
        self._captured = {0: value} if 0 in capture else {}

    def begin(self, done: int, norm: RMSNorm | None) -> None:
        """Before the layer with which `done` are done. norm: what reads the stream behind it; None
        behind the last."""

    def end(self, done: int) -> None:
        """After that layer."""
        if done in self.capture:
            self._captured[done] = self.value

    def features(self) -> Tensor | None:
        """[T, len(capture) * H], side by side; None where nothing is captured."""
        return torch.cat([self._captured[k] for k in self.capture], -1) if self.capture else None
