"""A target model as a function of ragged rows. Families differ in their layers.

Legend: T and R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strobe.models.layers import Decoder, Layer
from strobe.models.linear import AnyLinear, Linear, LinearView
from strobe.models.model_config import TargetConfig
from strobe.models.weight_mapping import WeightMapping, WeightPart

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


class Target(Decoder):
    """Embedding, layers and head. Parameters have the checkpoint's names without `model.`.

    embedding_source: the checkpoint's tensor that the embedding is read from."""

    def __init__(self, config: TargetConfig, layers: Sequence[Layer], max_positions: int):
        super().__init__(config.decoder, layers, max_positions)
        decoder = config.decoder
        hidden = config.decoder.hidden_size
        vocabulary = decoder.own_rows(decoder.vocab_size)
        self.config = config
        table = torch.empty(vocabulary, hidden)
        if not table.is_meta:  # drawing takes seconds there
            nn.init.normal_(table)
        self.embed_tokens = nn.Embedding(vocabulary, hidden, _weight=table)
        self.lm_head = None if config.tie_embeddings else Linear(hidden, vocabulary, fixed=True)
        self.packed_head: LinearView | None = None
        self.embedding_source = EMBEDDING
        if config.tie_embeddings:
            self.skipped = (HEAD,)

    def weight_mapping(self) -> WeightMapping:
        """Map the embedding, which tied checkpoints may store as the head only."""
        shape = tuple(self.embed_tokens.weight.shape)
        return {EMBEDDING: [WeightPart(sources={self.embedding_source: shape})]}

    @property
    def output(self) -> AnyLinear:
        """The output head [V, H]."""
        return self.packed_head or self.lm_head or LinearView(weight=self.embed_tokens.weight)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.ops.embed(ids, self.embed_tokens.weight)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded, as trained
        return x

    def head_part(self, x: Tensor) -> Tensor:
        logits = self.ops.head(x, self.norm, self.output)
        return self.ops.gates.softcapped(logits, self.config.logit_softcap)

    def argmax(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]."""
        if self.config.logit_softcap is not None:  # makes close logits equal
            return self.ops.best_two_of(self.head_part(x))[0]
        return self.ops.argmax(x, self.norm, self.output)
