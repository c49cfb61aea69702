"""Shapes of published pairs by name: the config.json of a target and of its DFlash drafter."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from strobe.config import DEMO_MODELS
from strobe.models.config_readers.zlab import default_capture_layers

DRAFT_LAYERS, DRAFT_BLOCK = 5, 16
_MASK_TOKEN = 151669
_COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_QWEN3: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
}
_LLAMA: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3-coder-30b-a3b": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "rope_theta": 10000000,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "initial_context_length": 4096,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "tie_word_embeddings": False,
        "eos_token_id": 200002,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
_PERIOD = ["linear_attention"] * 3 + ["full_attention"]
_HYBRID: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "attn_output_gate": True,
    "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}
_QWEN3_5: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        **_HYBRID,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "layer_types": _PERIOD * 8,
        "num_key_value_heads": 4,
        "eos_token_id": 248046,
    },
    "qwen3.5-35b-a3b": {
        **_HYBRID,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "layer_types": _PERIOD * 10,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "eos_token_id": 248044,
    },
}
_GEMMA4: dict[str, dict[str, Any]] = {
    "gemma-4-26b-a4b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": 262144,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
        "sliding_window": 1024,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "max_position_embeddings": 262144,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
}
_TARGETS: dict[str, dict[str, Any]] = {
    **{n: {"architectures": ["Qwen3ForCausalLM"], **_COMMON, **own} for n, own in _QWEN3.items()},
    **_LLAMA,
    **_EXPERTS,
    **_QWEN3_5,
    **_GEMMA4,
}
"""Published config.json of each target, by name."""
_DRAFTS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "block_size": 10,
        "head_dim": 128,
        "rope_scaling": None,
        "dflash_config": {"mask_token_id": 128255, "target_layer_ids": [1, 8, 15, 22, 29]},
    },
    "qwen3-coder-30b-a3b": {"num_hidden_layers": 8, "intermediate_size": 6144},
    "gpt-oss-20b": {
        "num_hidden_layers": 8,
        "intermediate_size": 7680,
        "attention_bias": False,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    },
    "qwen3.5-9b": {
        "rope_theta": 10000000,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    },
    "qwen3.5-35b-a3b": {
        "rope_theta": 10000000,
        "num_hidden_layers": 8,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
    },
    "gemma-4-26b-a4b": {
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "head_dim": 128,
        "rope_theta": 1000000,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 30.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 11, 17, 22, 27]},
    },
}
"""A drafter's config fields that differ from its target's and from draft_config's defaults."""
_SHARED = {*_COMMON, *_QWEN3["qwen3-8b"], "rope_scaling"}
"""Fields that drafters inherit from their targets."""
NAMES = ("demo", *_TARGETS)


def target_config(name: str) -> dict[str, Any]:
    """Return the target's published config.json."""
    return _TARGETS[name]


def draft_config(name: str) -> dict[str, Any]:
    """Return the drafter's config.json.

    - Qwen3 8B and 4B: z-lab's Qwen3-8B-DFlash-b16 and Qwen3-4B-DFlash-b16. None is published for
      0.6B and 32B; their drafters follow the same rule.
    - Llama 3.1: published layers, block and captured layers; heads and intermediate size are
      assumed to equal the target's.
    - Qwen3-Coder: published layers, block and size; the rest equals Qwen3.5-35B-A3B's.
    - gpt-oss: published except the number of heads, assumed to equal the target's.
    - Qwen3.5-9B: captured layers as published for 4B, which is as deep, and heads as for 27B.
    - Qwen3.5-35B-A3B: the first drafter published for it.
    - Gemma 4: as published.
    """
    target = {key: value for key, value in _TARGETS[name].items() if key in _SHARED}
    layers = target["num_hidden_layers"]
    return {
        **target,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": layers,
        "block_size": DRAFT_BLOCK,
        "dflash_config": {
            "mask_token_id": _MASK_TOKEN,
            "target_layer_ids": default_capture_layers(layers, DRAFT_LAYERS),
        },
        **_DRAFTS.get(name, {}),
    }


@contextmanager
def directories(name: str, block_size: int | None = None) -> Generator[tuple[str, str]]:
    """Yield temporary directories with the config.json of a target and a drafter; for demo, the
    demo models' own directories. block_size: of the drafter, if not the published one. Raises
    ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(
            f"shapes is {name!r}; name one of {', '.join(NAMES)}, or give directories with "
            "--target and --draft."
        )
    if name == "demo":
        yield str(DEMO_MODELS / "target"), str(DEMO_MODELS / "draft")
        return
    with TemporaryDirectory(prefix="strobe-shapes-") as directory:
        parts = {"target": target_config(name), "draft": draft_config(name)}
        parts["draft"]["block_size"] = block_size or parts["draft"]["block_size"]
        for part, config in parts.items():
            path = Path(directory, part)
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield str(Path(directory, "target")), str(Path(directory, "draft"))
