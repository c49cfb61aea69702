"""Gemma 4's text decoder: https://huggingface.co/google/gemma-4-31B-it and its siblings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strobe.attention.mask import LayerMask
from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_target,
    read_window,
)
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.config_readers.rope import RopeConfig, read_rope
from strobe.models.families.experts import Experts, read_counts
from strobe.models.layers import MLP, Layer
from strobe.models.linear import LinearView
from strobe.models.model_config import DecoderConfig, ExpertShape, LayerShape, TargetConfig
from strobe.models.modules import Attention, RMSNorm
from strobe.models.ops.torch_ops import ForwardRows, Residual, TorchOps
from strobe.models.quantization.published import check_format
from strobe.models.target import Target
from strobe.models.weight_mapping import WeightMapping, WeightPart

logger = logging.getLogger(__name__)

UNIFIED = ("gemma4_unified", "gemma4_unified_text")
"""model_type of the 12B model, whose text decoder has no per-layer input embeddings."""
TOWERS = ("vision_tower.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.")
"""Prefixes of tensors for images and sound."""
IGNORED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Keys that the text decoder inherits if `text_config` lacks them."""
OUTER = frozenset(
    {
        "vision_config", "audio_config", "image_token_id", "boi_token_id", "eoi_token_id",
        "video_token_id", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
        "vision_soft_tokens_per_image",
    }
)  # fmt: skip
"""Keys outside `text_config` without effect on the text decoder."""

FULL = "full_attention"
SLIDING = "sliding_attention"
ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""Defaults of rope_parameters."""
QUANTIZED = ("compressed-tensors", "modelopt")
"""Methods whose weights are dequantized while loading."""
UNQUANTIZED = "use the unquantized checkpoint."
PATTERN = 6
"""By default, one in so many layers is full."""


def read_types(fields: Fields) -> list[str]:
    """Return the layers' types. The last is always full, as in transformers."""
    types = read_layer_types(fields)
    if not fields.get("layer_types"):
        types = [SLIDING if (i + 1) % PATTERN else FULL for i in range(len(types))]
    return [*types[:-1], FULL]


def read_ropes(fields: Fields, types: list[str]) -> dict[str, RopeConfig]:
    """Return the rope of each layer type in use."""
    parameters = fields.object("rope_parameters") or ROPES
    ropes = dict[str, RopeConfig]()
    max_position = fields.integer("max_position_embeddings", 131072)
    for kind in sorted(set(types)):
        rope_fields = parameters.get(kind)
        if not isinstance(rope_fields, dict) or not isinstance(
            rope_fields.get("rope_theta"), int | float
        ):
            raise ValueError(
                f"{fields.path}: rope_parameters must name a rope_theta for {kind}, but is "
                f"{parameters!r}; {HINT}"
            )
        share = rope_fields.get("partial_rotary_factor")
        if rope_fields.get("rope_type", "default") != "proportional" and share not in (None, 1.0):
            raise ValueError(
                f"{fields.path}: partial_rotary_factor of {kind} is {share!r}, which only a rope "
                f"of type 'proportional' has; {HINT}"
            )
        ropes[kind] = read_rope(
            rope_fields, float(rope_fields["rope_theta"]), max_position, fields.path
        )
    return ropes


def read_shapes(fields: Fields, types: list[str]) -> tuple[LayerShape, ...]:
    """Return each layer's heads. Full layers have fewer, wider heads and may use keys as values.
    The sizes come from global_head_dim and num_global_key_value_heads, or from each layer."""
    ropes = read_ropes(fields, types)
    shared = fields.flag("attention_k_eq_v")
    heads = fields.integer("num_key_value_heads", 4)
    width = fields.integer("head_dim", 256)
    full = {"head_dim": fields.integer("global_head_dim", 512)}
    if fields.get("num_global_key_value_heads") is not None:
        global_kv_heads = fields.integer("num_global_key_value_heads")
        full |= {"num_key_value_heads": global_kv_heads} if shared else {}
    layer_kv = {i: full for i, kind in enumerate(types) if kind == FULL}
    if fields.get("per_layer_config") is not None:
        layer_kv = read_own_layers(fields, len(types))
    shapes: list[LayerShape] = []
    for i, kind in enumerate(types):
        part = Fields(layer_kv.get(i, {}), fields.path)
        shape = LayerShape(
            num_kv_heads=part.integer("num_key_value_heads", heads),
            head_dim=part.integer("head_dim", width),
            rope=ropes[kind],
            own_values=not shared or kind == SLIDING,
        )
        part.finish()
        if fields.integer("num_attention_heads") % shape.num_kv_heads or shape.head_dim % 2:
            raise ValueError(
                f"{fields.path}: layer {i} has {shape.num_kv_heads} key-value heads of size "
                f"{shape.head_dim}, but their number must divide num_attention_heads, and their "
                f"size must be even; {HINT}"
            )
        shapes.append(shape)
    return tuple(shapes)


