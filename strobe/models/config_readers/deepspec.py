"""DeepSpec's format: the target's config with DFlash keys at the top level, copies of the target's
embedding and head, and a first slot that also predicts.

https://github.com/deepseek-ai/DeepSpec calls this DSpark without a Markov head and without a
confidence head; with either it is another method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.models.config_readers.detection import read_head
from strobe.models.config_readers.fields import Fields
from strobe.models.config_readers.zlab import read_flat
from strobe.models.model_config import DraftConfig

HARMLESS = frozenset({"markov_rank", "enable_confidence_head", "num_anchors"})
"""Keys that `detection.py` has checked."""


def read(config: dict[str, Any], path: Path, target: Path | None = None) -> DraftConfig:
    fields = Fields(config, path)
    scale = fields.number("input_embedding_scale", 1.0)
    layout = {"anchor_first": True, "embedding_scale": scale, "format": "DeepSpec"}
    return read_flat(fields, target, HARMLESS, **layout, **read_head(config, fields))
