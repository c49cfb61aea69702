"""The tensors of `DecodeState`, as a step's operations read and write them.

Legend: N slots, the spare one included.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from strobe.runner.layout import Int64Array


class HostSlotTables(NamedTuple):
    """Tables as NumPy arrays of the same memory."""

    cursor: Int64Array
    tables: tuple[Int64Array, ...]


@dataclass(frozen=True, eq=False)
class SlotTables:
    """cursor [N, 2]: number of positions with K/V, and the newest token, which has none yet. tables
    [groups, N, columns]: by page group, added to a position in column position // page_size to get
    its slot in the KV stores. limit: no draft is accepted at or after this position."""

    cursor: Tensor
    tables: Tensor
    page_size: int
    limit: int

    @functools.cached_property
    def on_host(self) -> HostSlotTables:
        """The tables as NumPy arrays; on a CPU only."""
        return HostSlotTables(cursor=self.cursor.numpy(), tables=tuple(self.tables.numpy()))
