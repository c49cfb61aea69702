"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"