def read_own_layers(fields: Fields, count: int) -> dict[int, dict[str, Any]]:
    """Return the settings of single layers by layer number. Its key may have leading zeros."""
    layer_fields = fields.object("per_layer_config")
    for key, values in layer_fields.items():
        if not key.isdecimal() or int(key) >= count or not isinstance(values, dict):
            raise ValueError(
                f"{fields.path}: per_layer_config has {key!r}: {values!r}, but must have an object "
                f"for the number of a layer, 0 to {count - 1}; {HINT}"
            )
    return {int(key): values for key, values in layer_fields.items()}


def read_experts(fields: Fields) -> ExpertShape | None:
    """Read the experts next to the MLP of every layer; None if there are none."""
    size = fields.get("moe_intermediate_size", fields.get("expert_intermediate_size"))
    if not fields.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts"):
            fields.get(key)  # has no effect without experts
        return None
    fields.only("expert_intermediate_size", size, why="it must be moe_intermediate_size's.")
    count, top_k = read_counts(fields, called="top_k_experts")
    layers = (True,) * fields.integer("num_hidden_layers")
    shared = fields.integer("intermediate_size")
    return ExpertShape(
        count=count,
        top_k=top_k,
        moe_intermediate_size=fields.integer("moe_intermediate_size", size),
        layers=layers,
        shared=shared,
    )


def refuse_unsupported(fields: Fields) -> None:
    """Raises ValueError for features of sibling models that are not supported."""
    fields.only(
        "hidden_activation",
        "gelu_pytorch_tanh",
        why="use a checkpoint with hidden_activation 'gelu_pytorch_tanh'.",
    )
    fields.only(
        "use_bidirectional_attention", "vision", False, why="use a checkpoint whose text is causal."
    )
    hint = "use gemma-4-31B or gemma-4-26B-A4B, which have none."
    size = "hidden_size_per_layer_input"
    silent = 0 if fields.get("model_type") in UNIFIED else 256
    width = fields.get(size) if size in fields else silent
    if width:
        raise ValueError(
            f"{fields.path}: {size} is {width!r}, but per-layer input embeddings, "
            f"as Gemma 4 E2B and E4B have them, are not supported; {hint}"
        )
    fields.get("vocab_size_per_layer_input")  # of those embeddings
    fields.only("num_kv_shared_layers", 0, why=f"layers cannot share keys and values; {hint}")
    fields.only("use_double_wide_mlp", False, why=f"no layer shares keys and values; {hint}")
    config = {"quantization_config": fields.object("quantization_config")}
    check_format(config, fields.path, hint=UNQUANTIZED, running=QUANTIZED)


def read(fields: Fields, directory: Path) -> TargetConfig:
    outer = fields
    if outer.object("text_config"):
        fields = outer.inner("text_config", IGNORED_FIELDS, first=("eos_token_id",))
        if outer.get("vision_config") or outer.get("audio_config"):
            logger.info("Gemma 4 reads text only: its towers for images and sound are left out.")
    refuse_unsupported(fields)
    types = read_types(fields)
    window = read_window(fields, types)
    shapes = read_shapes(fields, types)
    decoder = read_decoder(
        fields,
        tuple(LayerMask(True, window if kind == SLIDING else None) for kind in types),
        theta=1e6,
        head_dim=256,
        kv_heads=4,
        rope=shapes[-1].rope,
        layer_shapes=shapes,
        experts=read_experts(fields),
    )
    capped = fields.get("final_logit_softcapping") is not None
    config = read_target(
        fields,
        directory,
        "Gemma4ForCausalLM",
        decoder,
        tied=True,
        embedding_scale=decoder.hidden_size**0.5,
        logit_softcap=fields.number("final_logit_softcapping") if capped else None,
    )
    if outer is not fields:
        outer.finish(OUTER)
    return config


def make(config: TargetConfig, max_positions: int) -> Target:
    decoder = config.decoder
    layers = [make_layer(decoder, i) for i in range(decoder.num_layers)]
    target = Target(config, layers, max_positions)
    target.skipped = (*target.skipped, *TOWERS)
    return target


