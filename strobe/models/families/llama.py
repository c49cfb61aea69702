"""Llama 2 to 3.3: https://huggingface.co/meta-llama/Llama-3.1-8B-Instruct and its siblings."""

from __future__ import annotations

from pathlib import Path

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_target,
)
from strobe.models.config_readers.fields import Fields
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import TargetConfig
from strobe.models.target import Target


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    decoder = read_decoder(
        fields,
        (LayerMask(),) * fields.integer("num_hidden_layers"),
        theta=10000.0,
        head_dim=None,
        qk_norm=False,
        mlp_bias=fields.flag("mlp_bias"),
    )
    return read_target(fields, directory, "LlamaForCausalLM", decoder)


def make(config: TargetConfig, max_positions: int) -> Target:
    """Make a model of plain decoder layers."""
    layers = [DecoderLayer(config.decoder, i) for i in range(config.decoder.num_layers)]
    return Target(config, layers, max_positions)
