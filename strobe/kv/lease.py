"""A request's hold on pages: reserve -> commit | rollback -> release. Imports no torch.

       committed            open reservations, oldest first
    |---- length ----|---- n1 ----|---- n2 ----|
    |================ pages cover all of it (up to `limit`) ===|
    |---- returned ----|=== pages of a group with a window =====|

commit(rows <= n1) moves the first `rows` positions of the oldest reservation into length and drops
the rest of it; later reservations move down. rollback() drops the newest reservation. give_back()
drops the pages that no row after `length` sees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from strobe.kv.pages import PagePool, max_held
from strobe.request import PageKeys

GIVEN_BACK = 0
"""Stands in a table for a page that was returned or never needed: the reserved page."""


class LeaseError(RuntimeError):
    """A lease was used out of order, which is a bug in the engine."""


class Lease:
    """Pages of one sequence, in all page groups of a pool.

    limit: the maximum number of positions that need pages. keys: content keys of its first pages,
    extended as needed. tables: by page group, its pages by column; some of the first ones may be
    GIVEN_BACK. reserved: positions of each open reservation, oldest first; open: their sum.
    publish_from: the length at which a further page is full."""

    __slots__ = (
        "_expected",
        "_first_held",
        "_published",
        "keys",
        "length",
        "limit",
        "margin",
        "observed",
        "open",
        "pool",
        "publish_from",
        "released",
        "reserved",
        "tables",
    )

    def __init__(
        self, pool: PagePool, limit: int, keys: PageKeys | None = None, *, margin: int = 0
    ):
        """margin: positions before `length` from which the sequence may have to begin again."""
        self.pool = pool
        self.limit = limit
        self.margin = margin
        self.keys = PageKeys() if keys is None else keys
        self.tables: list[list[int]] = [[] for _ in pool.groups]
        self.length = 0
        self.released = False
        self.observed = False
        """Whether drafters in shadow mode observe all its positions, adopted ones included."""
        self.reserved: deque[int] = deque()
        self.open = 0
        self._published = 0
        self.publish_from = pool.page_size
        self._first_held = [0] * len(pool.groups)
        self._expected: set[int] = set()

    @property
    def num_columns(self) -> int:
        """Columns of the tables."""
        return len(self.tables[0])

    def first_held(self, group: int) -> int:
        """Return the first column of a group's table whose page was not returned."""
        return self._first_held[group]

    def pages_for(self, count: int) -> int:
        """Return the number of columns that a further reservation of `count` positions adds."""
        columns = len(self.tables[0])
        size = self.pool.page_size
        end = self.length + self.open + count
        if end <= columns * size:
            return 0
        return max(0, -(-min(end, self.limit) // size) - columns)

    def fits(self, count: int, step: int) -> bool:
        """Whether there are pages for `count` further positions, reserved up to `step` at a time. A
        group with a window needs pages for its window and one step."""
        columns = self.pages_for(count)
        for i, group in enumerate(self.pool.groups):
            needed = columns
            if group.window is not None:
                limit = max_held(group.window + self.margin, step, group.page_size)
                held = self.num_columns - self._first_held[i]
                needed = min(columns, max(limit - held, 0))
            if needed > group.available:
                return False
        return True

    def commit(self, rows: int) -> None:
        """Keep the first `rows` positions of the oldest open reservation."""
        if not self.reserved:  # always so after release()
            raise LeaseError("commit() needs an open reservation")
        count = self.reserved[0]
        if not 0 <= rows <= count:
            raise LeaseError(f"commit({rows}) exceeds the reservation of {count} positions")
        self.reserved.popleft()
        self.open -= count
        self.length += rows

    def rollback(self) -> None:
        """Drop the newest open reservation and the pages only it needs."""
        if not self.reserved:
            raise LeaseError("rollback() needs an open reservation")
        self.open -= self.reserved.pop()
        end = min(self.length + self.open, self.limit)
        keep = -(-end // self.pool.page_size)
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            group.drop(table[keep:])
            del table[keep:]

    def expect(self, borders: Iterable[int]) -> None:
        """Expect that other sequences, or this one, begin at these positions: pages before them
        are not evicted first once they are returned."""
        self._expected.update(borders)

    def give_back(self) -> None:
        """Give back the pages of groups with a window that no row sees any more, whether the
        sequence goes on or begins again `margin` positions back, at the border of a page."""
        if self.released:
            return
        size = self.pool.page_size
        border = max(self.length - self.margin, 0) // size * size
        for i, group in enumerate(self.pool.groups):
            first = group.first_seen(border)
            if first <= self._first_held[i]:
                continue
            table = self.tables[i]
            for column in range(self._first_held[i], first):
                useful = any(
                    group.first_seen(expected) <= column < expected // size
                    for expected in self._expected
                )
                group.drop([table[column]], evict_first=not useful)
                table[column] = GIVEN_BACK
            self._first_held[i] = first

    def release(self) -> None:
        """Give back all pages, once, after every reservation has ended. Interrupted, it can be
        called again, and goes on with the next group."""
        if self.released or self.reserved:
            raise LeaseError("release() comes once, after every reservation has ended")
        for i, group in enumerate(self.pool.groups):
            group.drop(self.tables[i][self._first_held[i] :])
            self.tables[i] = []
        self.released = True

    def abandon(self) -> None:
        """Drop all reservations and pages of a lease whose admission failed."""
        while self.reserved:
            self.rollback()
        self.release()

    def adopt(self, tokens: Sequence[int], max_length: int | None = None) -> int:
        """Share cached pages that hold a prefix of `tokens`; return the number of positions.

        The prefix never includes the last token, whose logits are needed. max_length: maximum of
        positions, rounded down to whole pages.
        """
        if self.num_columns or self.length or self.reserved or self.released:
            raise LeaseError("adopt() comes before the first reservation")
        keys = self.pool.usable_keys(self.keys, tokens)
        size = self.pool.page_size
        usable = keys if max_length is None else keys[: max_length // size]
        count = self.pool.num_usable(usable, observed=self.observed)
        for i, group in enumerate(self.pool.groups):
            first = group.first_seen(count * size)
            for key in usable[first:count]:
                page = group.lookup(key, observed=self.observed)
                assert page is not None
                group.share(page)
                self.tables[i].append(page)
            self.tables[i][:0] = [GIVEN_BACK] * first
            self._first_held[i] = first
        if self.pool.has_windows:
            num_shared = self.pool.num_shared(keys, observed=self.observed)
            self.expect(n * size for n in (count, num_shared, len(keys)))
        self._set_published(count)
        self.length = count * size
        return self.length

    def assume(self, count: int) -> int:
        """Take pages for the first `count` positions, in whole pages, as if they held K/V, and
        publish none of them. Return the number of positions, 0 if pages of any group run out."""
        columns = count // self.pool.page_size
        firsts = [group.first_seen(columns * self.pool.page_size) for group in self.pool.groups]
        groups = list(zip(self.pool.groups, firsts, strict=True))
        if any(columns - first > group.available for group, first in groups):
            return 0
        self.tables = [
            [GIVEN_BACK] * first + group.allocate(columns - first) for group, first in groups
        ]
        self._first_held = firsts
        self._set_published(columns)
        self.length = columns * self.pool.page_size
        return self.length

    def publish(self, tokens: Sequence[int]) -> None:
        """Add full committed pages to the prefix cache; `tokens`: the sequence's, as far as
        known."""
        size = self.pool.page_size
        full = min(self.length, len(tokens)) // size
        if full <= self._published:
            return
        self.pool.extend(self.keys, tokens)
        for group, table in zip(self.pool.groups, self.tables, strict=True):
            for i in range(self._published, full):
                if table[i] == GIVEN_BACK:
                    continue
                group.publish(
                    table[i],
                    key=self.keys[i],
                    tokens=tokens[i * size : (i + 1) * size],
                    parent=self.keys[i - 1] if i else None,
                    root=self.keys.root,
                    observed=self.observed,
                )
        self._set_published(full)

    def _set_published(self, count: int) -> None:
        self._published = count
        self.publish_from = (count + 1) * self.pool.page_size


def reserve_all(requests: Sequence[tuple[Lease, int]]) -> bool:
    """Reserve (lease, positions) for all requests; return False and change nothing if pages of any
    group run out. Each lease may appear once."""
    if not requests:
        return True
    pool = requests[0][0].pool
    growing: list[tuple[Lease, int]] = []
    """Leases that need further pages, and how many."""
    total = 0
    for lease, count in requests:
        if lease.released or count < 0:
            raise LeaseError(f"reserve({count}) on a lease that is released, or below zero")
        added = lease.pages_for(count)
        if added:
            growing.append((lease, added))
            total += added
    if any(total > group.available for group in pool.groups):
        return False
    for lease, count in requests:  # first: rollbacks undo them also if allocating fails
        lease.reserved.append(count)
        lease.open += count
    for lease, added in growing:
        for group, table in zip(pool.groups, lease.tables, strict=True):
            table += group.allocate(added)
    return True
