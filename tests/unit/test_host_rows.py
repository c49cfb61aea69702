"""The bookkeeping of the prefix cache's tier in host memory: what is saved, and what goes first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from strobe.kv.host_tier import HostRows, HostTier
from strobe.kv.kept_states import KeptStates
from strobe.kv.pages import PagePool
from strobe.request import Request, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.generation.run import usage
from strobe.step import HostCopies, HostCopy
from tests.support.simulated_device import World


def test_least_recently_used_row_that_nobody_holds_gives_way():
    rows = HostRows(3)
    removed: list[bytes] = []
    rows.on_removed = removed.append
    first = {key: rows.store(key) for key in (b"a", b"b", b"c")}
    assert sorted(first.values()) == [0, 1, 2]
    rows.use(b"a")
    rows.hold(b"b")
    assert rows.store(b"d") == first[b"c"]
    assert rows.store(b"e") == first[b"a"]
    rows.hold(b"d")
    rows.hold(b"e")
    assert rows.store(b"f") is None
    rows.release(b"d")
    assert rows.store(b"f") == first[b"c"]
    assert removed == [b"c", b"a", b"d"]


def cached_pages(pool: PagePool, keys: list[bytes]) -> list[int]:
    """Cache pages with these keys, of which the first is the oldest."""
    pages: list[int] = []
    for key in keys:
        pages += pool.allocate(1)
        pool.publish(pages[-1], key=key)
        pool.drop(pages[-1:])
    return pages


def test_pages_are_saved_once_ahead_of_their_eviction_or_else_before_it():
    pool = PagePool(5, 4)
    tier = HostTier(pool, [HostRows(8)], pages_per_step=2)
    a, b, c, d = cached_pages(pool, [b"a", b"b", b"c", b"d"])
    copies = tier.copies(has_step=True)
    assert copies == HostCopies(saved=(HostCopy(device=a, host=0), HostCopy(device=b, host=1)))
    tier.settle()
    assert pool.allocate(3) == [a, b, c]
    copies = tier.copies(has_step=True)
    assert copies is not None
    assert copies.evicted == (HostCopy(device=c, host=2),)
    assert copies.saved == (HostCopy(device=d, host=3),)


def test_copies_that_were_not_launched_are_forgotten():
    pool = PagePool(3, 4)
    tier = HostTier(pool, [HostRows(8)], pages_per_step=2)
    cached_pages(pool, [b"a", b"b"])
    tier.copies(has_step=True)
    tier.revert()
    assert len(tier.pages[0]) == 0
    tier.copies(has_step=True)
    tier.settle()
    tier.revert()
    assert len(tier.pages[0]) == 2


def test_pages_that_no_hit_needs_are_not_saved():
    window = PagePool(3, 4, window=4)
    pool = PagePool(3, 4, others=[window])
    tier = HostTier(pool, [HostRows(8), HostRows(8)], pages_per_step=2)
    (page,) = window.allocate(1)
    window.publish(page, key=b"a")
    window.drop([page], evict_first=True)
    window.drop(window.allocate(2))
    assert tier.copies(has_step=True) is None


def test_state_is_saved_before_its_row_is_overwritten():
    pool = PagePool(8, 16)
    kept = KeptStates(1, page_size=16)
    tier = HostTier(pool, [HostRows(8)], kept=kept, states=HostRows(2))
    (page,) = pool.allocate(1)
    pool.publish(page, key=b"a")
    row = kept.take(b"a")
    assert row is not None
    kept.publish(row, b"a")
    kept.take(b"b")
    assert tier.copies(has_step=False) == HostCopies(
        evicted=(HostCopy(device=row, host=0, is_state=True),)
    )
    assert b"a" in tier.states


def test_prefix_comes_back_a_few_pages_with_each_step():
    world = World(page_size=4, pages=10, max_num_seqs=2, host=[20], pages_per_step=2)
    first = world.add(25, max_tokens=1)
    world.drain()
    for other in (2, 4):
        world.add([other] * 36, max_tokens=1)
        world.drain()
    assert world.pool.num_cached(first.page_keys) == 0
    world.add([3] * 4, max_tokens=12, num_drafts=0)
    world.step()
    again = world.add(25, max_tokens=1)
    loads: list[int] = []
    while again not in world.reported:
        plan = world.launch()
        loads.append(0 if plan.host is None else len(plan.host.loaded))
        world.collect()
    assert loads == [2, 2, 2, 0]
    assert again.num_cached == again.num_host_cached == 24
    world.drain()
    world.check_answers()


def test_running_requests_take_the_pages_of_a_prefix_that_comes_back():
    world = World(page_size=4, pages=10, max_num_seqs=2, host=[20], pages_per_step=1)
    world.add(17, max_tokens=1)
    world.drain()
    world.add([2] * 36, max_tokens=1)
    world.drain()
    running = world.add([3] * 4, max_tokens=30, num_drafts=0)
    for _ in range(14):
        world.step()
    again = world.add(17, max_tokens=1)
    world.drain()
    assert running.num_preemptions == again.num_preemptions == 0
    world.check_answers()


def test_request_without_room_fetches_nothing():
    pool = PagePool(6, 4)
    tier = HostTier(pool, [HostRows(8)])
    request = Request("r", [1] * 9, SamplingParams(), 0, scheduling=SchedulingOptions())
    keys = pool.usable_keys(request.page_keys, request.tokens)
    for key in keys:
        tier.pages[0].store(key)
    pool.allocate(3)
    assert not tier.is_fetching(request, start=0, num_positions=12)
    assert pool.available == 2
    assert tier.is_fetching(request, start=0, num_positions=8)
    assert pool.available == 0
    assert tier.end(request) == 0
    assert pool.available == 2


def test_answers_say_which_tier_had_their_prompt():
    def details(num_cached: int, num_host_cached: int) -> object:
        run: Any = SimpleNamespace(
            job=SimpleNamespace(prompt_ids=[1] * 40),
            choices=[],
            num_cached=num_cached,
            num_host_cached=num_host_cached,
        )
        return usage([run])["prompt_tokens_details"]

    assert details(32, 0) == {"cached_tokens": 32}
    tiers = {"device": 8, "host": 24}
    assert details(32, 24) == {"cached_tokens": 32, "cached_tokens_details": tiers}
