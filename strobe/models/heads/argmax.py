"""DFlash's head (arXiv 2602.06036): each draft depends on its own row alone."""

from __future__ import annotations

from strobe.models.config_readers.fields import Fields
from strobe.models.heads.head import Backbone, BlockRows, Drafts, Head
from strobe.models.model_config import DraftConfig


def read(fields: Fields) -> None:
    """Read nothing: the head has no keys of its own."""


def make(config: DraftConfig) -> ArgmaxHead:
    return ArgmaxHead()


class ArgmaxHead(Head):
    """Has no weights. Greedy drafts need no logits in memory."""

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        shape = block.hidden.shape[:2]
        rows = block.hidden.flatten(0, 1)
        if not block.greedy:
            return block.choose(model.head_part(rows).unflatten(0, shape), 0)
        if not block.margins:
            return Drafts(model.argmax(rows).view(shape))
        tokens, margins = model.best_two(rows)
        return Drafts(tokens.view(shape), margins.view(shape))
