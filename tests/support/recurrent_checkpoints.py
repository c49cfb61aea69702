"""Tiny random targets with recurrent layers, on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.support.tiny_checkpoints import EOS_IDS, SHAPE

KINDS = ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"]
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
RECURRENT: dict[str, Any] = {
    "layer_types": KINDS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": ROPE,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def make_hybrid(directory: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random Qwen3.5 with widely spread logits; return transformers' model of it. Experts,
    if the changes name some, are stored one by one."""
    values = {**SHAPE, **RECURRENT, **changes}
    if "num_experts" in changes:
        model: Any = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values))
        model.set_experts_implementation("eager")  # a loop over experts
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
    return save_hybrid(model, directory, seed)


def make_next(directory: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Write a random Qwen3-Next, as `make_hybrid` does; it always has experts."""
    rope = {key: ROPE[key] for key in ("rope_type", "rope_theta", "partial_rotary_factor")}
    values = {**SHAPE, **RECURRENT, **EXPERTS, "rope_parameters": rope, **changes}
    model: Any = Qwen3NextForCausalLM(Qwen3NextConfig(**values))
    model.set_experts_implementation("eager")
    return save_hybrid(model, directory, seed)


def save_hybrid(model: Any, directory: Path, seed: int) -> Any:
    """Fill one of transformers' models with random weights and write it."""
    model = model.float().eval()
    noise = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 0.5 if "embed" in name or "lm_head" in name or "conv" in name else 0.2
            parameter.data.normal_(0, scale, generator=noise)
        elif "linear_attn.norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=noise)
        elif "norm" in name:  # added to 1
            parameter.data.uniform_(-0.5, 0.5, generator=noise)
        else:
            parameter.data.normal_(0, 0.5, generator=noise)
    model.generation_config.eos_token_id = EOS_IDS
    model.save_pretrained(directory)
    return model
