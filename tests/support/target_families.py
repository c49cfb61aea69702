"""Tiny random targets of every family."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers import (
    Gemma4ForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from tests.support.quantized_checkpoints import quantize, with_mxfp4_experts
from tests.support.recurrent_checkpoints import EXPERTS, make_hybrid, make_next
from tests.support.tested_formats import STORED_FAMILIES
from tests.support.tiny_checkpoints import make_target
from tests.support.transformers_parity import LLAMA3

PAD = {"pad_token_id": 0}
"""transformers' default is beyond these vocabularies."""
MINISTRAL3 = {
    **PAD,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
    "max_position_embeddings": 256,
}
PHI3 = {**PAD, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (partial(make_target, family=LlamaForCausalLM), {"rope_parameters": LLAMA3}),
    "qwen2": (partial(make_target, family=Qwen2ForCausalLM), {}),
    "mistral": (partial(make_target, family=MistralForCausalLM), {"sliding_window": 9}),
    "ministral3": (partial(make_target, family=Ministral3ForCausalLM), MINISTRAL3),
    "smollm3": (
        partial(make_target, family=SmolLM3ForCausalLM),
        {**PAD, "no_rope_layer_interval": 2},
    ),
    "phi3": (partial(make_target, family=Phi3ForCausalLM), PHI3),
    "qwen3_moe": (
        partial(make_target, family=Qwen3MoeForCausalLM),
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "gpt_oss": (
        partial(make_target, family=GptOssForCausalLM),
        {
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
        },
    ),
    "gemma4": (
        partial(make_target, family=Gemma4ForCausalLM),
        {
            "embedding": 0.2,
            "final_logit_softcapping": 30.0,
            "rope_theta": None,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "sliding_window": 6,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (make_hybrid, EXPERTS),
    "qwen3_next": (make_next, EXPERTS),
}
FAMILIES["gemma4 with experts"] = (
    FAMILIES["gemma4"][0],
    FAMILIES["gemma4"][1]
    | {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
    },
)


def gpt_oss_in_mxfp4(path: Path, **changes: Any) -> None:
    make_target(path, GptOssForCausalLM, **changes)
    with_mxfp4_experts(path)


def experts_in_fp8(path: Path, **changes: Any) -> None:
    make_target(path, Qwen3MoeForCausalLM, **changes)
    quantize(path, path.with_name("plain"), (24, 32), stored=lambda name: ".experts." in name)


_STORED = {
    "gpt_oss in MXFP4": (gpt_oss_in_mxfp4, FAMILIES["gpt_oss"][1]),
    "experts in FP8": (experts_in_fp8, FAMILIES["qwen3_moe"][1]),
}
FAMILIES |= {name: _STORED[name] for name in STORED_FAMILIES}
"""By family: the function that writes a target, and changes to its config."""
