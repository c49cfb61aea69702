"""The index of kept states of recurrent layers; the tensors are in kv.states. Imports no torch.

A state belongs to a border: a multiple of `interval` positions, which is also a multiple of the
page size. Its key is the page's before the border, which stands for all tokens up to it. So
a state stays right as long as it is kept, also when its pages were evicted and computed again.

    free ----take----> being written ----publish----> kept (in LRU order)
                       being written ----give_up----> free
    kept ----take, when free runs out----> being written
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CHUNK = 64
"""Rows that a recurrent layer computes at once. A span that begins at a multiple of it has the same
chunks as one that begins before it, so that a kept state leads to the same bits."""

LONG_PROMPT = 4096
"""Minimum of positions between the states that are kept within a prompt."""


class KeptState(NamedTuple):
    """A kept state: its row, and the positions in it."""

    row: int
    length: int


@dataclass
class SequenceStates:
    """A running request's kept states."""

    borders: list[int] = field(default_factory=list[int])
    """Positions of its prompt where states are still to be kept, rising."""
    answer_border: int = 0
    """The next border in its answer."""
    row: int | None = None
    """The row for the state at the next border, once a step may have passed that."""
    rows_in_flight: dict[int, int] = field(default_factory=dict[int, int])
    """The rows for states at earlier borders of its prompt, by border, until their steps are
    committed."""
    answer_key: bytes | None = None
    """The border in its answer whose state is kept."""
    revived: KeptState | None = None
    """The kept state that it begins from, until its first step is committed."""

    @property
    def next_border(self) -> int:
        return self.borders[0] if self.borders else self.answer_border


def border_interval(page_size: int) -> int:
    """Return the positions between two borders: whole chunks and whole pages."""
    return math.lcm(CHUNK, page_size)


def return_margin(page_size: int) -> int:
    """Return the positions before a sequence's length where the last state of its answer may be: it
    moves along once the next border has surely been passed."""
    return 2 * border_interval(page_size)


class KeptStates:
    """A fixed number of rows for states, and an index of the complete ones.

    has_page: whether the page with a key is still in the prefix cache."""

    def __init__(
        self,
        num_rows: int,
        page_size: int,
        *,
        has_page: Callable[[bytes], bool] = lambda key: True,
    ):
        self.page_size = page_size
        self.interval = border_interval(page_size)
        self.num_rows = num_rows
        self.has_page = has_page
        self._free = list(range(num_rows - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._written: dict[int, bytes | None] = {}
        self._readers: dict[int, int] = {}
        self.on_evicted: Callable[[int, bytes], None] = lambda row, key: None
        """Called with a state's row and key before the row is overwritten."""
        self.on_stored: Callable[[bytes], None] = lambda key: None
        self.on_removed: Callable[[bytes], None] = lambda key: None
        """Called with a key that is indexed, or not any more."""

    def last_border(self, position: int) -> int:
        """Return the last border at or before a position."""
        return position // self.interval * self.interval

    def key_before(self, border: int, keys: Sequence[bytes]) -> bytes:
        """Return the key of a border. keys: of a sequence's pages."""
        return keys[border // self.page_size - 1]

    def find(self, keys: Sequence[bytes]) -> KeptState | None:
        """Return the longest state of the pages with these keys, or None if there is none."""
        border = self.last_border(len(keys) * self.page_size)
        while border > 0:
            key = self.key_before(border, keys)
            row = self._kept.get(key)
            if row is not None:
                self._kept.move_to_end(key)
                return KeptState(row=row, length=border)
            border -= self.interval
        return None

    def borders(self, keys: Sequence[bytes], start: int, end: int, num_cached: int) -> list[int]:
        """Return the positions where a prompt's states are worth keeping, rising: the last border,
        which the next turn of a chat shares; the one after which other prompts went on differently;
        and a few in a long prompt. start, end: the positions to compute. num_cached: positions
        whose pages are cached, with or without a state."""
        spacing = max(LONG_PROMPT, end // max(self.num_rows // 4, 1))
        wanted = {self.last_border(end - 1), self.last_border(num_cached)}
        wanted.update(map(self.last_border, range(spacing, end, spacing)))
        return [
            border
            for border in sorted(wanted)
            if border > start and not self.is_kept(self.key_before(border, keys))
        ]

    def is_kept(self, key: bytes) -> bool:
        """Whether the state of this border is kept or being written."""
        return key in self._kept or key in self._written.values()

    def row_of(self, key: bytes) -> int | None:
        """Return the row of a kept state, or None if it is not kept."""
        return self._kept.get(key)

    def next_evicted(self) -> tuple[int, bytes] | None:
        """Return the row and key of the state that `take` would evict, or None if it would not."""
        key = None if self._free else self._oldest()
        return None if key is None else (self._kept[key], key)

    def hold(self, row: int) -> None:
        """Keep a row from being overwritten until `release`."""
        self._readers[row] = self._readers.get(row, 0) + 1

    def release(self, row: int) -> None:
        """End a `hold`."""
        self._readers[row] -= 1
        if not self._readers[row]:
            del self._readers[row]

    def take(self, key: bytes | None = None, *, before: bytes | None = None) -> int | None:
        """Return a row for a state to be written, or None if all are held. If no row is free, the
        state of the border `before` is evicted, else one whose page was evicted, else the first in
        LRU order. key: its border, if known."""
        if not self._free:
            self.drop(before)
        if not self._free and not self._evict():
            return None
        row = self._free.pop()
        self._written[row] = key
        return row

    def publish(self, row: int, key: bytes) -> None:
        """Index a state that has been written. key: its border."""
        del self._written[row]
        if key in self._kept:
            self._free.append(row)
        else:
            self._kept[key] = row
            self.on_stored(key)

    def give_up(self, row: int) -> None:
        """Free a row whose state was not written."""
        del self._written[row]
        self._free.append(row)

    def drop(self, key: bytes | None) -> None:
        """Free the row of a border, if it has one that nobody holds."""
        if key is not None and self._kept.get(key) not in (None, *self._readers):
            self._free.append(self._kept.pop(key))
            self.on_removed(key)

    def clear(self) -> None:
        """Free all rows that nobody holds."""
        for key in list(self._kept):
            self.drop(key)

    def _evict(self) -> bool:
        key = self._oldest()
        if key is None:
            return False
        if self.has_page(key):
            self.on_evicted(self._kept[key], key)
        self.drop(key)
        return True

    def _oldest(self) -> bytes | None:
        """Return the key of the state to evict, if any has no hold: one whose page was evicted,
        else the first in LRU order."""
        unheld = [key for key, row in self._kept.items() if row not in self._readers]
        without_page = (key for key in unheld if not self.has_page(key))
        return next(without_page, unheld[0] if unheld else None)
