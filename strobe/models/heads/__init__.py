"""Heads of block-diffusion drafters, one module each. They turn a block's hidden rows into drafts.

A module has `read(fields) -> Any`, which takes the head's own keys from config.json, and
`make(config) -> Head`, whose parameters are named as in the checkpoint, and an entry in `HEADS`.
What `read` returns may have a `check`; see `ChecksDrafter`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from strobe.models.model_config import DraftConfig

HEADS = {
    "DFlash": "strobe.models.heads.argmax",
    "DFlash2": "strobe.models.heads.dflash2",
    "DSpark": "strobe.models.heads.dspark",
}
"""Speculative methods, named in `config_readers/detection.py`, and the module of their head."""


def head_of(method: str) -> ModuleType:
    """Import the module of the method's head."""
    return importlib.import_module(HEADS[method])


@runtime_checkable
class ChecksDrafter(Protocol):
    """A head's config with values that must fit the drafter's other ones."""

    def check(self, draft: DraftConfig, path: Path) -> None:
        """Raises ValueError, which names the config at `path`, unless it fits."""
        ...
