"""The DFlash drafter (arXiv 2602.06036): a block-diffusion decoder over injected context K/V.

Legend: T and R rows, H hidden size, V vocabulary, L layers, Hkv key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from strobe.kv.kv_store import KVStore
from strobe.models.heads import head_of
from strobe.models.heads.head import Head
from strobe.models.layers import Decoder
from strobe.models.linear import AnyLinear, Linear, LinearView
from strobe.models.model_config import DraftConfig
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import ContextWeights, ForwardRows
from strobe.models.weight_counts import WeightCounts, count_weights
from strobe.models.weight_mapping import WeightMapping, WeightPart
from strobe.sampling.candidates import Candidates, HeadOutputs


class DFlash(Decoder):
    """The drafter. It shares the target's embedding and head unless it has its own. Its own head
    may cover only a part of the vocabulary.

    The features of context token t enter every layer as the vector hidden_norm(fc(features)),
    through that layer's key and value weights. The block's tokens pass through the layers as usual.
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: Tensor,
        head: AnyLinear,
        max_positions: int,
        own_tensors: Collection[str] = (),
    ):
        """embedding, head: the target's. own_tensors: which of "embed_tokens" and "lm_head"
        the drafter's checkpoint has."""
        decoder = config.decoder
        draft_head: Head = head_of(config.method).make(config)
        layers = [draft_head.make_layer(decoder, i) for i in range(decoder.num_layers)]
        super().__init__(decoder, layers, max_positions)
        self.config = config
        self.draft_head = draft_head
        hidden = decoder.hidden_size
        features = len(config.capture) * (config.target_hidden_size or hidden)
        self.fc = Linear(features, hidden)
        self.hidden_norm = RMSNorm(hidden, decoder.rms_norm_eps)
        self._attentions = [layer.self_attn for layer in layers]
        rows, head_rows = map(decoder.own_rows, (decoder.vocab_size, config.head_rows))
        self.embed_tokens = nn.Embedding(rows, hidden) if "embed_tokens" in own_tensors else None
        self.lm_head = Linear(hidden, head_rows, fixed=True) if "lm_head" in own_tensors else None
        self.target_ids: Tensor | None = None
        self._shared = (embedding, head)  # a tuple: not our parameters
        self.fp8_head: LinearView | None = None
        self._context: ContextWeights | None = None

    def weight_mapping(self) -> WeightMapping:
        """Map the head's parameters, whose names begin at the checkpoint's root, and attention
        sinks, which have another name in drafters than in targets."""
        mapping = {
            f"draft_head.{name}": [WeightPart(sources={name: tuple(parameter.shape)})]
            for name, parameter in self.draft_head.named_parameters()
        }
        decoder = self.config.decoder
        for layer in range(decoder.num_layers) if decoder.sinks else ():
            name = f"layers.{layer}.self_attn."
            shape = (decoder.num_heads,)
            mapping[f"{name}sinks"] = [WeightPart(sources={f"{name}attention_sink_bias": shape})]
        return mapping

    @property
    def embedding(self) -> Tensor:
        """The token embedding [V, H]."""
        return self._shared[0] if self.embed_tokens is None else self.embed_tokens.weight

    @property
    def output(self) -> AnyLinear:
        """The output head [V', H]. Row i of a reduced head is token `target_ids[i]`."""
        return self._shared[1] if self.lm_head is None else self.lm_head

    def fold(self) -> None:
        """Finish loading: drop an own embedding or head that equals the target's, keep a head that
        equals the own embedding once, and concatenate the context weights of all layers."""
        embedding, head = self._shared
        if self.embed_tokens is not None and torch.equal(self.embed_tokens.weight, embedding):
            self.embed_tokens = None
        if self.lm_head is not None and torch.equal(self.lm_head.weight, head.weight):
            self.lm_head = None
        if self.lm_head is not None and torch.equal(self.lm_head.weight, self.embedding):
            self.lm_head.weight = nn.Parameter(self.embedding.detach(), requires_grad=False)
        self._context = self._context_weights()

    def context_weight_counts(self) -> WeightCounts:
        """Count the weights that multiply the features of context tokens: fc, and each layer's rows
        for keys and values."""
        counts = count_weights(self.fc)
        for attention in self._attentions:
            qkv = attention.qkv_proj
            outputs = qkv.out_features - attention.first_key
            counts += WeightCounts(linear=outputs * qkv.in_features)
        return counts

    def share_head(self, head: AnyLinear) -> None:
        """Share the target's head as it is held now."""
        self._shared = self._shared[0], head

    def pack(self, head: AnyLinear, packed: Callable[[AnyLinear], AnyLinear]) -> None:
        """Pack the context weights, and share the target's head, which may be packed."""
        self.share_head(head)
        context = self._context or self._context_weights()
        self._context = context._replace(linear=packed(context.linear))

    def _context_weights(self) -> ContextWeights:
        linears = [a.qkv_proj for a in self._attentions]
        first = self._attentions[0].first_key
        norms = [a.k_norm for a in self._attentions if a.k_norm is not None]
        folded = [norm.folded or (norm.weight, None) for norm in norms]
        return ContextWeights(
            linear=LinearView.concat(linears, first),
            gains=torch.stack([norm.weight for norm in norms]),
            folded=(torch.stack([gain for gain, _ in folded]), folded[0][1]),
            eps=self._attentions[0].eps,
        )

    def _context_rows(self, features: Tensor) -> tuple[Tensor, ContextWeights]:
        """features [T, n * H] -> every layer's keys and values [T, L * 2 * Hkv * D] before norms
        and rope, and the context weights."""
        weights = self._context or self._context_weights()
        context = self.ops.residual(self.ops.linear(features, self.fc))
        return self.ops.norm_linear(context, self.hidden_norm, weights.linear), weights

    def context_kv(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """features [T, n * H], positions [T] -> keys, values [T, L, Hkv, D] of all layers."""
        rows = ForwardRows(positions, None, self.tables)
        return self.ops.context_kv(*self._context_rows(features), rows)

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, store: KVStore
    ) -> None:
        """Write the context K/V of tokens with features [T, n * H] at positions [T] to slots
        [T]."""
        rows = ForwardRows(positions, None, self.tables)
        self.ops.store_context(*self._context_rows(features), rows, slots, store)

    def embed(self, ids: Tensor) -> Tensor:
        x = self.ops.embed(ids, self.embedding)
        if self.config.embedding_scale not in (None, 1.0):
            x = x * self.config.embedding_scale
        return x

    def head_part(self, x: Tensor) -> Tensor:
        """See `Decoder`; with a reduced head all columns, -inf for tokens outside it."""
        logits = self.finish_logits(self.ops.head(x, self.norm, self.output))
        return logits if self.target_ids is None else self.spread(self.ops.whole(logits))

    def raw_logits(self, rows: Tensor) -> Tensor:
        """Normed rows [R, H] -> the output of the head [R, V'], for all its rows."""
        return self.ops.whole(self.raw_part(rows))

    def raw_part(self, rows: Tensor) -> Tensor:
        """As `raw_logits`, or this rank's columns of it."""
        return self.ops.logits(rows, self.fp8_head or self.output)

    def finish_logits(self, raw: Tensor) -> Tensor:
        """Scale and cap outputs of the head [R, n], which this may overwrite."""
        logits = raw if self.multiplier == 1.0 else raw * self.multiplier
        return self.ops.gates.softcapped(logits, self.logit_softcap)

    def spread(self, logits: Tensor) -> Tensor:
        """Logits of the head's rows [R, V'] -> of all tokens [R, V], -inf where there is no row."""
        if self.target_ids is None:
            return logits
        full = logits.new_full((len(logits), self.config.decoder.vocab_size), -torch.inf)
        return full.index_copy_(1, self.target_ids, logits)

    def normed(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the rows that the head reads [R, H]."""
        return self.ops.norm(x, self.norm)

    def best(self, rows: Tensor, count: int) -> Candidates:
        """Normed rows [R, H] -> the largest outputs of the head, descending. count: at most the
        head's rows."""
        return Candidates(*self.ops.best_of(self.raw_part(rows), count))

    def outputs(self, raw: Tensor) -> HeadOutputs:
        """Outputs of the head, or this rank's columns of them -> the same, with their meaning."""
        return HeadOutputs(
            raw=raw,
            width=self.config.head_rows,
            finish=None if self.plain_head else self.finish_logits,
            tokens=self.target_ids,
        )

    @property
    def multiplier(self) -> float:
        """The factor of the head's outputs."""
        return self.config.output_multiplier * self.draft_head.logit_scale

    @property
    def logit_softcap(self) -> float | None:
        """The cap of the scaled outputs."""
        return self.config.logit_softcap

    @property
    def plain_head(self) -> bool:
        """Whether logits are the unmodified output of the head."""
        return self.multiplier == 1.0 and self.logit_softcap is None

    @property
    def head_in_fp8(self) -> bool:
        """Whether the drafter gets an FP8 copy of the target's head. It needs only the largest
        logits, and cuBLAS needs a multiple of 16 rows."""
        rows = self.config.decoder.own_rows(self.config.head_rows)
        return self.plain_head and rows % 16 == 0

    def argmax(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> the most probable tokens [R]."""
        if not self.plain_head:
            return self.best_two(x)[0]
        return self.tokens_of(self.ops.argmax(x, self.norm, self.fp8_head or self.output))

    def best_two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream [R, H] -> the most probable tokens [R], and the margins of their logits
        over the second largest [R] float32."""
        if not self.plain_head:
            return self.ops.best_two_of(self.head_part(x))
        ids, margins = self.ops.best_two(x, self.norm, self.fp8_head or self.output)
        return self.tokens_of(ids), margins

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return the target's ids of rows of the head."""
        return rows if self.target_ids is None else self.target_ids[rows]
