"""Waiting for other threads and processes without fixed sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

PATIENCE = 120.0
"""Timeout in seconds, which only a hang reaches, however busy the machine is."""

_PAUSE = threading.Event()  # never set: waiting for it lets other threads run


def until(look: Callable[[], Value], what: str, patience: float = PATIENCE) -> Value:
    """Wait until `look` returns a true value, and return it. Raises AssertionError with `what` on
    timeout."""
    deadline = time.monotonic() + patience
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        _PAUSE.wait(0.005)
