"""Heads of block-diffusion drafters, one module each: how a block's hidden rows become drafts.

A module has `read(fields) -> Any`, which takes the head's own keys from config.json, and
`make(config) -> Head`, whose parameters are named as in the checkpoint, and an entry in `HEADS`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

HEADS = {
    "DFlash": "strobe.models.heads.argmax",
    "DFlash2": "strobe.models.heads.dflash2",
    "DSpark": "strobe.models.heads.dspark",
}
"""Speculative methods, named in `config_readers/detection.py`, and the module of their head."""


def head_of(method: str) -> ModuleType:
    """Import the module of the method's head."""
    return importlib.import_module(HEADS[method])
