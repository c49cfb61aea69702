"""Strobe's own directory in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """Return a directory of the cache; it may not exist yet. Raises ValueError without a home
    directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "strobe" / name
    except RuntimeError:
        raise ValueError(
            "This user has no home directory for a cache; set XDG_CACHE_HOME to a directory."
        ) from None
