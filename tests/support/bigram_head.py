"""A second drafter head as a test double: a bigram correction, `score += table[previous]`, walked
along the block. It needs one entry in `HEADS` and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strobe.models.config_readers.fields import Fields
from strobe.models.heads.head import Backbone, BlockRows, Drafts, Head
from strobe.models.model_config import DraftConfig

METHOD = "Bigram"
ENTRY = {METHOD: "tests.support.bigram_head"}


def read(fields: Fields) -> float:
    """Return the correction's scale."""
    return fields.number("bigram_scale")


def make(config: DraftConfig) -> BigramHead:
    return BigramHead(config.decoder.vocab_size, config.head)


class BigramHead(Head):
    """Adds to a draft's logits the row of `bigram_table` [V, V] of the token before it."""

    def __init__(self, vocab_size: int, scale: float):
        super().__init__()
        self.scale = scale
        self.bigram_table = nn.Parameter(torch.empty(vocab_size, vocab_size))

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        shape, previous = block.hidden.shape[:2], block.anchor
        logits = model.head(block.hidden.flatten(0, 1)).unflatten(0, shape)
        chosen: list[Drafts] = []
        for k in range(shape[1]):
            scores = logits[:, k] + self.scale * self.bigram_table[previous]
            chosen.append(block.choose(scores[:, None], k))
            tokens = chosen[-1].tokens
            assert tokens is not None
            previous = tokens[:, 0].clamp(min=0)
        parts: list[Any] = list(zip(*chosen, strict=True))
        return Drafts(*[None if part[0] is None else torch.cat(part, 1) for part in parts])


def to_bigram(source: Path, directory: Path, *, scale: float = 1.5, seed: int = 6) -> Tensor:
    """Write a drafter with the backbone of another one and this head, in z-lab's format; return
    its table times the scale."""
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    size = config["vocab_size"]
    noise = torch.Generator().manual_seed(seed)
    tensors["bigram_table"] = torch.randn(size, size, generator=noise)
    config["dflash_config"] |= {"projector_type": METHOD, "bigram_scale": scale}
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return scale * tensors["bigram_table"]
