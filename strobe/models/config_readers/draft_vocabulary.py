"""A drafter's reduced head: its size and its token ids."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from strobe.models.checkpoint import Checkpoint
from strobe.models.config_readers.fields import HINT as CONFIG_HINT
from strobe.models.config_readers.fields import Fields
from strobe.models.config_readers.tensor_names import HINT
from strobe.models.model_config import DraftConfig


def read_draft_vocabulary(fields: Fields, vocab_size: int, default: int) -> int | None:
    """Read the number of rows of a reduced head; None if it has all tokens. default: if the key is
    missing. Raises ValueError."""
    size = fields.integer("draft_vocab_size", default)
    if size > vocab_size:
        raise ValueError(
            f"{fields.path}: draft_vocab_size is {size}, but the vocabulary has {vocab_size} "
            f"tokens; {CONFIG_HINT}"
        )
    return None if size == vocab_size else size


def load_target_ids(checkpoint: Checkpoint, config: DraftConfig) -> Tensor:
    """Read the target's token id of each row of a reduced head, [V'] int64. Raises ValueError."""
    t2d = checkpoint.read("t2d") if "t2d" in checkpoint.shapes else None
    return read_target_ids(checkpoint.read("d2t"), t2d, config, checkpoint.directory)


def read_target_ids(
    d2t: Tensor, t2d: Tensor | None, config: DraftConfig, directory: Path
) -> Tensor:
    """Offsets d2t [V'] -> the target's token id of each row of the head, [V'] int64. Raises
    ValueError for an id out of range or used twice, or if t2d disagrees."""
    ids = torch.arange(len(d2t)) + d2t.long()
    vocab = config.decoder.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < len(ids):
        raise ValueError(
            f"{directory}: tensor d2t leads to tokens {int(ids.min())} to {int(ids.max())}, which "
            f"must all differ and lie within 0 to {vocab - 1}; {HINT}"
        )
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"{directory}: tensors t2d and d2t name different tokens; {HINT}")
    return ids
