"""Message words that depend on a number."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"
