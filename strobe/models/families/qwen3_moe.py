"""Qwen3 with experts: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct and its siblings."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_target,
)
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.families.experts import Experts, Router, SparseMLP, read_counts
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import DecoderConfig, ExpertShape, TargetConfig
from strobe.models.target import Target


def read_experts(fields: Fields) -> ExpertShape:
    """Read the experts. They replace the MLP of every decoder_sparse_step-th layer that is not in
    mlp_only_layers."""
    count, top_k = read_counts(fields, 128, 8)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.ids("mlp_only_layers") or []
    layers = range(fields.integer("num_hidden_layers"))
    if unknown := [i for i in dense if i not in layers]:
        raise ValueError(
            f"{fields.path}: mlp_only_layers holds {unknown[0]}, but the layers are 0 to "
            f"{len(layers) - 1}; {HINT}"
        )
    return ExpertShape(
        count=count,
        top_k=top_k,
        moe_intermediate_size=fields.integer("moe_intermediate_size", 768),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in layers),
        normalized=fields.flag("norm_topk_prob"),
    )


def read_mask(fields: Fields) -> LayerMask:
    """Return the mask of all layers. max_window_layers has no effect, as in transformers."""
    fields.get("max_window_layers")
    window = None
    if fields.flag("use_sliding_window") and (
        fields.get("sliding_window") is not None or "sliding_window" not in fields
    ):
        window = fields.integer("sliding_window", 4096)
    fields.get("sliding_window")
    return LayerMask(True, window)


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    fields.only("shared_expert_intermediate_size", 0, why="use a checkpoint without a shared one.")
    fields.only("use_qk_norm", True, why="use a checkpoint with norms of queries and keys.")
    decoder = read_decoder(
        fields,
        (read_mask(fields),) * fields.integer("num_hidden_layers"),
        theta=10000.0,
        head_dim=None,
        kv_heads=4,
        experts=read_experts(fields),
    )
    return read_target(fields, directory, "Qwen3MoeForCausalLM", decoder)


def make(config: TargetConfig, max_positions: int) -> Target:
    decoder = config.decoder
    layers = [DecoderLayer(decoder, i, make_mlp(decoder, i)) for i in range(decoder.num_layers)]
    return Target(config, layers, max_positions)


def make_mlp(decoder: DecoderConfig, layer: int) -> nn.Module | None:
    """Return the layer's experts; None if it has an MLP."""
    shape = decoder.experts
    if shape is None or not shape.layers[layer]:
        return None
    router = Router(decoder.hidden_size, shape)
    return SparseMLP(router, Experts(decoder.hidden_size, shape), called="gate")
