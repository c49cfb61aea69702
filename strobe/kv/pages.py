"""Logical pages of the KV cache and their holders; the tensors are in kv.store. Imports no torch.

    free ----allocate----> held ----drop, not published----> free
                           held ----drop, published--------> cached (K/V kept, in LRU order)
    cached ----hit-------> held                cached ----allocate, when free runs out----> held

Page 0 is reserved: padding and rows beyond the context are written there and never read.

A page group is the layers, of target and drafters, that need the same positions: all of them, or
those within a window. Each group has a pool and a table per sequence:

    all positions   |============================================| length
    a window           returned          |==== first_seen to here =|
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from strobe.request import PageKeys

OnStored = Callable[[bytes, bytes | None, bytes, Sequence[int]], None]
"""(key, key of the page before or None, key before the first page, tokens) of an indexed page."""


def max_held(window: int, rows: int, page_size: int) -> int:
    """Return the maximum of pages that a sequence holds in a group with a window, while `rows` of
    its rows are in flight."""
    return -(-(window + rows) // page_size) + 2


class PagePool:
    """A fixed number of pages of one page group with reference counts, and an index of full pages
    by content. The first group's pool knows the other groups' pools."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        window: int | None = None,
        others: Sequence[PagePool] = (),
    ):
        """num_pages: including the reserved page. window: positions that the group's layers see, a
        row's own included; None: all. others: the pools of further groups, each with a window.
        on_stored, on_removed: called when a page is indexed or is not any more."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"A pool of {num_pages} pages of {page_size} tokens holds nothing; it needs a "
                "reserved page, one more, and pages of at least one token."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.window = window
        self.groups: tuple[PagePool, ...] = (self, *others)
        self.has_windows = any(group.window is not None for group in self.groups)
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self._observed: set[int] = set()
        """Indexed pages with every drafter's context, in shadow mode."""
        self._unneeded: set[int] = set()
        """Cached pages that no hit is expected to need."""
        self.on_stored: OnStored = lambda key, parent, root, tokens: None
        self.on_removed: Callable[[bytes], None] = lambda key: None
        self.on_evicted: Callable[[int, bytes], None] = lambda page, key: None
        """Called with a cached page that a hit may need, and its key, before it is overwritten."""

    @property
    def available(self) -> int:
        """Pages that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def capacity(self) -> int:
        """All pages but the reserved one."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages with one holder each; the caller has checked `available`."""
        assert 0 <= count <= self.available, (count, self.available)
        pages: list[int] = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, key = self._cached.popitem(last=False)
                del self._page_of[key], self._key_of[page]
                self.on_removed(key)
                if page not in self._unneeded:
                    self.on_evicted(page, key)
            self._unneeded.discard(page)
            self._holders[page] = 1
            self._observed.discard(page)
            pages.append(page)
        return pages

    def next_evicted(self, count: int) -> list[tuple[int, bytes]]:
        """Return the cached pages that allocating `count` pages would evict, with their keys: those
        that a hit may need."""
        evicted = islice(self._cached.items(), max(count - len(self._free), 0))
        return [entry for entry in evicted if entry[0] not in self._unneeded]

    def share(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        self._cached.pop(page, None)
        self._unneeded.discard(page)
        self._holders[page] = self._holders.get(page, 0) + 1

    def drop(self, pages: Sequence[int], *, evict_first: bool = False) -> None:
        """Remove one holder from each page; without holders it is free, or cached if published.
        evict_first: evict these before all other cached pages."""
        for page in reversed(pages):
            assert self._holders.get(page, 0) > 0, f"page {page} is not held"
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._key_of:
                    self._cached[page] = self._key_of[page]
                    self._cached.move_to_end(page, last=not evict_first)
                    if evict_first:
                        self._unneeded.add(page)
                else:
                    self._free.append(page)

    def key(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the content key of a full page: a hash of its tokens and all tokens before."""
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def extend(self, keys: PageKeys, tokens: Sequence[int]) -> None:
        """Append the keys of a sequence's further full pages to `keys`."""
        size = self.page_size
        for end in range((len(keys) + 1) * size, len(tokens) + 1, size):
            keys.append(self.key(keys[-1] if keys else keys.root, tokens[end - size : end]))

    def usable_keys(self, keys: PageKeys, tokens: Sequence[int]) -> list[bytes]:
        """Extend `keys`, and return those of the pages that a prefix hit may cover; it never covers
        the last token."""
        self.extend(keys, tokens)
        return keys[: (len(tokens) - 1) // self.page_size]

    def publish(
        self, page: int, key: bytes, tokens: Sequence[int] = (), parent: bytes | None = None,
        root: bytes = b"", observed: bool = False,
    ) -> None:  # fmt: skip
        """Index a full, committed page for later requests; the first page with a key keeps it,
        unless this one has the drafters' context, too. tokens, parent, root: for `on_stored`.
        observed: whether drafters in shadow mode have observed all its positions."""
        assert self._holders.get(page, 0) > 0, f"page {page} is not held"
        if page in self._key_of:
            return
        previous = self._page_of.get(key)
        if previous is None:
            self.on_stored(key, parent, root, tokens)
        elif observed and previous not in self._observed:
            del self._key_of[previous]
            if self._cached.pop(previous, None) is not None:
                self._free.append(previous)
        else:
            return
        self._page_of[key] = page
        self._key_of[page] = key
        if observed:
            self._observed.add(page)

    def lookup(self, key: bytes, *, observed: bool = False) -> int | None:
        """Return the page with this content, or None if there is none or it was evicted. observed:
        only a page with the drafters' context, in shadow mode."""
        page = self._page_of.get(key)
        return None if observed and page not in self._observed else page

    def num_cached(self, keys: Sequence[bytes], *, observed: bool = False) -> int:
        """Return the number of leading pages with these keys that are indexed. observed: see
        `lookup`."""
        pages = (self.lookup(key, observed=observed) for key in keys)
        return next((i for i, page in enumerate(pages) if page is None), len(keys))

    def first_seen(self, position: int) -> int:
        """Return the first page that a row at this position or after it sees."""
        return 0 if self.window is None else max(position + 1 - self.window, 0) // self.page_size

    def num_shared(self, keys: Sequence[bytes], *, observed: bool = False) -> int:
        """Return the number of leading pages with these keys that another sequence has had, too, as
        far as the first group's index shows. observed: see `lookup`."""
        if self.window is None:
            return self.num_cached(keys, observed=observed)
        return 1 + self._last(keys, 0, len(keys), indexed=True, observed=observed)

    def num_usable(self, keys: Sequence[bytes], *, observed: bool = False) -> int:
        """Return the number of leading pages with these keys that a sequence can begin after: each
        group has all that later rows see. observed: see `lookup`."""
        end = self.num_shared(keys, observed=observed)
        while (missing := self.last_missing(keys, end, observed=observed)) >= 0:
            end = missing  # every border after this page needs it
        return end

    def last_missing(self, keys: Sequence[bytes], end: int, *, observed: bool = False) -> int:
        """Return the last page before page `end` that is not indexed in a group with a window,
        though rows from there on see it; -1 if there is none."""
        last = -1
        for group in self.groups:
            if group.window is not None:
                first = group.first_seen(end * self.page_size)
                missing = group._last(keys, first, end, indexed=False, observed=observed)
                last = max(last, missing)
        return last

    def _last(
        self, keys: Sequence[bytes], first: int, end: int, *, indexed: bool, observed: bool
    ) -> int:
        """Return the last page from `first` to before `end` that is indexed, or is not; -1 if there
        is none."""
        for i in range(end - 1, first - 1, -1):
            if (self.lookup(keys[i], observed=observed) is not None) == indexed:
                return i
        return -1

    def clear_cache(self) -> None:
        """Free all cached pages, of the other groups, too."""
        for group in self.groups:
            for page, key in group._cached.items():
                del group._page_of[key], group._key_of[page]
                group._free.append(page)
                group.on_removed(key)
            group._cached.clear()
            group._unneeded.clear()
