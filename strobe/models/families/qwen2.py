"""Qwen2 and Qwen2.5, dense: https://huggingface.co/Qwen/Qwen2.5-7B-Instruct and its siblings."""

from __future__ import annotations

from pathlib import Path

from strobe.models.config_readers.decoder import read_decoder, read_target
from strobe.models.config_readers.fields import Fields
from strobe.models.families.llama import make
from strobe.models.families.qwen3 import read_masks
from strobe.models.model_config import TargetConfig

__all__ = ["make", "read"]


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    fields.only("use_mrope", None, False, why="use a checkpoint for text.")
    decoder = read_decoder(
        fields,
        read_masks(fields),
        theta=10000.0,
        head_dim=None,
        qk_norm=False,
        attention_bias=True,
        output_bias=False,
    )
    return read_target(fields, directory, "Qwen2ForCausalLM", decoder)