def make_layer(decoder: DecoderConfig, layer: int) -> Layer:
    if decoder.experts is None:
        return Gemma4Layer(decoder, layer)
    return Gemma4SparseLayer(decoder, layer, decoder.experts)


class RouterNorm(RMSNorm):
    """Also divides by the square root of the size."""

    def fold(self, scale: float = 1.0) -> None:
        super().fold(scale * self.weight.numel() ** -0.5)


class Gemma4Router(nn.Module):
    """Chooses experts by a row's direction. The weights are the softmax over the k largest logits,
    each times the expert's scale."""

    def __init__(self, hidden_size: int, shape: ExpertShape, eps: float):
        super().__init__()
        self.top_k = shape.top_k
        self.norm = RouterNorm(hidden_size, eps)
        self.weight = nn.Parameter(torch.empty(shape.count, hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(shape.count))

    def weight_mapping(self) -> WeightMapping:
        """The norm's weight is called scale."""
        return {
            "weight": [WeightPart(sources={"proj.weight": tuple(self.weight.shape)})],
            "norm.weight": [WeightPart(sources={"scale": tuple(self.norm.weight.shape)})],
        }

    @property
    def linear(self) -> LinearView:
        return LinearView(weight=self.weight)

    @property
    def routing(self) -> Routing:
        return Routing(top_k=self.top_k, scale=self.per_expert_scale)

    def logits(self, ops: TorchOps, x: Tensor) -> Tensor:
        """x [T, H] -> [T, E]."""
        return ops.norm_linear(ops.residual(x), self.norm, self.linear)


class Gemma4Layer(Layer):
    """Norms before and after attention and MLP; a scalar multiplies the layer's output. Attention
    also norms values, and its scores are not divided by the square root of the head size."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        scale = config.shape_of(layer).head_dim ** 0.5
        self.input_layernorm = RMSNorm.of_stream(config)
        self.self_attn = Attention(config, layer, query_scale=scale, value_norm=True)
        self.post_attention_layernorm = RMSNorm.of_stream(config)
        self.pre_feedforward_layernorm = RMSNorm.of_stream(config)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = RMSNorm.of_stream(config)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def feed(self, ops: TorchOps, x: Residual) -> Tensor:
        """Residual stream after attention -> MLP output to norm and add [T, H]."""
        mlp = self.mlp
        inner = ops.norm_linear(x, self.pre_feedforward_layernorm, mlp.gate_up_proj, "gelu_tanh")
        return ops.linear(inner, mlp.down_proj)

    def add_all(self, ops: TorchOps, x: Residual, mixed: Tensor, rows: ForwardRows) -> None:
        """Add attention's output [T, H], and then the MLP's."""
        ops.add_norm(x, mixed, self.post_attention_layernorm)
        fed = self.feed(ops, x)
        ops.add_norm(x, fed, self.post_feedforward_layernorm, scale=self.layer_scalar)

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        attention = self.self_attn
        qkv = ops.norm_linear(x, self.input_layernorm, attention.qkv_proj)
        mixed = ops.linear(ops.attention(qkv, attention, rows), attention.o_proj)
        self.add_all(ops, x, mixed, rows)


class Gemma4SparseLayer(Gemma4Layer):
    """Experts next to the MLP. Both read the same rows, have their own norms before and after, and
    their sum is normed again. The router reads the rows without those norms."""

    def __init__(self, config: DecoderConfig, layer: int, shape: ExpertShape):
        super().__init__(config, layer)
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.router = Gemma4Router(size, shape, eps)
        self.experts = Experts(size, shape, Gate("gelu_tanh"))
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps)

    def add_all(self, ops: TorchOps, x: Residual, mixed: Tensor, rows: ForwardRows) -> None:
        x.value, y = ops.gates.add_norm_twice(
            x.value,
            mixed,
            norm=self.post_attention_layernorm,
            then=self.pre_feedforward_layernorm_2,
        )
        fed = self.feed(ops, x)
        logits = self.router.logits(ops, x.value)
        layer = self.experts.layer(self.router.routing)
        routed = ops.experts(y, logits, layer, onto=None, rows=rows)
        norms = (
            self.post_feedforward_layernorm_1,
            self.post_feedforward_layernorm_2,
            self.post_feedforward_layernorm,
        )
        x.value = ops.gates.add_norms(x.value, fed, routed, norms=norms, scale=self.layer_scalar)
