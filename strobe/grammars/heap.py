"""Return the memory of dropped grammars to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it. Grammars differ much in
    size, so the library would otherwise keep nearly all of their memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
