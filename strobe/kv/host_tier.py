"""The second tier of the prefix cache: pages and kept states in host memory. Imports no torch; the
tensors are in kv.host_store.

    device  cached ----save, oldest first----> host, in LRU order
            cached <---load, for a waiting request---- host

A page or state is saved once, at the latest when the device evicts it, and never changes, so that
both tiers may have it. Copies belong to a plan. They run in its order on their own stream, in
parallel with the plan's step; a later plan's step waits for them. So the next plan can already use
pages and states that this one saves or loads. If its launch fails, `revert` forgets them.

A request whose prefix goes on in host memory waits while a `Fetch` brings it back: a few pages with
each plan that has a step, all of them with one that has none. Then they are cached on the device,
where the request finds them as it finds any others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from strobe.kv.kept_states import KeptStates
from strobe.kv.pages import PagePool
from strobe.request import Request
from strobe.step import HostCopies, HostCopy

COPY_MS = 4.0
"""Milliseconds of copies during one step, about half of a short decoding step on a GPU."""


class HostRows:
    """A fixed number of rows of host memory, and an index of their contents by key, in LRU order.

    row_bytes: bytes of a page or a state. on_stored, on_removed: called with a key when it enters
    or leaves the index."""

    def __init__(self, num_rows: int, row_bytes: int = 1):
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._free = list(range(num_rows - 1, -1, -1))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._readers: dict[bytes, int] = {}
        self.on_stored: Callable[[bytes], None] = lambda key: None
        self.on_removed: Callable[[bytes], None] = lambda key: None

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, key: bytes) -> bool:
        return key in self._row_of

    def use(self, key: bytes) -> int:
        """Return the row of a key and move it to the end of the LRU order."""
        self._row_of.move_to_end(key)
        return self._row_of[key]

    def store(self, key: bytes) -> int | None:
        """Return a row for a new key. If no row is free, the first in LRU order without a hold is
        evicted; None if all are held."""
        if not self._free:
            oldest = next((known for known in self._row_of if known not in self._readers), None)
            if oldest is None:
                return None
            self.drop(oldest)
        row = self._free.pop()
        self._row_of[key] = row
        self.on_stored(key)
        return row

    def drop(self, key: bytes) -> None:
        """Forget a key, if it is indexed."""
        if key in self._row_of:
            self._free.append(self._row_of.pop(key))
            self.on_removed(key)

    def hold(self, key: bytes) -> None:
        """Keep a key's row until `release`."""
        self._readers[key] = self._readers.get(key, 0) + 1

    def release(self, key: bytes) -> None:
        """End a `hold`."""
        self._readers[key] -= 1
        if not self._readers[key]:
            del self._readers[key]

    def clear(self) -> None:
        """Forget all keys that nobody holds."""
        for key in [key for key in self._row_of if key not in self._readers]:
            self.drop(key)


class FetchedPage(NamedTuple):
    """A page to bring back: its page group, its column in the request's table, its key, and where
    on the device it comes."""

    group: int
    column: int
    key: bytes
    page: int


@dataclass(eq=False)
class Fetch:
    """A prefix on its way from host memory to the device, for one waiting request.

    shared: by page group, the pages of the prefix that the device has. pages: the pages to bring
    back; the first num_sent are in plans, the first num_loaded on the device. state_key,
    state_row: of the state at the prefix's end, for targets with recurrent layers."""

    request: Request
    length: int
    shared: list[list[int]]
    pages: list[FetchedPage] = field(default_factory=list[FetchedPage])
    state_key: bytes | None = None
    state_row: int | None = None
    num_sent: int = 0
    num_loaded: int = 0
    is_state_sent: bool = False
    is_state_loaded: bool = False

    @property
    def is_done(self) -> bool:
        has_state = self.state_key is None or self.is_state_loaded
        return has_state and self.num_loaded == len(self.pages)


class _Prefix(NamedTuple):
    """A prefix that the tiers have together. end: its pages. missing: by page group, the columns
    that only host memory has. state_key: its state's, if it needs one."""

    end: int
    missing: list[list[int]]
    state_key: bytes | None = None


