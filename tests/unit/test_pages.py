"""Pages and leases: a state machine with simulated K/V, and call orders that raise."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strobe.kv.lease import Lease, LeaseError, reserve_all
from strobe.kv.pages import PagePool
from tests.support.bookkeeping_checks import check_pool

NUM_PAGES, SIZE, LIMIT = 11, 3, 17
GARBAGE = ("rejected",)


@dataclass(eq=False)
class Sequence:
    """The expected content of a lease. length: the device's; steps: open (reserved, accepted)."""

    lease: Lease
    tokens: list[int]
    length: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)

    def slot(self, position: int) -> tuple[int, int]:
        return self.lease.tables[0][position // SIZE], position % SIZE

    def pages_after(self, count: int) -> int:
        """Return the number of pages after a further reservation, computed independently."""
        covered = self.lease.length + sum(n for n, _ in self.steps) + count
        return max(len(self.lease.tables[0]), -(-min(covered, LIMIT) // SIZE))


class Pages(RuleBasedStateMachine):
    """Leases over one pool; `kv` simulates the tensors: each position holds its whole prefix."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(NUM_PAGES, SIZE)
        self.live: list[Sequence] = []
        self.kv: dict[tuple[int, int], tuple[object, ...]] = {}

    def held(self) -> set[int]:
        return {page for sequence in self.live for page in sequence.lease.tables[0]}

    def choose(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.live))

    @rule(data=st.data(), cached=st.booleans())
    def start(self, data: st.DataObject, cached: bool):
        if len(self.live) >= 5:
            return
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=LIMIT - 1))
        sequence = Sequence(Lease(self.pool, LIMIT), tokens)
        if cached:
            gained = sequence.lease.adopt(tokens)
            assert gained == sequence.lease.length == len(sequence.lease.tables[0]) * SIZE
            assert gained < len(tokens)
            sequence.length = gained
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reserve(self, data: st.DataObject):
        ready = [s for s in self.live if len(s.steps) < 2]
        if not ready:
            return
        chosen = data.draw(st.lists(st.sampled_from(ready), unique_by=id, min_size=1))
        wants = [(s, data.draw(st.integers(0, 7))) for s in chosen]
        needed = sum(s.pages_after(n) - len(s.lease.tables[0]) for s, n in wants)
        room = NUM_PAGES - 1 - len(self.held())
        before = [(list(s.lease.tables[0]), s.lease.open, len(s.lease.reserved)) for s in self.live]
        assert self.pool.available == room
        fits = reserve_all([(s.lease, n) for s, n in wants])
        assert fits == (needed <= room)
        if not fits:
            after = [(s.lease.tables[0], s.lease.open, len(s.lease.reserved)) for s in self.live]
            assert after == before
            assert self.pool.available == room
            return
        for sequence, count in wants:
            self.run_step(data, sequence, count)

    def run_step(self, data: st.DataObject, sequence: Sequence, count: int) -> None:
        """The device runs at once: it writes every reserved position and accepts the first few."""
        first = sequence.length
        accepted = data.draw(st.integers(0, min(count, LIMIT - first)))
        while len(sequence.tokens) < first + accepted + 1:
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        for position in range(first, min(first + count, LIMIT)):
            page, offset = sequence.slot(position)
            assert self.pool._holders[page] == 1, "a shared page is written"
            true = position < first + accepted
            self.kv[page, offset] = tuple(sequence.tokens[: position + 1]) if true else GARBAGE
        sequence.length += accepted
        sequence.steps.append((count, accepted))

    @precondition(lambda self: any(s.steps for s in self.live))
    @rule(data=st.data(), publish=st.booleans())
    def commit(self, data: st.DataObject, publish: bool):
        sequence = data.draw(st.sampled_from([s for s in self.live if s.steps]))
        before = sequence.lease.length
        _, accepted = sequence.steps.pop(0)
        sequence.lease.commit(accepted)
        assert sequence.lease.length == before + accepted
        if publish:
            known = data.draw(st.integers(sequence.lease.length, len(sequence.tokens)))
            sequence.lease.publish(sequence.tokens[:known])

    @precondition(lambda self: any(s.steps for s in self.live))
    @rule(data=st.data())
    def rollback(self, data: st.DataObject):
        sequence = data.draw(st.sampled_from([s for s in self.live if s.steps]))
        _, accepted = sequence.steps.pop()
        sequence.length -= accepted
        sequence.lease.rollback()
        covered = sequence.lease.length + sum(n for n, _ in sequence.steps)
        assert len(sequence.lease.tables[0]) == -(-min(covered, LIMIT) // SIZE)

    @precondition(lambda self: any(not s.steps for s in self.live))
    @rule(data=st.data(), resume=st.booleans())
    def release(self, data: st.DataObject, resume: bool):
        """Finish or preempt; a preempted sequence starts over with its cached prefix."""
        sequence = data.draw(st.sampled_from([s for s in self.live if not s.steps]))
        sequence.lease.release()
        assert sequence.lease.tables[0] == []
        self.live.remove(sequence)
        if resume:
            again = Sequence(Lease(self.pool, LIMIT), sequence.tokens)
            again.length = again.lease.adopt(again.tokens)
            self.live.append(again)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def calls_out_of_order_raise_and_change_nothing(self, data: st.DataObject):
        sequence = self.choose(data)
        lease, open_steps = sequence.lease, sequence.steps
        wrong = []
        if not open_steps:
            wrong += [lambda: lease.commit(0), lease.rollback]
        else:
            reserved = open_steps[0][0]
            wrong += [lease.release, lambda: lease.commit(reserved + 1), lambda: lease.commit(-1)]
        if lease.tables[0] or lease.length or open_steps:
            wrong.append(lambda: lease.adopt([0] * LIMIT))
        wrong.append(lambda: reserve_all([(lease, -1)]))
        call = data.draw(st.sampled_from(wrong))
        before = (
            list(lease.tables[0]),
            lease.length,
            lease.open,
            len(lease.reserved),
            lease.released,
        )
        with pytest.raises(LeaseError):
            call()
        after = (lease.tables[0], lease.length, lease.open, len(lease.reserved), lease.released)
        assert after == before

    @invariant()
    def pool_is_consistent(self):
        check_pool(self.pool)
        assert self.pool.available == NUM_PAGES - 1 - len(self.held())
        holders: dict[int, int] = {}
        for sequence in self.live:
            for page in sequence.lease.tables[0]:
                holders[page] = holders.get(page, 0) + 1
        assert all(self.pool._holders[page] == count for page, count in holders.items())
        assert 0 not in holders, "the reserved page is held"

    @invariant()
    def every_committed_position_holds_its_own_prefix(self):
        for sequence in self.live:
            for position in range(sequence.length):
                expected = tuple(sequence.tokens[: position + 1])
                assert self.kv[sequence.slot(position)] == expected

    @invariant()
    def unfilled_pages_are_private(self):
        for sequence in self.live:
            for page in sequence.lease.tables[0][sequence.lease.length // SIZE :]:
                assert self.pool._holders[page] == 1

    @invariant()
    def pages_cover_the_reservation(self):
        for sequence in self.live:
            covered = sequence.lease.length + sequence.lease.open
            assert len(sequence.lease.tables[0]) * SIZE >= min(covered, LIMIT)

    def teardown(self):
        for sequence in self.live:
            while sequence.steps:
                sequence.lease.commit(sequence.steps.pop(0)[1])
            sequence.lease.release()
        check_pool(self.pool)
        assert self.pool.available == self.pool.capacity


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def lease_with(pool: PagePool, tokens: list[int]) -> Lease:
    """Return a lease that has run and published all tokens but the last."""
    lease = Lease(pool, 100)
    done = lease.adopt(tokens)
    assert reserve_all([(lease, len(tokens) - 1 - done)])
    lease.commit(len(tokens) - 1 - done)
    lease.publish(tokens)
    return lease


def test_assumed_positions_take_pages_that_no_other_sequence_finds():
    pool = PagePool(9, 2)
    tokens = list(range(12))
    lease = Lease(pool, 100)
    assert lease.assume(len(tokens) - 1) == lease.length == 10
    assert pool.available == pool.capacity - 5
    assert reserve_all([(lease, 2)])
    lease.commit(2)
    lease.publish(tokens)
    assert Lease(pool, 100).adopt([*tokens, 99]) == 0
    assert Lease(pool, 100).assume(8) == 0, "pages run out"
    lease.release()
    check_pool(pool)


def test_release_is_final():
    pool = PagePool(5, 2)
    lease = Lease(pool, 10)
    assert reserve_all([(lease, 3)])
    lease.commit(3)
    lease.release()
    for call in (
        lease.release,
        lambda: lease.commit(0),
        lease.rollback,
        lambda: lease.adopt([1, 2, 3]),
        lambda: reserve_all([(lease, 1)]),
    ):
        with pytest.raises(LeaseError):
            call()
    check_pool(pool)
    assert pool.available == pool.capacity


def test_failed_group_reservation_changes_no_lease():
    pool = PagePool(4, 2)
    first, second = Lease(pool, 10), Lease(pool, 10)
    assert not reserve_all([(first, 4), (second, 4)])
    for lease in (first, second):
        assert lease.tables[0] == []
        assert len(lease.reserved) == 0
    assert reserve_all([(first, 4), (second, 2)])
    assert pool.available == 0


def test_positions_past_the_limit_need_no_pages():
    pool = PagePool(4, 2)
    lease = Lease(pool, 5)
    assert reserve_all([(lease, 50)])
    assert len(lease.tables[0]) == 3
    assert lease.open == 50


def test_commit_shifts_later_reservations():
    pool = PagePool(9, 2)
    lease = Lease(pool, 16)
    assert reserve_all([(lease, 5)])
    assert reserve_all([(lease, 5)])
    assert len(lease.tables[0]) == 5
    lease.commit(1)
    assert (lease.length, lease.open) == (1, 5)
    lease.commit(5)
    assert (lease.length, lease.open, len(lease.tables[0])) == (6, 0, 5)


def test_fully_cached_prompt_still_runs_its_last_token():
    pool = PagePool(9, 2)
    lease_with(pool, [1, 2, 3, 4, 5]).release()
    again = Lease(pool, 16)
    assert again.adopt([1, 2, 3, 4]) == 2
    longer = Lease(pool, 16)
    assert longer.adopt([1, 2, 3, 4, 9]) == 4


def test_page_matches_only_with_same_prefix():
    pool = PagePool(9, 2)
    lease_with(pool, [1, 2, 3, 4, 5]).release()
    assert Lease(pool, 16).adopt([9, 2, 3, 4, 5]) == 0
    assert Lease(pool, 16).adopt([3, 4, 5]) == 0
    assert Lease(pool, 16).adopt([1, 2, 3, 9, 5]) == 2


def test_keys_distinguish_large_ids_and_one_token_pages():
    pool = PagePool(9, 1)
    keys = {pool.key(b"", [token]) for token in (0, 1, 255, 256, 2**31, 2**40)}
    keys |= {pool.key(pool.key(b"", [0]), [0]), pool.key(b"", [0, 0])}
    assert len(keys) == 8


def test_equal_content_is_published_once():
    pool = PagePool(9, 2)
    first, second = Lease(pool, 16), Lease(pool, 16)
    assert reserve_all([(first, 4), (second, 4)])
    first.commit(4)
    second.commit(4)
    first.publish([1, 2, 3, 4])
    second.publish([1, 2, 3, 4])
    check_pool(pool)
    third = Lease(pool, 16)
    third.adopt([1, 2, 3, 4, 5])
    assert third.tables[0] == first.tables[0]
    first.release()
    second.release()
    third.release()
    check_pool(pool)
    assert pool.available == pool.capacity


def test_least_recent_cached_page_is_evicted_first():
    pool = PagePool(5, 2)
    lease_with(pool, [1, 2, 3, 4, 5]).release()
    lease_with(pool, [6, 7, 8]).release()
    lease_with(pool, [1, 2, 3]).release()
    new = Lease(pool, 16)
    assert reserve_all([(new, 4)])
    assert Lease(pool, 16).adopt([1, 2, 3, 4, 5]) == 2
    assert Lease(pool, 16).adopt([6, 7, 8]) == 2


def test_sequence_end_is_evicted_before_its_start():
    pool = PagePool(5, 2)
    lease_with(pool, [1, 2, 3, 4, 5]).release()
    new = Lease(pool, 16)
    assert reserve_all([(new, 6)])
    assert Lease(pool, 16).adopt([1, 2, 3, 4, 5]) == 2


def test_partly_committed_pages_are_not_published():
    pool = PagePool(9, 4)
    lease = Lease(pool, 16)
    assert reserve_all([(lease, 8)])
    lease.commit(7)
    lease.publish([1, 2, 3, 4, 5, 6, 7, 8])
    other = Lease(pool, 16)
    assert other.adopt([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4


@pytest.mark.parametrize(("pages", "size"), [(1, 16), (0, 16), (2, 0)])
def test_empty_pool_is_rejected(pages: int, size: int):
    with pytest.raises(ValueError, match="holds nothing"):
        PagePool(pages, size)


def windowed(num_pages: int = 20, window_pages: int = 20, *, window: int = 4) -> PagePool:
    """A pool of pages of two positions with a group whose layers see `window` positions."""
    return PagePool(num_pages, 2, others=[PagePool(window_pages, 2, window=window)])


def extend(lease: Lease, tokens: list[int]) -> None:
    """Compute a sequence's positions but the last token's, one after another."""
    for _ in range(len(tokens) - 1 - lease.length):
        assert reserve_all([(lease, 1)])
        lease.commit(1)
        lease.publish(tokens)
        lease.give_back()


def test_interrupted_release_goes_on(monkeypatch: pytest.MonkeyPatch):
    """The pages of the first group are returned once, those of the window's in the second call."""
    pool = windowed()
    lease = Lease(pool, 20)
    extend(lease, list(range(9)))

    def fail(pages: list[int]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool.groups[1], "drop", fail)
        with pytest.raises(KeyboardInterrupt):
            lease.release()
    lease.release()
    check_pool(pool)
    assert [group.available for group in pool.groups] == [group.capacity for group in pool.groups]


def test_pages_before_the_window_are_given_back():
    pool = windowed()
    lease = Lease(pool, 40)
    extend(lease, list(range(12)))
    assert lease.length == 11
    assert 0 not in lease.tables[0]
    # A row at position 10, where the sequence could begin again, sees positions 7 to 10.
    assert [page > 0 for page in lease.tables[1]] == [False] * 3 + [True] * 3
    full, other = pool.groups
    assert full.capacity - full.available == 6
    assert other.capacity - other.available == 3
    lease.release()
    assert other.available == other.capacity


@pytest.mark.parametrize("margin", [0, 3, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5])
def test_rows_from_the_margin_on_keep_all_they_see(window: int, margin: int):
    lease = Lease(windowed(window=window), 40, margin=margin)
    for length in range(1, 20):
        assert reserve_all([(lease, 1)])
        lease.commit(1)
        lease.give_back()
        start = max(length - margin, 0) // 2 * 2
        seen = range(max(start + 1 - window, 0), length)
        assert all(lease.tables[1][position // 2] for position in seen)
        assert lease.tables[1].count(0) == max(start + 1 - window, 0) // 2


def test_hit_needs_only_the_pages_within_the_window():
    pool = windowed()
    tokens = list(range(12))
    first = Lease(pool, 40)
    extend(first, [*tokens, 0])
    first.release()
    window = pool.groups[1]
    window.clear_cache()
    assert Lease(pool, 40).adopt([*tokens, 1]) == 0
    again = Lease(pool, 40)
    extend(again, [*tokens, 0])
    again.release()
    taken = window.allocate(window.capacity - 2)  # evicts all but two of them
    hit = Lease(pool, 40)
    assert hit.adopt([*tokens, 1]) == 12
    assert [page > 0 for page in hit.tables[1]] == [False] * 4 + [True] * 2
    assert len(set(hit.tables[0]) - {0}) == 6
    hit.release()
    window.drop(taken)


def test_hit_ends_where_the_window_has_its_pages():
    pool = windowed()
    tokens = list(range(12))
    first = Lease(pool, 40)
    first.adopt(tokens)
    first.expect([4])
    extend(first, [*tokens, 0])
    first.release()
    window = pool.groups[1]
    page = window.lookup(first.keys[5])
    assert page is not None
    window.share(page)
    del window._page_of[first.keys[5]], window._key_of[page]
    window.drop([page])
    hit = Lease(pool, 40)
    assert hit.adopt([*tokens, 1]) == 10
    hit.release()


def test_pages_that_no_hit_is_expected_to_need_are_evicted_first():
    pool = windowed(window_pages=12, window=2)
    chat = Lease(pool, 40)
    extend(chat, [7, 7, 7, 7, 7])
    chat.release()
    lease = Lease(pool, 40)
    tokens = list(range(16))
    lease.adopt(tokens)
    lease.expect([6])
    extend(lease, tokens)
    window = pool.groups[1]
    taken = window.allocate(window.available - 2)
    kept = [window.lookup(key) is not None for key in lease.keys[:7]]
    assert kept == [False, False, True, False, False, False, True]  # the last one is held
    assert Lease(pool, 40).adopt([7, 7, 7, 7, 7]) == 4
    window.drop(taken)


def test_admission_asks_for_the_window_only():
    pool = windowed(num_pages=30, window_pages=10)
    lease = Lease(pool, 60)
    assert lease.fits(58, 8)
    assert not lease.fits(58, 20)
    assert not lease.fits(60, 8)


def test_admission_counts_the_adopted_pages_of_the_window():
    pool = windowed(num_pages=30, window_pages=7)
    first = Lease(pool, 40)
    extend(first, [1] * 5)
    first.release()
    lease = Lease(pool, 40)
    assert lease.adopt([1] * 5) == 4
    assert pool.groups[1].available == 4
    assert lease.fits(20, 3), "it holds two of the six pages that it ever needs"
