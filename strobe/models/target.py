"""A target model, as a function of ragged rows; families differ in their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.config import TargetConfig
from strobe.models.layers import Attend, DecoderLayer, RMSNorm, RotaryTable, softcapped
from strobe.sampling.sampler import argmax

if TYPE_CHECKING:
    from strobe.kernels.linear import Products
    from strobe.models.fused import FusedDecoder


class Target(nn.Module):
    """Embedding, layers, head. Parameters carry the checkpoint's names without `model.`.

    A layer is called with (x [T, H], rope, attend) and returns the residual stream behind it.
    skipped: what the names of tensors begin with that a checkpoint may hold and nothing here uses;
    a family adds its own, such as "visual.".
    """

    def __init__(
        self,
        config: TargetConfig,
        layers: Sequence[nn.Module],
        max_positions: int,
        rope: nn.Module | None = None,
    ):
        """rope: positions [T] to what layers are given, where it is not one table for all."""
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.rope = rope or RotaryTable(decoder.head_dim, decoder.rope, max_positions)
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(decoder.hidden_size, decoder.vocab_size, bias=False)
        )
        self.skipped: tuple[str, ...] = ("lm_head.",) if config.tie_embeddings else ()
        self.fused: FusedDecoder | None = None

    def fuse(self, products: Products) -> None:
        """After loading, on a GPU: run by kernels."""
        from strobe.models.fused import FusedDecoder

        assert isinstance(self.rope, RotaryTable)
        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.fused = FusedDecoder(layers, self.config.decoder, self.rope, products)

    @property
    def head_weight(self) -> Tensor:
        """The output head [V, H]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [T] -> (residual stream [T, H], features [T, len(capture) * H] or None).

        capture: counts of layers done; the residual stream there, in this order, side by side.
        """
        if self.fused is not None:
            x = self.fused.embed(ids, self.embed_tokens.weight)
            return self.fused(x, positions, attend, capture)
        x = F.embedding(ids, self.embed_tokens.weight)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded, as trained
        rope = self.rope(positions)
        captured = {0: x} if 0 in capture else {}
        for done, layer in enumerate(self.layers, start=1):
            x = layer(x, rope, attend)
            if done in capture:
                captured[done] = x
        return x, torch.cat([captured[k] for k in capture], -1) if capture else None

    def head(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> logits [R, V]."""
        if self.fused is not None:
            return self.fused.head(x, self.norm, self.head_weight)
        return softcapped(F.linear(self.norm(x), self.head_weight), self.config.logit_softcap)

    def pick(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]."""
        if self.fused is not None:
            return self.fused.pick(x, self.norm, self.head_weight)
        return argmax(self.head(x))
