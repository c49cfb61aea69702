"""Checked configs of targets and drafters, known before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.kv.states import StateSpec
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.quantization.rules import NO_RULES, Rules


@dataclass(frozen=True)
class LayerShape:
    """A layer's heads, for models whose layers differ. own_values: whether values have their own
    linear layer; otherwise they are the keys before norm and rope."""

    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    own_values: bool = True


@dataclass(frozen=True)
class ExpertShape:
    """Experts that replace MLPs.

    count: experts per layer. top_k: experts per row. layers: whether each layer has experts instead
    of an MLP. normalized: whether a row's weights add up to 1. bias: whether the experts' linear
    layers have a bias. limit: bound of a clamped activation's inputs. shared: intermediate size of
    an MLP for all rows next to the experts; 0 if there is none. held: first and number of the
    experts that the model holds, if not all; the router still chooses among all.
    """

    count: int
    top_k: int
    moe_intermediate_size: int
    layers: tuple[bool, ...]
    normalized: bool = True
    bias: bool = False
    limit: float = 0.0
    shared: int = 0
    held: tuple[int, int] | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of the decoder layers of a target or drafter.

    masks: one for each layer with attention. qk_norm: whether queries and keys are normed, as in
    Qwen3. value_scale: factor of the values. output_gate: whether attention's output is gated.
    layer_shapes: of each layer, if they differ. sinks: whether all layers' heads have an extra
    logit in the softmax. norm_offset: added to the weights of all RMS norms. vocab_part: index
    and number of the parts of embedding and head, of which the model holds one. output_bias:
    whether attention with biases has one at its output, too.
    """

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
    vocab_part: tuple[int, int] = (0, 1)
    output_bias: bool = True

    def own_rows(self, rows: int) -> int:
        """Return the rows that the model holds of an embedding or a head of `rows`; the last part
        may have fewer."""
        part, parts = self.vocab_part
        width = -(-rows // parts)
        return min(width, rows - part * width)

    def shape_of(self, layer: int) -> LayerShape:
        if self.layer_shapes:
            return self.layer_shapes[layer]
        return LayerShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, rope=self.rope)

    @property
    def head_dims(self) -> list[int]:
        """All head sizes, in ascending order."""
        return sorted({self.head_dim, *(shape.head_dim for shape in self.layer_shapes)})


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint stores quantized weights. method: of `quantization.methods`; block: rows and
    columns of a weight that share a scale. rules: which modules are quantized, for methods whose
    modules differ. label: the format's name, as "ModelOpt in NVFP4". held: linear layers keep their
    weights as stored, if the method can. kv_format: what scales of keys and values are for, as
    "fp8"; None if the config does not say. activations: whether the config rounds activations, too,
    which stay in the engine's dtype."""

    method: str
    block: tuple[int, int]
    rules: Rules = NO_RULES
    label: str = ""
    held: bool = False
    kv_format: str | None = None
    activations: bool = False


@dataclass(frozen=True)
class TargetConfig:
    """A target model: its decoder, and its directory's settings for tokens and sampling.

    dtype: the checkpoint's ("bfloat16", ...). eos_ids: all tokens that end an answer. sampling:
    default sampling values from generation_config.json. embedding_scale: factor of the embeddings.
    logit_softcap: logits become cap * tanh(logits / cap). quantization: None if weights are stored
    as they were trained. states: of recurrent layers, if there are any.
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
    """A block-diffusion drafter. `capture` counts finished layers: k is the residual stream after k
    layers.

    z-lab's format counts layer outputs from 0 (`target_layer_ids`), so its ids are lower by one.
    anchor_first: the first slot, which holds the last accepted token, also predicts.
    embedding_scale: None means the target's. target_hidden_size: size of the captured features, if
    it differs from the drafter's. draft_vocab_size: rows of a reduced head. recommended_drafts:
    number of drafts that the checkpoint recommends. format: of its config.json. method: the
    speculative method, which names its head (`strobe.models.heads`); head: what the head has read.
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
    method: str = "DFlash"
    head: Any = None

    @property
    def capture_ids(self) -> tuple[int, ...]:
        """The captured layers as config.json counts them, under `capture_ids_key`."""
        return tuple(k - (self.format != "speculators") for k in self.capture)

    @property
    def capture_ids_key(self) -> str:
        one_based = self.format == "speculators"
        return "aux_hidden_state_layer_ids" if one_based else "target_layer_ids"

    @property
    def head_rows(self) -> int:
        """Number of tokens that the head knows."""
        return self.draft_vocab_size or self.decoder.vocab_size

    @property
    def block_drafts(self) -> int:
        """Number of tokens that a block proposes."""
        return self.block_size - (not self.anchor_first)
