"""Checks of an engine's bookkeeping. They raise AssertionError."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strobe.engine.engine import Engine
    from strobe.engine.scheduler import Scheduler
    from strobe.kv.pages import PagePool


def check_engine(engine: Engine) -> None:
    """Check that the bookkeeping of host and device agrees."""
    check_scheduler(engine.scheduler)
    for record in engine.scheduler.running:
        # A resumed request's length goes to the device with the next plan that is launched.
        if not record.in_flight and record.pages_sent:
            assert int(engine.state.cursor[record.slot, 0]) == record.lease.length


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that slots, leases and pages are consistent."""
    for group in scheduler.pool.groups:
        check_pool(group)
    held = [*scheduler.running, *scheduler._set_aside]
    assert len({r.slot for r in held}) == len(held), "a slot is used twice"
    assert len(held) + len(scheduler._slots) == scheduler.limits.max_num_seqs, "a slot is lost"
    check_kept_states(scheduler)
    fetches = [] if scheduler.host is None else list(scheduler.host.fetches.values())
    assert all(fetch.request in scheduler.waiting for fetch in fetches)
    check_host_tier(scheduler)
    if not held and not fetches:
        for group in scheduler.pool.groups:
            assert group.available == group.capacity, "an idle engine holds pages"
    for record in held:
        assert len(record.lease.reserved) == record.in_flight
        if record.is_decoding and not record.in_flight and not record.is_leaving:
            assert record.lease.length == record.start == len(record.request.tokens) - 1


def check_kept_states(scheduler: Scheduler) -> None:
    """Check that each row for a state is free, kept or being written by a request, and that only
    requests before their first step hold one."""
    if scheduler.states is None:
        return
    kept = scheduler.states.kept
    rows = [*kept._free, *kept._kept.values(), *kept._written]
    assert sorted(rows) == list(range(kept.num_rows)), "a row is lost or used twice"
    held = [r.states for r in [*scheduler.running, *scheduler._set_aside] if r.states is not None]
    readers = [states.revived.row for states in held if states.revived is not None]
    fetches = [] if scheduler.host is None else list(scheduler.host.fetches.values())
    fetches = [fetch for fetch in fetches if fetch.state_row is not None]
    readers += [fetch.state_row for fetch in fetches if fetch.is_state_loaded]
    assert kept._readers == {row: readers.count(row) for row in readers}
    assert set(kept._readers) <= set(kept._kept.values()), "a state was evicted under its reader"
    written = [states.row for states in held if states.row is not None]
    written += [row for states in held for row in states.rows_in_flight.values()]
    written += [fetch.state_row for fetch in fetches if not fetch.is_state_loaded]
    assert sorted(kept._written) == sorted(written), "a row is written by no request"


def check_host_tier(scheduler: Scheduler) -> None:
    """Check that each row of host memory is free or has one key, and that only fetches hold any."""
    host = scheduler.host
    if host is None:
        return
    for rows in (*host.pages, host.states):
        used = [*rows._free, *rows._row_of.values()]
        assert sorted(used) == list(range(rows.num_rows)), "a row is lost or used twice"
        assert set(rows._readers) <= set(rows._row_of), "a row was reused under its reader"
    pages = [fetched for fetch in host.fetches.values() for fetched in fetch.pages]
    for number, rows in enumerate(host.pages):
        keys = [fetched.key for fetched in pages if fetched.group == number]
        assert rows._readers == {key: keys.count(key) for key in keys}


def check_pool(pool: PagePool) -> None:
    """Check that each page is in one state, and that the indexes agree."""
    free, held, cached = set(pool._free), set(pool._holders), set(pool._cached)
    assert len(free) == len(pool._free), "a page is free twice"
    states = len(free) + len(held) + len(cached)
    assert free | held | cached == set(range(1, pool.num_pages)), "a page is lost"
    assert states == pool.capacity, "a page has two states"
    assert all(count > 0 for count in pool._holders.values()), "a held page has no holder"
    assert {page: key for key, page in pool._page_of.items()} == pool._key_of
    assert set(pool._key_of) <= held | cached, "a free page is indexed"
    assert all(pool._key_of[page] == key for page, key in pool._cached.items())
