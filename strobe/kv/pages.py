"""Logical pages of the KV cache: who holds which. The tensors are in kv.store. Imports no torch.

    free ----allocate----> held ----drop, never published----> free
                           held ----drop, published----------> cached (K/V kept, least recent first)
    cached ----hit-------> held                cached ----allocate, when free runs out----> held

Page 0 is reserved: padding and rows beyond the context are written there and never read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from strobe.request import PageKeys


class PagePool:
    """A fixed number of pages with reference counts and an index of full pages by content."""

    def __init__(self, num_pages: int, page_size: int):
        """num_pages counts the reserved page."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"A pool of {num_pages} pages of {page_size} tokens holds nothing; it needs a "
                "reserved page, one more, and pages of at least one token."
            )
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that could be allocated now: free ones and cached ones nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def capacity(self) -> int:
        """Pages that can ever be held."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one holder each; the caller has checked `available`."""
        assert 0 <= count <= self.available, (count, self.available)
        pages: list[int] = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, key = self._cached.popitem(last=False)
                del self._page_of[key], self._key_of[page]
            self._holders[page] = 1
            pages.append(page)
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        self._cached.pop(page, None)
        self._holders[page] = self._holders.get(page, 0) + 1

    def drop(self, pages: Sequence[int]) -> None:
        """Remove a holder; the last one frees a page, or leaves it cached if it was published."""
        for page in reversed(pages):
            assert self._holders.get(page, 0) > 0, f"page {page} is not held"
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._key_of:
                    self._cached[page] = self._key_of[page]
                else:
                    self._free.append(page)

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def key(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The content key of a full page: its tokens and everything before them."""
        return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

    def extend(self, keys: PageKeys, tokens: Sequence[int]) -> list[bytes]:
        """Add to a sequence's `keys`, those of its first pages, the keys of its other full pages.
        Returns those that a prefix can be: at least the last token is left to run."""
        size = self.page_size
        for end in range((len(keys) + 1) * size, len(tokens) + 1, size):
            keys.append(self.key(keys[-1] if keys else keys.root, tokens[end - size : end]))
        return keys[: (len(tokens) - 1) // size]

    def publish(self, page: int, key: bytes) -> None:
        """Let later requests find a full, committed page; the first page with a key keeps it."""
        assert self._holders.get(page, 0) > 0, f"page {page} is not held"
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def lookup(self, key: bytes) -> int | None:
        """The page with this content, if it is still there."""
        return self._page_of.get(key)

    def clear_cache(self) -> None:
        """Free what is cached: no later request finds it."""
        for page, key in self._cached.items():
            del self._page_of[key], self._key_of[page]
            self._free.append(page)
        self._cached.clear()

    def check(self) -> None:
        """Raises AssertionError if free + held + cached is not all, or an index disagrees."""
        free, held, cached = set(self._free), set(self._holders), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        states = len(free) + len(held) + len(cached)
        assert free | held | cached == set(range(1, self.num_pages)), "a page is lost"
        assert states == self.capacity, "a page has two states"
        assert all(count > 0 for count in self._holders.values()), "a held page has no holder"
        assert {page: key for key, page in self._page_of.items()} == self._key_of
        assert set(self._key_of) <= held | cached, "a free page is indexed"
        assert all(self._key_of[page] == key for page, key in self._cached.items())
