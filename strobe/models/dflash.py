"""The DFlash drafter (arXiv 2602.06036): a block-diffusion decoder over injected context K/V."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.kv.store import KVStore
from strobe.models.config import DraftConfig
from strobe.models.layers import (
    Attend,
    DecoderLayer,
    RMSNorm,
    Rope,
    RotaryTable,
    rotate,
    softcapped,
    unit_rms,
)
from strobe.models.weight_mapping import Piece, Pieces
from strobe.sampling.sampler import argmax

if TYPE_CHECKING:
    from strobe.kernels.linear import Products
    from strobe.models.fused import FusedContext, FusedDecoder


class DFlash(nn.Module):
    """The drafter. It reads the target's embedding and head where it has none of its own, and a
    head of its own may know a part of the vocabulary only.

    Context token t enters every layer through that layer's own key and value products of one
    vector, hidden_norm(fc(features of t)); the block's tokens go through the layers as usual.
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: Tensor,
        head_weight: Tensor,
        max_positions: int,
        own: Collection[str] = (),
    ):
        """embedding, head_weight: the target's. own: which of "embed_tokens" and "lm_head" the
        drafter has itself."""
        super().__init__()
        decoder = config.decoder
        self.config = config
        hidden, rows = decoder.hidden_size, config.draft_vocab_size or decoder.vocab_size
        features = len(config.capture) * (config.target_hidden_size or hidden)
        self.fc = nn.Linear(features, hidden, bias=False)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        layers = [DecoderLayer(decoder, i) for i in range(decoder.num_layers)]
        self.layers = nn.ModuleList(layers)
        self._attentions = [layer.self_attn for layer in layers]
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.rope = RotaryTable(decoder.head_dim, decoder.rope, max_positions)
        self.skipped: tuple[str, ...] = ()  # as a target's
        self.embed_tokens = (
            nn.Embedding(decoder.vocab_size, hidden) if "embed_tokens" in own else None
        )
        self.lm_head = nn.Linear(hidden, rows, bias=False) if "lm_head" in own else None
        self.target_ids: Tensor | None = None
        self._shared = (embedding, head_weight)  # in a tuple, or they would count as our own
        self.fp8_head: tuple[Tensor, Tensor] | None = None
        self._context: tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None = None
        self.fused: FusedDecoder | None = None
        self._fused_context: FusedContext | None = None

    def pieces(self) -> Pieces:
        """Heads' sinks, which drafters name otherwise than targets."""
        if not (decoder := self.config.decoder).sinks:
            return {}
        shape = (decoder.num_heads,)
        names = [f"layers.{i}.self_attn." for i in range(decoder.num_layers)]
        return {f"{n}sinks": [Piece({f"{n}attention_sink_bias": shape})] for n in names}

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return self._shared[0] if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def head_weight(self) -> Tensor:
        """The output head [V', H]; where it knows a part of the vocabulary only, `target_ids` [V']
        says which."""
        return self._shared[1] if self.lm_head is None else self.lm_head.weight

    def share(self) -> None:
        """After loading: give up an own embedding or head that is the same as the target's."""
        for name, theirs in zip(("embed_tokens", "lm_head"), self._shared, strict=True):
            own = getattr(self, name)
            if own is not None and torch.equal(own.weight, theirs):
                setattr(self, name, None)

    def join(self) -> None:
        """After loading: put the context products of all layers into one."""
        self._context = self._context_parts()

    def fuse(self, products: Products) -> None:
        """After loading, on a GPU: run by kernels."""
        from strobe.kernels.linear import Weight
        from strobe.models.fused import FusedContext, FusedDecoder, weight_of

        layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.fused = FusedDecoder(layers, self.config.decoder, self.rope, products)
        width = self.config.decoder.num_heads * self.config.decoder.head_dim
        parts = [layer.self_attn.qkv_proj for layer in layers]
        weights = [weight_of(part) for part in parts]
        scales = [weight.scale[width:] for weight in weights if weight.scale is not None]
        rows = torch.cat([weight.data[width:] for weight in weights])
        weight = Weight(rows, torch.cat(scales) if scales else None)
        norms = torch.stack([norm.weight for norm in self._key_norms()])
        self._context = None  # the kernels have their own
        self._fused_context = FusedContext(self.fc, self.hidden_norm, weight, norms, self.fused)

    def _key_norms(self) -> list[RMSNorm]:
        norms = [attention.k_norm for attention in self._attentions]
        return [norm for norm in norms if norm is not None]

    def _context_parts(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The key and value rows of every layer's product, its bias, and the key norms' weights."""
        width = self.config.decoder.num_heads * self.config.decoder.head_dim
        products = [attention.qkv_proj for attention in self._attentions]
        weight = torch.cat([product.weight[width:] for product in products])
        bias = None
        if self.config.decoder.attention_bias:
            bias = torch.cat([product.bias[width:] for product in products])
        norms = self._key_norms()
        scales = [norm.weight if norm.fused is None else norm.fused[0] for norm in norms]
        floor = None if norms[0].fused is None else norms[0].fused[1]
        return weight, bias, torch.stack(scales)[:, None], floor

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [T, n * H], positions [T] -> keys, values [T, L, Hkv, D] of all layers."""
        decoder = self.config.decoder
        weight, bias, k_scale, floor = self._context or self._context_parts()
        context = self.hidden_norm(self.fc(features))
        kv = F.linear(context, weight, bias)
        kv = kv.view(-1, decoder.num_layers, 2, decoder.num_kv_heads, decoder.head_dim)
        keys = unit_rms(kv[:, :, 0], decoder.rms_norm_eps, floor) * k_scale
        cos, sin = self.rope(positions)
        rope: Rope = (cos[:, None], sin[:, None])
        return rotate(keys, rope), kv[:, :, 1]

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, store: KVStore
    ) -> None:
        """features [T, n * H] of the tokens at positions [T] -> their context K/V in slots [T]."""
        if self._fused_context is not None:
            self._fused_context.store(features, positions, slots, store.data)
        else:
            store.write_all(slots, *self.context_kv(features, positions))

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Block ids and positions [T] -> (residual stream [T, H], None)."""
        if self.fused is not None:
            x = self.fused.embed(ids, self.embedding)
        else:
            x = F.embedding(ids, self.embedding)
        if self.config.embedding_scale not in (None, 1.0):
            x = x * self.config.embedding_scale
        if self.fused is not None:
            return self.fused(x, positions, attend, capture)
        rope = self.rope(positions)
        for layer in self.layers:
            x = layer(x, rope, attend)
        return x, None

    def head(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> logits [R, V]; -inf for tokens that the head does not know."""
        logits = self._logits(x)
        if self.target_ids is None:
            return logits
        full = logits.new_full((len(logits), self.config.decoder.vocab_size), -torch.inf)
        return full.index_copy_(1, self.target_ids, logits)

    def _logits(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            logits = self.fused.head(x, self.norm, self.head_weight)
        else:
            logits = F.linear(self.norm(x), self.head_weight)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return softcapped(logits, self.config.logit_softcap)

    @property
    def plain_head(self) -> bool:
        """Whether logits are the head's product and nothing else."""
        return self.config.output_multiplier == 1.0 and self.config.logit_softcap is None

    def pick(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]."""
        if self.fused is not None and self.plain_head:
            picks = self.fused.pick(x, self.norm, *(self.fp8_head or (self.head_weight,)))
        else:
            picks = argmax(self._logits(x))
        return picks if self.target_ids is None else self.target_ids.index_select(0, picks)
