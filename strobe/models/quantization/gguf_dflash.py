"""Names of the tensors of drafters for DFlash, DFlash2 and DSpark in GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

NAMES = {
    "fc": "fc",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
    "selector_hidden": "candidate_selector.hidden_projection",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
PARAMETERS = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "attn_sinks.weight": "self_attn.attention_sink_bias",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
}


def restore_of(metadata: Mapping[str, Any], module: str) -> Callable[[Tensor], Tensor] | None:
    """Return None: llama.cpp changes no values."""
    return None
