"""DeepSpec's format: the target's config with drafting keys at the top level, copies of the
target's embedding and head, and a first slot that also predicts.

https://github.com/deepseek-ai/DeepSpec trains DSpark in it. Without a Markov head and without a
confidence head that is DFlash with another block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.models.config_readers.detection import Dialect
from strobe.models.config_readers.fields import Fields
from strobe.models.config_readers.zlab import read_flat
from strobe.models.model_config import DraftConfig


def read(
    config: dict[str, Any], path: Path, dialect: Dialect, target: Path | None = None
) -> DraftConfig:
    """A copy of some keys in `dflash_config` must agree with the others."""
    fields = Fields(config, path, first="dflash_config")
    return read_flat(fields, target, dialect, embedding_scale=1.0)
