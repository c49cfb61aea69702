"""What one forward knows of its rows: where they stand, how they are rotated, how they attend.

Legend: T rows, Hq / Hkv query and key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from strobe.models.modules import Rope, RotaryTable

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
