"""Loading a tokenizer in a process that runs no model. Imports no torch."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strobe.text.tokenizer import Tokenizer

_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_server_tokenizer(directory: Path) -> Tokenizer:
    """Load a tokenizer without torch, which takes a second and hundreds of megabytes to import.

    transformers then offers no models in this process. Where either is imported already, load the
    tokenizer as anywhere else. Raises ValueError as `Tokenizer`."""
    if "transformers" not in sys.modules and "torch" not in sys.modules:
        with _torch_hidden():
            importlib.import_module("transformers")  # which looks for torch once
    return Tokenizer(directory)


@contextmanager
def _torch_hidden() -> Generator[None]:
    """Let imports find no torch, and let transformers give no advice to install it."""
    modules: dict[str, Any] = sys.modules
    advice = os.environ.get(_NO_ADVICE)
    modules["torch"] = None
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        del modules["torch"]
        if advice is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = advice
