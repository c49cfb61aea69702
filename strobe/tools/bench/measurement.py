"""The part of a measurement that benchmarks share: requests that run while steps are timed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager

from strobe.engine.engine import Engine
from strobe.request import Request


@contextmanager
def open_requests(
    engine: Engine, mark: Callable[[str], None] | None = None
) -> Generator[dict[Hashable, Request]]:
    """Yield a mapping to which the caller adds the requests that run, by key, and from which it
    removes the ones that ended. Afterwards the others are aborted, and the engine is idle.

    mark: called at the phases of a step until then, unless None.
    """
    active: dict[Hashable, Request] = {}
    on_phase = engine.on_phase
    if mark is not None:
        engine.on_phase = mark
    try:
        yield active
    finally:
        engine.on_phase = on_phase
        for request in active.values():
            engine.finish(request, "abort")
        while engine.has_work:
            engine.step()


def all_decode(engine: Engine, count: int) -> bool:
    """Return whether `count` requests run, all past their prompts, and none waits."""
    scheduler = engine.scheduler
    all_run = len(scheduler.running) == count and not scheduler.waiting
    return all_run and all(record.is_decoding for record in scheduler.running)
