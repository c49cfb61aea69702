"""Ministral 3: https://huggingface.co/mistralai/Ministral-3-8B-Instruct-2512 and its siblings; also
the text decoder of Mistral Small 3.1 and 3.2, whose outer config is the same.

Queries grow with the logarithm of their position beyond the training length.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strobe.models.config_readers.decoder import (
    read_decoder,
    read_rope_parameters,
    read_target,
)
from strobe.models.config_readers.fields import Fields, positive
from strobe.models.config_readers.rope import read_rope
from strobe.models.families import mistral
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import DecoderConfig, TargetConfig
from strobe.models.ops.torch_ops import ForwardRows, Residual, TorchOps
from strobe.models.target import Target

IGNORED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Keys that the text decoder inherits if text_config lacks them."""
OUTER = (
    "vision_config", "image_token_index", "image_token_id", "spatial_merge_size",
    "multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer",
)  # fmt: skip
"""Keys outside text_config without effect on the text decoder."""
TOWERS = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of tensors for images."""
OWN_PARAMETERS = ("llama_4_scaling_beta", "max_position_embeddings")
"""Rope's parameters that are read here or repeat another key."""


@dataclass(frozen=True)
class Ministral3Config(TargetConfig):
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / trained))."""

    beta: float = 0.0
    trained: int = 0


def read(fields: Fields, directory: Path) -> TargetConfig:
    if not fields.object("text_config"):
        return _read_text(fields, directory, "Ministral3ForCausalLM")
    inner = fields.inner("text_config", IGNORED_FIELDS, first=("tie_word_embeddings",))
    fields.finish(OUTER)
    architecture = "Mistral3ForConditionalGeneration"
    if inner.get("model_type") != "mistral":
        return _read_text(inner, directory, architecture)
    config = mistral.read(inner, directory)
    values: dict[str, Any] = {**vars(config), "architecture": architecture}
    return Ministral3Config(**values)


def _read_text(fields: Fields, directory: Path, architecture: str) -> Ministral3Config:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    parameters = read_rope_parameters(fields, 1e6)
    trained = fields.integer("max_position_embeddings", 262144)
    theta = parameters.get("rope_theta", fields.get("rope_theta", 1e6))
    rope = read_rope(
        {key: value for key, value in parameters.items() if key not in OWN_PARAMETERS},
        positive(theta, "rope_theta", fields.path),
        trained,
        fields.path,
    )
    beta = parameters.get("llama_4_scaling_beta")
    decoder = read_decoder(
        fields,
        mistral.read_masks(fields, default_window=None),
        theta=1e6,
        kv_heads=8,
        rope=rope,
        qk_norm=False,
    )
    return read_target(
        fields,
        directory,
        architecture,
        decoder,
        kind=Ministral3Config,
        beta=0.0 if beta is None else positive(beta, "llama_4_scaling_beta", fields.path),
        trained=rope.original or trained,
    )


class QueryScales(nn.Module):
    """The factors of queries by position."""

    table: Tensor

    def __init__(self, config: Ministral3Config, positions: int):
        super().__init__()
        periods = torch.arange(positions, dtype=torch.float32, device="cpu") // config.trained
        table = 1.0 + config.beta * torch.log1p(periods)
        self.register_buffer("table", table, persistent=False)


class ScaledLayer(DecoderLayer):
    """A layer whose queries are scaled, which is the same before rope as after it."""

    def __init__(self, config: DecoderConfig, layer: int, scales: QueryScales):
        super().__init__(config, layer)
        self.scales = scales

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        attention = self.self_attn
        qkv = ops.norm_linear(x, self.input_layernorm, attention.qkv_proj)
        factors = self.scales.table.index_select(0, rows.positions)
        qkv[:, : attention.first_key].mul_(factors[:, None])
        mixed = ops.attention(qkv, attention, rows)
        ops.add_linear(x, mixed, attention.o_proj, next_norm=self.post_attention_layernorm)
        self.mlp(ops, x, self.post_attention_layernorm, rows)


def make(config: Ministral3Config, max_positions: int) -> Target:
    """Make the model. Positions of the training length need no factors."""
    decoder = config.decoder
    layers = [DecoderLayer(decoder, i) for i in range(decoder.num_layers)]
    if config.beta and max_positions > config.trained:
        scales = QueryScales(config, max_positions)
        layers = [ScaledLayer(decoder, i, scales) for i in range(decoder.num_layers)]
    target = Target(config, layers, max_positions)
    target.skipped += TOWERS
    return target
