"""Qwen3, dense: https://huggingface.co/Qwen/Qwen3-8B and its siblings."""

from __future__ import annotations

from pathlib import Path

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_target,
    read_window,
)
from strobe.models.config_readers.fields import Fields
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import TargetConfig
from strobe.models.target import Target


def read_masks(fields: Fields) -> tuple[LayerMask, ...]:
    """Return the layers' masks. Older configs have a number of full layers instead of types."""
    types = read_layer_types(fields)
    fields.get("max_window_layers")  # has no effect otherwise
    if fields.flag("use_sliding_window") and not fields.get("layer_types"):
        full = fields.integer("max_window_layers", 28, low=0)
        if "sliding_window" in fields and not fields.get("sliding_window"):  # null: no layer slides
            full = len(types)
        types = [t if i < full else "sliding_attention" for i, t in enumerate(types)]
    # transformers' default if the key is missing
    window = read_window(fields, types) if "sliding_window" in fields else 4096
    return tuple(LayerMask(True, window if t == "sliding_attention" else None) for t in types)


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    decoder = read_decoder(fields, read_masks(fields), theta=10000.0)
    return read_target(fields, directory, "Qwen3ForCausalLM", decoder)


def make(config: TargetConfig, max_positions: int) -> Target:
    layers = [DecoderLayer(config.decoder, i) for i in range(config.decoder.num_layers)]
    return Target(config, layers, max_positions)