class HostTier:
    """Decides what is saved to host memory and what is brought back; the scheduler asks it."""

    def __init__(
        self,
        pool: PagePool,
        pages: Sequence[HostRows],
        *,
        kept: KeptStates | None = None,
        states: HostRows | None = None,
        pages_per_step: int = 64,
        bytes_per_ms: float = math.inf,
        runs_beside_steps: bool = False,
    ):
        """pages: rows for the pages of each page group; states: rows for kept states.
        pages_per_step: pages copied during one step, each way. bytes_per_ms: the copy speed.
        runs_beside_steps: whether copies take no time from steps, as on a GPU."""
        self.pool = pool
        self.kept = kept
        self.pages = pages
        self.states = HostRows(0) if states is None else states
        self.pages_per_step = pages_per_step
        self.bytes_per_ms = bytes_per_ms
        self.runs_beside_steps = runs_beside_steps
        self.prefill_ms: Callable[[int, int], float] = lambda start, end: math.inf
        """Milliseconds to compute a prompt's positions from `start` to `end` instead."""
        self.fetches: dict[Request, Fetch] = {}
        self._evicted: list[HostCopy] = []
        """What must be saved before the next step, which may overwrite it."""
        self._unsure: list[tuple[HostRows, bytes]] = []
        """Keys that are indexed, but whose copies may not have been launched."""
        for number, group in enumerate(pool.groups):
            group.on_evicted = partial(self._page_evicted, number)
        if kept is not None:
            kept.on_evicted = self._state_evicted
            kept.has_page = self._has_page

    def settle(self) -> None:
        """Take note that the copies of the newest plan are launched: index what they load."""
        if not self._evicted:  # else it has not been handed out
            self._unsure.clear()
        for fetch in self.fetches.values():
            self._publish(fetch)

    def revert(self) -> None:
        """Forget what the newest plan copies, which may not have been launched, and all fetches."""
        self.give_back()
        for rows, key in self._unsure:
            rows.drop(key)
        self._unsure.clear()
        self._evicted.clear()

    def give_back(self, keep: Sequence[Request] = ()) -> bool:
        """End fetches, whose pages others need; return whether there were any. keep: requests whose
        fetches go on."""
        requests = [request for request in self.fetches if request not in keep]
        for request in requests:
            self.end(request)
        return bool(requests)

    def clear(self) -> None:
        """Forget all pages and states."""
        self.give_back()
        for rows in (*self.pages, self.states):
            rows.clear()

    def is_fetching(self, request: Request, *, start: int, num_positions: int) -> bool:
        """Whether a waiting request waits for a prefix from host memory. Begins to fetch one if
        that is worthwhile and there is room. start: positions that it could take from the device
        now; num_positions: positions that it needs pages for."""
        fetch = self.fetches.get(request)
        if fetch is not None:
            return not fetch.is_done
        prefix = self._find(request, start)
        length = prefix.end * self.pool.page_size
        if length <= start:
            return False
        if self._is_coming(request, prefix):
            return True
        size = sum(
            len(columns) * rows.row_bytes
            for columns, rows in zip(prefix.missing, self.pages, strict=True)
        )
        if prefix.state_key is not None and self._row_of(prefix.state_key) is None:
            size += self.states.row_bytes
        if size and size / self.bytes_per_ms > self.prefill_ms(start, length):
            return False
        return self._begin(request, prefix, num_positions)

    def copies(
        self, *, has_step: bool, prompts: Sequence[tuple[int, int]] = ()
    ) -> HostCopies | None:
        """Return the copies of a plan, None if there are none. has_step: whether they run during a
        step, which limits their number. prompts: first position and end of each prompt's rows in
        that step."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        loaded = self._send(self.pages_per_step if has_step else None)
        saved = self._save_ahead(self._num_ahead(prompts)) if has_step else ()
        if not (evicted or loaded or saved):
            return None
        return HostCopies(evicted=evicted, loaded=tuple(loaded), saved=tuple(saved))

    def end(self, request: Request) -> int:
        """End the fetch of a request that is admitted or gone; return the positions it has brought
        back."""
        fetch = self.fetches.pop(request, None)
        if fetch is None:
            return 0
        for number, group in enumerate(self.pool.groups):
            own = [fetched.page for fetched in fetch.pages if fetched.group == number]
            group.drop([*fetch.shared[number], *own])
        for fetched in fetch.pages:
            self.pages[fetched.group].release(fetched.key)
        if fetch.state_key is not None:
            self._end_state(fetch, fetch.state_key)
        if not fetch.is_done:
            return 0
        return len({fetched.column for fetched in fetch.pages}) * self.pool.page_size

    def _end_state(self, fetch: Fetch, key: bytes) -> None:
        assert self.kept is not None
        assert fetch.state_row is not None
        if fetch.is_state_loaded:
            self.kept.release(fetch.state_row)
        else:
            self.kept.give_up(fetch.state_row)
            self.states.release(key)

    def _find(self, request: Request, start: int) -> _Prefix:
        """Return the longest prefix of a request that the tiers have together. start: as in
        `is_fetching`."""
        size = self.pool.page_size
        keys = self.pool.usable_keys(request.page_keys, request.tokens)
        end = self._usable(keys)
        if self.kept is None:
            return _Prefix(end=end, missing=self._missing(keys, end))
        border = self.kept.last_border(end * size)
        while border > start:
            key = self.kept.key_before(border, keys)
            has_state = key in self.states or self._row_of(key) is not None
            if has_state and self._last_absent(keys, border // size) < 0:
                missing = self._missing(keys, border // size)
                return _Prefix(end=border // size, missing=missing, state_key=key)
            border -= self.kept.interval
        return _Prefix(end=0, missing=[[] for _ in self.pages])

    def _usable(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages with these keys that a sequence could begin after:
        each group has all that later rows see, on the device or in host memory."""
        end = len(keys)
        for number, group in enumerate(self.pool.groups):
            if group.window is None:
                absent = (i for i in range(end) if not self._has(number, keys[i]))
                end = next(absent, end)
        while (absent := self._last_absent(keys, end)) >= 0:
            end = absent  # every border after this page needs it
        return end

    def _last_absent(self, keys: Sequence[bytes], end: int) -> int:
        """Return the last page before page `end` that neither tier has in a group with a window,
        though rows from there on see it; -1 if there is none."""
        last = -1
        for number, group in enumerate(self.pool.groups):
            if group.window is None:
                continue
            seen = range(end - 1, group.first_seen(end * group.page_size) - 1, -1)
            last = max(last, next((i for i in seen if not self._has(number, keys[i])), -1))
        return last

    def _has(self, group: int, key: bytes) -> bool:
        """Whether one of the tiers has a page."""
        return self.pool.groups[group].lookup(key) is not None or key in self.pages[group]

    def _missing(self, keys: Sequence[bytes], end: int) -> list[list[int]]:
        """Return by page group the columns before page `end` that later rows see, but the device
        does not have."""
        return [
            [
                column
                for column in range(group.first_seen(end * group.page_size), end)
                if group.lookup(keys[column]) is None
            ]
            for group in self.pool.groups
        ]

    def _is_coming(self, request: Request, prefix: _Prefix) -> bool:
        """Whether pages of a prefix are being fetched for another request."""
        keys = request.page_keys
        coming = {
            (fetched.group, fetched.key)
            for fetch in self.fetches.values()
            for fetched in fetch.pages
        }
        return bool(coming) and any(
            (group, keys[column]) in coming
            for group, columns in enumerate(prefix.missing)
            for column in columns
        )

    def _row_of(self, key: bytes) -> int | None:
        """Return the device's row of a state, None if it has none."""
        return None if self.kept is None else self.kept.row_of(key)

    def _begin(self, request: Request, prefix: _Prefix, num_positions: int) -> bool:
        """Begin to fetch a prefix if there is room for the whole request; return whether."""
        keys = request.page_keys
        fetch = Fetch(
            request=request,
            length=prefix.end * self.pool.page_size,
            shared=self._share(keys, prefix),
            state_key=prefix.state_key,
        )
        if not self._has_room(fetch, prefix, num_positions) or not self._begin_state(fetch):
            for group, pages in zip(self.pool.groups, fetch.shared, strict=True):
                group.drop(pages)
            return False
        for number, columns in enumerate(prefix.missing):
            for column in reversed(columns):  # the last page is the first to go
                self.pages[number].use(keys[column])
                self.pages[number].hold(keys[column])
            pages = self.pool.groups[number].allocate(len(columns))
            fetch.pages += [
                FetchedPage(group=number, column=column, key=keys[column], page=page)
                for column, page in zip(columns, pages, strict=True)
            ]
        self.fetches[request] = fetch
        return not fetch.is_done

    def _share(self, keys: Sequence[bytes], prefix: _Prefix) -> list[list[int]]:
        """Hold the pages of a prefix that the device has; return them by page group."""
        shared: list[list[int]] = []
        for group in self.pool.groups:
            first = group.first_seen(prefix.end * group.page_size)
            pages = [group.lookup(key) for key in keys[first : prefix.end]]
            shared.append([page for page in pages if page is not None])
            for page in shared[-1]:
                group.share(page)
        return shared

    def _has_room(self, fetch: Fetch, prefix: _Prefix, num_positions: int) -> bool:
        """Whether there are pages for a request after its prefix; in a group with a window, one
        page is enough."""
        columns = -(-num_positions // self.pool.page_size)
        for number, group in enumerate(self.pool.groups):
            needed = columns - len(fetch.shared[number])
            if group.window is not None:
                needed = min(needed, len(prefix.missing[number]) + 1)
            if needed > group.available:
                return False
        return True

    def _begin_state(self, fetch: Fetch) -> bool:
        """Take a row of the device for a fetch's state, if it needs one; return False if there is
        none."""
        key = fetch.state_key
        if key is None or self.kept is None:
            return True
        fetch.state_row = self._row_of(key)
        fetch.is_state_loaded = fetch.state_row is not None
        if fetch.state_row is not None:
            self.kept.hold(fetch.state_row)
            return True
        self.states.use(key)
        self.states.hold(key)
        fetch.state_row = self.kept.take(key)
        if fetch.state_row is None:
            self.states.release(key)
        return fetch.state_row is not None

    def _publish(self, fetch: Fetch) -> None:
        """Index the pages and the state that the newest plan has loaded."""
        size = self.pool.page_size
        tokens = fetch.request.tokens
        keys = fetch.request.page_keys
        for fetched in fetch.pages[fetch.num_loaded : fetch.num_sent]:
            column = fetched.column
            self.pool.groups[fetched.group].publish(
                fetched.page,
                key=fetched.key,
                tokens=tokens[column * size : (column + 1) * size],
                parent=keys[column - 1] if column else None,
                root=keys.root,
            )
        fetch.num_loaded = fetch.num_sent
        if not fetch.is_state_sent or fetch.is_state_loaded:
            return
        assert self.kept is not None
        assert fetch.state_key is not None
        assert fetch.state_row is not None
        self.kept.publish(fetch.state_row, fetch.state_key)
        self.states.release(fetch.state_key)
        fetch.state_row = self._row_of(fetch.state_key)
        assert fetch.state_row is not None
        self.kept.hold(fetch.state_row)
        fetch.is_state_loaded = True

    def _send(self, limit: int | None) -> list[HostCopy]:
        """Return the next copies to the device, up to `limit` pages. A state comes last in its
        prefix and counts as one page."""
        copies: list[HostCopy] = []
        for fetch in self.fetches.values():
            end = len(fetch.pages)
            if limit is not None:
                end = min(end, fetch.num_sent + limit - len(copies))
            for fetched in fetch.pages[fetch.num_sent : end]:
                row = self.pages[fetched.group].use(fetched.key)
                copies.append(HostCopy(device=fetched.page, host=row, group=fetched.group))
            fetch.num_sent = max(end, fetch.num_sent)
            if fetch.num_sent < len(fetch.pages) or len(copies) == limit:
                break
            if fetch.state_key is not None and not (fetch.is_state_sent or fetch.is_state_loaded):
                assert fetch.state_row is not None
                row = self.states.use(fetch.state_key)
                copies.append(HostCopy(device=fetch.state_row, host=row, is_state=True))
                fetch.is_state_sent = True
        return copies

    def _num_ahead(self, prompts: Sequence[tuple[int, int]]) -> int:
        """Return the number of pages of each group to save during a step: more while long prompts
        are computed, for up to half of that time. Such a step takes many pages, and so do loads."""
        if not (prompts and self.runs_beside_steps):
            return self.pages_per_step
        step_ms = sum([self.prefill_ms(start, end) for start, end in prompts])
        page_bytes = sum([rows.row_bytes for rows in self.pages])
        count = step_ms / 2 * self.bytes_per_ms / page_bytes
        if not math.isfinite(count):  # nothing is known of prompts yet
            return self.pages_per_step
        # No more than half of the rows, or saving the last pages would evict the first.
        most = min([rows.num_rows for rows in self.pages]) // 2
        return max(self.pages_per_step, int(min(count, most)))

    def _save_ahead(self, num_pages: int) -> list[HostCopy]:
        """Return copies of what the device evicts next, up to so many pages of each group, so that
        no step waits for them."""
        copies: list[HostCopy] = []
        for number, group in enumerate(self.pool.groups):
            for page, key in group.next_evicted(num_pages):
                copies += self._save_page(number, key, page)
        state = None if self.kept is None else self.kept.next_evicted()
        if state is not None:
            copies += self._save_state(state[1], state[0])
        return copies

    def _has_page(self, key: bytes) -> bool:
        """Whether one of the tiers has the page before a state's border."""
        return all(self._has(number, key) for number in range(len(self.pages)))

    def _page_evicted(self, group: int, page: int, key: bytes) -> None:
        self._evicted += self._save_page(group, key, page)

    def _state_evicted(self, row: int, key: bytes) -> None:
        self._evicted += self._save_state(key, row)

    def _save_page(self, group: int, key: bytes, page: int) -> list[HostCopy]:
        """Return the copy of a page to host memory, unless it is there or all rows are held."""
        row = self._new_row(self.pages[group], key)
        return [] if row is None else [HostCopy(device=page, host=row, group=group)]

    def _save_state(self, key: bytes, at: int) -> list[HostCopy]:
        """Return the copy of a state to host memory, unless it is there or all rows are held."""
        row = self._new_row(self.states, key)
        return [] if row is None else [HostCopy(device=at, host=row, is_state=True)]

    def _new_row(self, rows: HostRows, key: bytes) -> int | None:
        """Return a row to copy to; None if the key has one, or if all are held."""
        row = None if key in rows else rows.store(key)
        if row is not None:
            self._unsure.append((rows, key))
        return row
