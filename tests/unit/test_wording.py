"""Words in messages that depend on a number."""

from __future__ import annotations

from strobe.terminal.wording import counted


def test_nouns_are_plural_except_for_one():
    counts = [counted(n, "request") for n in (0, 1, 2)]
    assert counts == ["0 requests", "1 request", "2 requests"]
