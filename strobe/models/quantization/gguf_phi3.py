"""Names of Phi-3's and Phi-4's tensors in GGUF files, which stack layers as checkpoints do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
PARAMETERS: dict[str, str] = {}


def restore_of(metadata: Mapping[str, Any], module: str) -> Callable[[Tensor], Tensor] | None:
    """Return None: llama.cpp changes no values."""
    return None
