"""How far loading is: a bar where someone looks on, a line in the log where one is kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds before a bar is shown."""


@contextmanager
def progress(directory: Path, total: int) -> Generator[Callable[[int], object]]:
    """While `total` bytes are loaded: told(bytes) says how many more are there. The bar is on
    stderr, if that is a terminal, unless the log tells of it or TQDM_DISABLE is set."""
    from tqdm.auto import tqdm

    logged = logger.isEnabledFor(logging.INFO)
    began = time.perf_counter()
    with tqdm(
        total=total,
        desc=f"Loading {directory.name}",
        unit="B",
        unit_scale=True,
        delay=PATIENCE,
        leave=False,
        dynamic_ncols=True,
        disable=logged or None,
    ) as bar:
        yield bar.update
    seconds = time.perf_counter() - began
    rate = total / 1e9 / max(seconds, 1e-3)
    logger.info(
        "loaded %.2f GB from %s in %.1f s, %.2f GB/s", total / 1e9, directory, seconds, rate
    )
