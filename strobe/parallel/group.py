"""Exchange of tensors between ranks. Imports no torch.

Legend: R rows, C columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


STALL_SECONDS = 20.0
START_SECONDS = 900.0
"""A rank that is awaited longer has stalled; the second holds until the first step, because ranks
may take different times to load their weights."""


class RankFailed(RuntimeError):
    """A rank has ended, has stalled or is out of step; no rank can go on."""


def not_started(rank: int) -> RankFailed:
    """Make the failure of a rank that was awaited for START_SECONDS."""
    return RankFailed(f"Rank {rank} has not started within {START_SECONDS:.0f} s.")


class Group(Protocol):
    """The ranks that hold a model together. Every rank makes the same calls in the same order, and
    gets the same bits."""

    rank: int
    size: int
    failure: RankFailed | None
    """Why the group has ended."""

    def end_step(self) -> None:
        """Record that a step is launched in whole."""
        ...

    def check(self) -> None:
        """Raise RankFailed if the group has ended."""
        ...

    def close(self) -> None:
        """End the exchange, also one that a rank waits for."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors of one shape, in the order of ranks. May overwrite x."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """Join the ranks' columns: x [R, C] -> [R, size * C]."""
        ...

    def swap(self, x: Tensor) -> Tensor:
        """Exchange columns for rows: this rank's columns of all rows, x [R, C], for all columns of
        its share of the rows, [N, size * C], as `share` says."""
        ...


def share(rank: int, size: int, rows: int) -> slice:
    """Return a rank's share of the rows: as many for every rank, so that shares may overlap."""
    count = -(-rows // size)
    start = min(rank * count, rows - count)
    return slice(start, start + count)
