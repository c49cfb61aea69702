"""Configs of published drafters, value by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QWEN3_8B_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 5,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 151936,
    "transformers_version": "4.57.1",
}
"""The config.json published with z-lab/Qwen3-8B-DFlash-b16."""

QWEN36_35B_SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"": "config.DFlashSpeculatorConfig"},
    "aux_hidden_state_layer_ids": [2, 11, 20, 29, 38],
    "block_size": 16,
    "draft_vocab_size": 248320,
    "dtype": "bfloat16",
    "mask_token_id": 248070,
    "max_anchors": 256,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "accept_tolerance": 0.0,
                "proposal_type": "greedy",
                "speculative_tokens": 15,
                "verifier_accept_k": 1,
            }
        ],
        "verifier": {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "name_or_path": "RedHatAI/Qwen3.6-35B-A3B-NVFP4",
        },
    },
    "speculators_model_type": "dflash",
    "speculators_version": "0.7.0.dev0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "max_position_embeddings": 262144,
        "max_window_layers": 8,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "rope_theta": 10000000,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": False,
        "vocab_size": 248320,
    },
    "transformers_version": "5.10.2",
}
"""z-lab's drafter for Qwen3.6-35B-A3B as the speculators library exports it."""


def written(directory: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    """Write a config.json, or another JSON file; return the directory."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(config))
    return directory
