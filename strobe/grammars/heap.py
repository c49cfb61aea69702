"""Memory that compiled grammars leave behind."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can. Grammars differ much in size,
    so that without it the library keeps most of what they held."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
