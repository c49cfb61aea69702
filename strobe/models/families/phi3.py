"""Phi-3 and Phi-4 without longrope: https://huggingface.co/microsoft/phi-4 and its siblings. Their
checkpoints stack queries, keys and values, and gate and up, as these layers do."""

from __future__ import annotations

from pathlib import Path

from strobe.models.config_readers.decoder import read_decoder, read_target
from strobe.models.config_readers.fields import Fields
from strobe.models.families.llama import make
from strobe.models.families.mistral import read_masks
from strobe.models.model_config import TargetConfig

__all__ = ["make", "read"]

DROPOUTS = ("embd_pdrop", "resid_pdrop")


def read(fields: Fields, directory: Path) -> TargetConfig:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    fields.get("original_max_position_embeddings")  # the training length, which longrope needs
    decoder = read_decoder(
        fields,
        read_masks(fields, default_window=None),
        theta=10000.0,
        head_dim=None,
        qk_norm=False,
    )
    return read_target(fields, directory, "Phi3ForCausalLM", decoder, harmless=DROPOUTS)
