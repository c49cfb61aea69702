"""What the engine knows of a checkpoint before any weight is read: its config.json, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.kv.states import StateSpec
from strobe.models.config_readers.rope import RopeConfig


@dataclass(frozen=True)
class LayerShape:
    """A layer's heads, where not all layers have the same. own_values: whether values have a linear
    layer of their own; otherwise they are the keys before norm and rope."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    own_values: bool = True


@dataclass(frozen=True)
class ExpertShape:
    """Experts in the place of MLPs. count: of a layer; top_k: that a row is routed to; layers:
    whether each layer has experts, and not just an MLP; normalized: whether the top k's weights add
    up to 1; bias: whether their linear layers have one; limit: where inputs of a clamped activation
    end; shared: intermediate size of an MLP beside them for every row; 0 is none."""

    count: int
    top_k: int
    moe_intermediate_size: int
    layers: tuple[bool, ...]
    normalized: bool = True
    bias: bool = False
    limit: float = 0.0
    shared: int = 0


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a stack of decoder layers, shared by targets and drafters. masks: one for each
    layer that has attention. qk_norm: whether queries and keys have norms of their own, as Qwen3's;
    value_scale: what values are multiplied with; output_gate: whether attention's output is gated.
    layer_shapes: of each layer, where they differ. sinks: whether all layers' heads have a logit
    beside their keys'. norm_offset: what is added to the weights of all RMS norms."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    attention_bias: bool
    masks: tuple[LayerMask, ...]
    qk_norm: bool = True
    mlp_bias: bool = False
    value_scale: float = 1.0
    output_gate: bool = False
    layer_shapes: tuple[LayerShape, ...] = ()
    sinks: bool = False
    norm_offset: float = 0.0
    experts: ExpertShape | None = None

    def shape_of(self, layer: int) -> LayerShape:
        if self.layer_shapes:
            return self.layer_shapes[layer]
        return LayerShape(self.num_kv_heads, self.head_dim, self.rope)

    @property
    def head_dims(self) -> list[int]:
        """Every head size there is, the smallest first."""
        return sorted({self.head_dim, *(shape.head_dim for shape in self.layer_shapes)})


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's linear layers are stored. method: "fp8"; block: the rows and columns of a
    weight that share a scale."""

    method: str
    block: tuple[int, int]


@dataclass(frozen=True)
class TargetConfig:
    """A target model: its decoder, and what its directory says about tokens and sampling.

    dtype: the checkpoint's own ("bfloat16", ...). eos_ids: every id that ends an answer, from
    generation_config.json where there is one. sampling: the default sampling values found there.
    embedding_scale: what embeddings are multiplied with; logit_softcap: logits become
    cap * tanh(logits / cap). quantization: how weights are stored; None is as they were trained.
    states: of its recurrent layers, where it has any.
    """

    architecture: str
    decoder: DecoderConfig
    tie_embeddings: bool
    dtype: str
    eos_ids: tuple[int, ...]
    sampling: dict[str, Any]
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    quantization: Quantization | None = None
    states: StateSpec | None = None


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter. Capture ids count layers done: k is the residual stream after k layers.

    The z-lab format names layer outputs from 0 (`target_layer_ids`), so its ids are one less.
    anchor_first: the first slot, which holds the newest token, predicts too. embedding_scale: None
    is the target's own. target_hidden_size: of the captured features, where it is another than the
    drafter's. draft_vocab_size: rows of a head of its own over a part of the vocabulary.
    recommended_drafts: what the checkpoint recommends to draft. format: of its config.json.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    capture: tuple[int, ...]
    num_target_layers: int | None
    embedding_scale: float | None
    output_multiplier: float
    logit_softcap: float | None
    dtype: str
    quantization: Quantization | None = None
    anchor_first: bool = False
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    recommended_drafts: int | None = None
    format: str = "z-lab"

    @property
    def capture_ids(self) -> tuple[int, ...]:
        """The captured layers as config.json names them, under `capture_ids_key`."""
        return tuple(k - (self.format != "speculators") for k in self.capture)

    @property
    def capture_ids_key(self) -> str:
        ours = self.format == "speculators"
        return "aux_hidden_state_layer_ids" if ours else "target_layer_ids"

    @property
    def head_rows(self) -> int:
        """Tokens that the head knows."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def block_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - (not self.anchor_first)
