"""Mistral: https://huggingface.co/mistralai/Mistral-7B-Instruct-v0.3 and its siblings."""

from __future__ import annotations

from pathlib import Path

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import read_decoder, read_target
from strobe.models.config_readers.fields import Fields
from strobe.models.families.llama import make
from strobe.models.model_config import TargetConfig

__all__ = ["make", "read", "read_masks"]

DEFAULT_WINDOW = 4096
"""transformers' default if the key is missing; null: no layer slides."""


def read_masks(fields: Fields, default_window: int | None) -> tuple[LayerMask, ...]:
    """Return the masks of layers that all have the same window, if any. default_window: if the key
    is missing."""
    window = default_window
    if "sliding_window" in fields:
        window = fields.integer("sliding_window") if fields.get("sliding_window") else None
    return (LayerMask(True, window),) * fields.integer("num_hidden_layers")


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    decoder = read_decoder(
        fields,
        read_masks(fields, DEFAULT_WINDOW),
        theta=10000.0,
        head_dim=None,
        kv_heads=8,
        qk_norm=False,
    )
    return read_target(fields, directory, "MistralForCausalLM", decoder)
