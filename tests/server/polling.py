"""Waiting for what another thread or process does, without sleeping for a guessed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

PATIENCE = 120.0
"""Seconds; only what hangs takes as long, however busy the machine is."""

_PAUSE = threading.Event()  # never set: waiting for it lets others run


def until(look: Callable[[], Found], what: str, patience: float = PATIENCE) -> Found:
    """What `look` gives once that is true. Raises AssertionError, saying `what`, when it is too
    late."""
    deadline = time.monotonic() + patience
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        _PAUSE.wait(0.005)
