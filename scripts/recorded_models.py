"""The tiny random Qwen3 of the checkpoints in tests/recorded, and how they are saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

TARGET = Path(__file__).resolve().parents[1] / "tests" / "recorded"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def make_model() -> Qwen3ForCausalLM:
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).float().eval()
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.dtype = torch.float32
    noise = torch.Generator().manual_seed(0)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dim() > 1:  # the global scales of a fused layer's members differ
            deviation = 0.5 if "embed" in name else 0.2 + 0.07 * (index % 4)
            parameter.data.normal_(0, deviation, generator=noise)
            parameter.data.copy_(parameter.data.bfloat16())
        else:
            parameter.data.uniform_(0.5, 1.5, generator=noise)
    return model


def write_config(directory: Path, model: Qwen3ForCausalLM, **further: Any) -> None:
    """Write config.json with the keys of the shape only."""
    text = json.loads(model.config.to_json_string(use_diff=False))
    kept = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32"}
    kept |= {key: text[key] for key in (*SHAPE, "rms_norm_eps", "hidden_act") if key in text}
    (directory / "config.json").write_text(
        json.dumps({**kept, "rope_theta": 10000.0, **further}), encoding="utf-8"
    )


@torch.no_grad()
def logits_of(model: Qwen3ForCausalLM) -> Tensor:
    return model.float()(IDS).logits[0]


def write_expected(directory: Path, logits: Tensor) -> None:
    """Write what a test compares with."""
    save_file({"ids": IDS[0], "logits": logits}, directory / "expected.safetensors")
