"""FP8 checkpoints of each family that reads them, against transformers with the same values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from strobe.models.architectures import load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.methods import hold_stored
from strobe.models.weight_loading import check_target_tensors
from tests.support.quantized_checkpoints import Block, is_linear, quantize
from tests.support.recurrent_checkpoints import EXPERTS as SHARED
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import join_experts, make_target
from tests.support.transformers_parity import GEOMETRY, check_layers

EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
AS_QWEN3 = {"fmt": "e4m3"}
"""The published checkpoints' keys other than the block size."""


@dataclass(frozen=True)
class Case:
    """make: writes a tiny target; block: rows and columns that share a scale; stored, dtype, keys:
    see `quantize`; after: a final change of the directory; bound: on differences."""

    make: Callable[[Path], Any]
    block: Block
    stored: Callable[[str], bool] = is_linear
    dtype: torch.dtype = torch.float32
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    after: Callable[[Path], None] = lambda path: None
    bound: float = 1e-4


def random(family: Any, **changes: Any) -> Callable[[Path], Any]:
    return partial(make_target, family=family, seed=3, **changes)


def as_published_qwen3_5(path: Path) -> None:
    """Write the multimodal form: quantization_config next to text_config."""
    config = json.loads((path / "config.json").read_text())
    stored = config.pop("quantization_config")
    (name,) = config["architectures"]
    outer = {
        "architectures": [name.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": config,
        "vision_config": {"depth": 1},
        "quantization_config": stored,
    }
    (path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(path / "model.safetensors")
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    save_file(renamed, path / "model.safetensors")


AS_QWEN3_5: dict[str, Any] = {
    "stored": lambda name: is_linear(name) or "in_proj_qkv" in name or "in_proj_z" in name,
    "dtype": torch.bfloat16,
    "keys": {"weight_per_tensor": False, "act_per_tensor": False},
    "after": as_published_qwen3_5,
    "bound": 1e-3,  # as unquantized; measured 1.4e-4
}
UNCONVERTED = ["model.layers.0.mlp.experts.3", "model.layers.1.self_attn", "model.layers.4.mlp"]


def converted(name: str) -> bool:
    return is_linear(name) and not name.startswith(tuple(UNCONVERTED))


CASES = {
    "qwen3": Case(random(Qwen3ForCausalLM), (24, 20), keys=AS_QWEN3),
    "experts, separate": Case(random(Qwen3MoeForCausalLM, **EXPERTS), (20, 14), keys=AS_QWEN3),
    "experts, one block each": Case(random(Qwen3MoeForCausalLM, **EXPERTS), (128, 128)),
    "experts, joined": Case(random(Qwen3MoeForCausalLM, **EXPERTS), (12, 7), after=join_experts),
    "experts, some not converted": Case(
        random(Qwen3MoeForCausalLM, **EXPERTS),
        (16, 16),
        stored=converted,
        keys={"modules_to_not_convert": ["lm_head", "model.layers.2.mlp.gate", *UNCONVERTED]},
    ),
    "llama": Case(random(LlamaForCausalLM), (24, 20), dtype=torch.bfloat16),
    "qwen3.5": Case(make_hybrid, (24, 20), **AS_QWEN3_5),
    "qwen3.5 with experts": Case(partial(make_hybrid, **SHARED), (24, 20), **AS_QWEN3_5),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model of the unquantized values, directory of the FP8 ones, bound)."""
    case, root = CASES[request.param], tmp_path_factory.mktemp("fp8")
    path, plain = root / "fp8", root / "plain"
    kind = type(case.make(path))
    quantize(path, plain, case.block, stored=case.stored, dtype=case.dtype, **case.keys)
    case.after(path)
    hf = kind.from_pretrained(plain, dtype=torch.float32).eval()
    if getattr(hf.config, "num_experts", None):
        hf.set_experts_implementation("eager")  # a loop over experts
    return hf, path, case.bound


def test_layers_that_keep_their_blocks_match_transformers(model: tuple[Any, Path, float]):
    hf, path, bound = model
    config = hold_stored(load_target_config(path), path)
    target = check_target_tensors(path, config)
    linears = [linear for linear in target.modules() if isinstance(linear, Linear)]
    assert any(linear.stored is not None for linear in linears)
    check_layers(hf, path, *GEOMETRY[1], atol=bound, weight_dtype="stored")


def test_all_layers_and_logits_match_transformers(model: tuple[Any, Path, float]):
    hf, path, bound = model
    check_layers(hf, path, *GEOMETRY[1], atol=bound)
