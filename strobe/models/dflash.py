"""The DFlash drafter (arXiv 2602.06036): a block-diffusion decoder over injected context K/V.

Legend: T and R rows, H hidden size, V vocabulary, L layers, Hkv key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from strobe.kv.store import KVStore
from strobe.models.config import DraftConfig
from strobe.models.layers import Decoder, DecoderLayer, softcapped
from strobe.models.modules import RMSNorm, scale_of
from strobe.models.ops.torch_ops import Attend, ContextWeights, ForwardRows
from strobe.models.weight_mapping import WeightMapping, WeightPart
from strobe.sampling.sampler import argmax, best_two


class DFlash(Decoder):
    """The drafter. It reads the target's embedding and head where it has none of its own, and a
    head of its own may know a part of the vocabulary only.

    Context token t enters every layer through that layer's own key and value weights, which take
    one vector, hidden_norm(fc(features of t)); the block's tokens go through the layers as usual.
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: Tensor,
        head_weight: Tensor,
        max_positions: int,
        own_tensors: Collection[str] = (),
    ):
        """embedding, head_weight: the target's. own_tensors: which of "embed_tokens" and "lm_head"
        the drafter has itself."""
        decoder = config.decoder
        layers = [DecoderLayer(decoder, i) for i in range(decoder.num_layers)]
        super().__init__(decoder, layers, max_positions)
        self.config = config
        hidden = decoder.hidden_size
        features = len(config.capture) * (config.target_hidden_size or hidden)
        self.fc = nn.Linear(features, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, decoder.rms_norm_eps)
        self._attentions = [layer.self_attn for layer in layers]
        self.embed_tokens = (
            nn.Embedding(decoder.vocab_size, hidden) if "embed_tokens" in own_tensors else None
        )
        self.lm_head = (
            nn.Linear(hidden, config.head_rows, bias=False) if "lm_head" in own_tensors else None
        )
        self.target_ids: Tensor | None = None
        self._shared = (embedding, head_weight)  # in a tuple, or they would count as our own
        self.fp8_head: tuple[Tensor, Tensor] | None = None
        self._context: ContextWeights | None = None

    def weight_mapping(self) -> WeightMapping:
        """Heads' sinks, which drafters name otherwise than targets."""
        if not (decoder := self.config.decoder).sinks:
            return {}
        shape = (decoder.num_heads,)
        names = [f"layers.{i}.self_attn." for i in range(decoder.num_layers)]
        return {f"{n}sinks": [WeightPart({f"{n}attention_sink_bias": shape})] for n in names}

    @property
    def embedding(self) -> Tensor:
        """[V, H]"""
        return self._shared[0] if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def head_weight(self) -> Tensor:
        """The output head [V', H]; where it knows a part of the vocabulary only, `target_ids` [V']
        says which."""
        return self._shared[1] if self.lm_head is None else self.lm_head.weight

    def fold(self) -> None:
        """After loading: give up an own embedding or head that is the same as the target's, and
        keep the context weights of all layers as one."""
        for name, shared in zip(("embed_tokens", "lm_head"), self._shared, strict=True):
            module = getattr(self, name)
            if module is not None and torch.equal(module.weight, shared):
                setattr(self, name, None)
        self._context = self._context_weights()

    def _context_weights(self) -> ContextWeights:
        decoder, linears = self.config.decoder, [a.qkv_proj for a in self._attentions]
        first = self._attentions[0].first_key
        norms = [a.k_norm for a in self._attentions if a.k_norm is not None]
        scales = [scale[first:] for scale in map(scale_of, linears) if scale is not None]
        folded = [norm.folded or (norm.weight, None) for norm in norms]
        return ContextWeights(
            torch.cat([linear.weight[first:] for linear in linears]),
            torch.cat([x.bias[first:] for x in linears]) if decoder.attention_bias else None,
            torch.cat(scales) if scales else None,
            torch.stack([norm.weight for norm in norms]),
            (torch.stack([gain for gain, _ in folded]), folded[0][1]),
            decoder.rms_norm_eps,
        )

    def _context_rows(self, features: Tensor) -> tuple[Tensor, ContextWeights]:
        """features [T, n * H] -> every layer's keys and values [T, L * 2 * Hkv * D], before norms
        and rope; and the weights that made them."""
        weights = self._context or self._context_weights()
        context = self.ops.residual(self.ops.linear(features, self.fc))
        return self.ops.norm_linear(context, self.hidden_norm, weights), weights

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [T, n * H], positions [T] -> keys, values [T, L, Hkv, D] of all layers."""
        rows = ForwardRows(positions, None, self.tables)
        return self.ops.context_kv(*self._context_rows(features), rows)

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, store: KVStore
    ) -> None:
        """features [T, n * H] of the tokens at positions [T] -> their context K/V in slots [T]."""
        rows = ForwardRows(positions, None, self.tables)
        self.ops.store_context(*self._context_rows(features), rows, slots, store)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, capture: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Block ids and positions [T] -> (residual stream [T, H], None)."""
        x = self.ops.embed(ids, self.embedding)
        if self.config.embedding_scale not in (None, 1.0):
            x = x * self.config.embedding_scale
        return self.run(x, positions, attend, capture)

    def head(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> logits [R, V]; -inf for tokens that the head does not know."""
        logits = self._logits(x)
        if self.target_ids is None:
            return logits
        full = logits.new_full((len(logits), self.config.decoder.vocab_size), -torch.inf)
        return full.index_copy_(1, self.target_ids, logits)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.ops.head(x, self.norm, self.head_weight)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return softcapped(logits, self.config.logit_softcap)

    @property
    def plain_head(self) -> bool:
        """Whether logits are the head's output and nothing else."""
        return self.config.output_multiplier == 1.0 and self.config.logit_softcap is None

    @property
    def head_in_fp8(self) -> bool:
        """Whether a drafter, which decides no answer, gets a copy of its target's head in FP8:
        where it needs but the largest logit and cuBLAS takes as many rows (a multiple of 16)."""
        return self.plain_head and self.config.head_rows % 16 == 0

    def argmax(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]."""
        if self.plain_head:
            return self._known(self.ops.argmax(x, self.norm, self.head_weight, self.fp8_head))
        return self._known(argmax(self._logits(x)))

    def best_two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream [R, H] -> the most probable tokens [R], and how far the logit of each is
        above the second largest [R] float32."""
        if self.plain_head:
            ids, margins = self.ops.best_two(x, self.norm, self.head_weight, self.fp8_head)
        else:
            ids, margins = best_two(self._logits(x))
        return self._known(ids), margins

    def _known(self, ids: Tensor) -> Tensor:
        """The target's ids of the head's rows."""
        return ids if self.target_ids is None else self.target_ids[ids]
