"""A request's hold on pages: reserve -> commit | rollback -> release. Imports no torch.

       committed            open reservations, oldest first
    |---- length ----|---- n1 ----|---- n2 ----|
    |================ pages cover all of it (up to `limit`) ===|

commit(rows <= n1) moves the first `rows` positions of the oldest reservation into length and drops
the rest of it; later reservations move down. rollback() drops the newest reservation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from strobe.kv.pages import PagePool
from strobe.request import PageKeys


class LeaseError(RuntimeError):
    """A lease was used out of order, which is a bug in the engine."""


class Lease:
    """Pages of one sequence.

    limit: the maximum number of positions that need pages. keys: content keys of its first pages,
    extended as needed. reserved: positions of each open reservation, oldest first."""

    def __init__(self, pool: PagePool, limit: int, keys: PageKeys | None = None):
        self.pool = pool
        self.limit = limit
        self.keys = PageKeys() if keys is None else keys
        self.pages: list[int] = []
        self.length = 0
        self.released = False
        self.observed = False
        """Whether drafters in shadow mode observe all its positions, adopted ones included."""
        self.reserved: deque[int] = deque()
        self._published = 0

    @property
    def open(self) -> int:
        """Positions in open reservations."""
        return sum(self.reserved)

    def pages_for(self, count: int) -> int:
        """Return how many pages a further reservation of `count` positions would add."""
        covered = len(self.pages) * self.pool.page_size
        end = self.length + sum(self.reserved) + count
        if end <= covered:
            return 0
        return max(0, -(-min(end, self.limit) // self.pool.page_size) - len(self.pages))

    def commit(self, rows: int) -> None:
        """Keep the first `rows` positions of the oldest open reservation."""
        self._require_open("commit")
        count = self.reserved[0]
        if not 0 <= rows <= count:
            raise LeaseError(f"commit({rows}) exceeds the reservation of {count} positions")
        self.reserved.popleft()
        self.length += rows

    def rollback(self) -> None:
        """Drop the newest open reservation and the pages only it needs."""
        self._require_open("rollback")
        self.reserved.pop()
        end = min(self.length + self.open, self.limit)
        keep = -(-end // self.pool.page_size)
        self.pool.drop(self.pages[keep:])
        del self.pages[keep:]

    def release(self) -> None:
        """Give back all pages, once, after every reservation has ended."""
        if self.released or self.reserved:
            raise LeaseError("release() comes once, after every reservation has ended")
        self.pool.drop(self.pages)
        self.released = True
        self.pages = []

    def abandon(self) -> None:
        """Drop all reservations and pages of a lease whose admission failed."""
        while self.reserved:
            self.rollback()
        self.release()

    def adopt(self, tokens: Sequence[int], max_length: int | None = None) -> int:
        """Share cached pages that hold a prefix of `tokens`; return the number of positions.

        The prefix leaves out at least the last token, whose logits are needed. max_length: whole
        pages that it has at most.
        """
        if self.pages or self.length or self.reserved or self.released:
            raise LeaseError("adopt() comes before the first reservation")
        keys = self.pool.extend(self.keys, tokens)
        if max_length is not None:
            keys = keys[: max_length // self.pool.page_size]
        for key in keys:
            page = self.pool.lookup(key, observed=self.observed)
            if page is None:
                break
            self.pool.share(page)
            self.pages.append(page)
        self._published = len(self.pages)
        self.length = self._published * self.pool.page_size
        return self.length

    def publish(self, tokens: Sequence[int]) -> None:
        """Add full committed pages to the prefix cache; `tokens`: the sequence's, as far as
        known."""
        size = self.pool.page_size
        full = min(self.length, len(tokens)) // size
        if full <= self._published:
            return
        self.pool.extend(self.keys, tokens)
        for i in range(self._published, full):
            own = tokens[i * size : (i + 1) * size]
            parent = self.keys[i - 1] if i else None
            self.pool.publish(
                self.pages[i],
                key=self.keys[i],
                tokens=own,
                parent=parent,
                root=self.keys.root,
                observed=self.observed,
            )
        self._published = full

    def _require_open(self, call: str) -> None:
        if not self.reserved:  # always so after release()
            raise LeaseError(f"{call}() needs an open reservation")


def reserve_all(requests: Sequence[tuple[Lease, int]]) -> bool:
    """Reserve (lease, positions) for all requests; return False and change nothing if pages run
    out. Each lease may appear once."""
    if not requests:
        return True
    pool = requests[0][0].pool
    for lease, count in requests:
        if lease.released or count < 0:
            raise LeaseError(f"reserve({count}) on a lease that is released, or below zero")
    page_counts = [lease.pages_for(count) for lease, count in requests]
    if sum(page_counts) > pool.available:
        return False
    for (lease, count), pages in zip(requests, page_counts, strict=True):
        lease.reserved.append(count)  # first: a rollback undoes it also if allocating fails
        if pages:
            lease.pages += pool.allocate(pages)
    return True
