"""SmolLM3: https://huggingface.co/HuggingFaceTB/SmolLM3-3B. Some of its layers have no rope."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_target,
    read_window,
)
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.families.llama import make
from strobe.models.model_config import LayerShape, TargetConfig

__all__ = ["make", "read"]

NO_ROPE = RopeConfig(theta=1.0, kind="proportional", share=0.0)
"""Rotates no pair."""


def _read_rotated(fields: Fields, layers: int) -> list[bool]:
    """Return whether each layer has rope. By default every `no_rope_layer_interval`-th has none.
    Raises ValueError."""
    interval = fields.integer("no_rope_layer_interval", 4)
    values = fields.get("no_rope_layers")
    if values is None:
        return [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(values, list) or len(values) != layers or not set(values) <= {0, 1}:
        raise ValueError(
            f"{fields.path}: no_rope_layers is {values!r}, but must have 0 or 1 for each of the "
            f"{layers} layers; {HINT}"
        )
    return [bool(value) for value in values]


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    layers = fields.integer("num_hidden_layers")
    rotated = _read_rotated(fields, layers)
    slides = fields.flag("use_sliding_window")
    types = read_layer_types(fields)
    if slides and not fields.get("layer_types") and fields.get("sliding_window"):
        types = ["full_attention" if rope else "sliding_attention" for rope in rotated]
    window = read_window(fields, types)
    masks = tuple(LayerMask(True, window if t == "sliding_attention" else None) for t in types)
    decoder = read_decoder(
        fields,
        masks,
        theta=2e6,
        head_dim=None,
        kv_heads=4,
        qk_norm=False,
        mlp_bias=fields.flag("mlp_bias"),
    )
    shapes = [
        LayerShape(
            num_kv_heads=decoder.num_kv_heads,
            head_dim=decoder.head_dim,
            rope=decoder.rope if rope else NO_ROPE,
        )
        for rope in rotated
    ]
    decoder = replace(decoder, layer_shapes=tuple(shapes))
    return read_target(fields, directory, "SmolLM3ForCausalLM", decoder, tied=True)
