"""gpt-oss: https://huggingface.co/openai/gpt-oss-20b and gpt-oss-120b."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.kernels.reference_experts import ALPHA, Gate
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_ropes,
    read_target,
    read_window,
)
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.families.experts import Experts, Router, SparseMLP, read_counts
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import DecoderConfig, ExpertShape, TargetConfig
from strobe.models.target import Target
from strobe.models.weight_mapping import WeightMapping, WeightPart

LIMIT = 7.0
"""Bound of the inputs of the experts' activation."""


def transposed(out: Tensor, value: Tensor) -> None:
    out.copy_(value.transpose(1, 2))


class GptOssExperts(Experts):
    """Checkpoints have one tensor for all experts, with inputs before outputs."""

    def weight_mapping(self) -> WeightMapping:
        mapping = super().weight_mapping()
        for name, linear in (("gate_up_proj", self.gate_up_proj), ("down_proj", self.down_proj)):
            shape = self.count, linear.in_features, linear.out_features
            mapping[f"{name}.weight"] = [WeightPart(sources={name: shape}, fill=transposed)]
        return mapping


def read_shape(fields: Fields) -> ExpertShape:
    count, top_k = read_counts(fields, 128, 4)
    fields.only("experts_per_token", top_k, why="it must be num_experts_per_tok's.")
    layers = (True,) * fields.integer("num_hidden_layers")
    size = fields.integer("intermediate_size")
    limit = fields.number("swiglu_limit", LIMIT)
    return ExpertShape(
        count=count,
        top_k=top_k,
        moe_intermediate_size=size,
        layers=layers,
        bias=True,
        limit=limit,
    )


def read_masks(fields: Fields) -> tuple[LayerMask, ...]:
    """Return the layers' masks. Sliding and full layers alternate by default."""
    types = read_layer_types(fields)
    if not fields.get("layer_types"):
        types = [("sliding_attention", "full_attention")[i % 2] for i in range(len(types))]
    window = read_window(fields, types)
    return tuple(LayerMask(True, window if t == "sliding_attention" else None) for t in types)


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    fields.only("swiglu_alpha", ALPHA, why=f"use a checkpoint with {ALPHA}.")
    fields.get("initial_context_length")  # repeated in rope_scaling
    fields.number("rms_norm_eps")
    if not fields.object("rope_parameters") and not fields.object("rope_scaling"):
        raise ValueError(f"{fields.path}: there is no rope_scaling; {HINT}")
    masks = read_masks(fields)
    max_position = fields.integer("max_position_embeddings", 131072)
    decoder = read_decoder(
        fields,
        masks,
        theta=150000.0,
        head_dim=64,
        kv_heads=8,
        rope=read_ropes(fields, masks, 150000.0, max_position),
        attention_bias=True,
        qk_norm=False,
        sinks=True,
        experts=read_shape(fields),
    )
    return read_target(fields, directory, "GptOssForCausalLM", decoder)


def make(config: TargetConfig, max_positions: int) -> Target:
    decoder = config.decoder
    layers = [DecoderLayer(decoder, i, make_mlp(decoder)) for i in range(decoder.num_layers)]
    return Target(config, layers, max_positions)


def make_mlp(decoder: DecoderConfig) -> SparseMLP:
    shape = decoder.experts
    size = decoder.hidden_size
    assert shape is not None
    experts = GptOssExperts(size, shape, Gate("clamped", shape.limit), bias=True)
    return SparseMLP(Router(size, shape, bias=True), experts)
