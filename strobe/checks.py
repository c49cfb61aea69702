"""Checks of values that callers give, each a ValueError with the sentence that mends it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST = 2**31 - 1
"""The largest count that a field takes."""


def whole(name: str, value: Any, low: int, mend: str, high: int = MOST) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is {value!r}, but must be a whole number >= {low}; {mend}")
    if value > high:
        raise ValueError(f"{name} is {value!r}, but must be at most {high}; {mend}")


def between(name: str, value: Any, low: float, high: float, mend: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, but must lie from {low:g} to {high:g}; {mend}")


def listed(name: str, value: Any, of: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}, but must be a list of {of}.")
    return tuple(value)
