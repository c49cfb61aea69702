"""DeepSpec's format: a copy of the target's config with DFlash keys at its top level, copies of its
embedding and head, and a first slot that predicts too.

https://github.com/deepseek-ai/DeepSpec calls it DSpark with neither a Markov head nor a confidence
head; with either it is another method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.models.config import DraftConfig
from strobe.models.config_readers.fields import Fields
from strobe.models.config_readers.zlab import read_flat

HARMLESS = frozenset({"markov_rank", "enable_confidence_head", "num_anchors"})
"""What `methods.py` has looked at already."""


def read(config: dict[str, Any], path: Path, target: Path | None = None) -> DraftConfig:
    fields = Fields(config, path)
    scale = fields.number("input_embedding_scale", 1.0)
    return read_flat(
        fields, target, HARMLESS, anchor_first=True, embedding_scale=scale, format="DeepSpec"
    )
