"""Failures injected into steps of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strobe.engine.engine import Engine
from tests.support.bookkeeping_checks import check_engine


def fail_calls(
    owner: Any, name: str, fails: Callable[[int], bool], *, has_effect: bool = True
) -> None:
    """Make calls of a method raise MemoryError. fails: whether a call does, by its number from 1.
    has_effect: failing calls have done their work by then."""
    method = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if not fails(calls):
            return method(*args, **named)
        if has_effect:
            method(*args, **named)
        raise MemoryError("no memory")

    setattr(owner, name, failing)


def run_with_failures(engine: Engine) -> int:
    """Run all requests, check the bookkeeping after each step, and return how many steps failed."""
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except MemoryError:
            failures += 1
        check_engine(engine)
    return failures
