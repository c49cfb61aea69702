"""Qwen3 with experts against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_target_config
from strobe.models.architectures import make_target as make_module
from strobe.models.families.experts import Experts
from strobe.models.layers import MLP
from tests.support.losslessness_matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from tests.support.tiny_checkpoints import edit_json, join_experts, make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_rejected,
    check_text,
)

SHAPE: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}


def as_published(path: Path) -> None:
    """Write the keys of the published checkpoints."""
    config = json.loads((path / "config.json").read_text())
    edit_json(
        path / "config.json",
        num_local_experts=None,
        num_experts=config["num_local_experts"],
        rope_parameters=None,
        rope_theta=config["rope_parameters"]["rope_theta"],
        rope_scaling=None,
        max_window_layers=28,
        qkv_bias=False,
        use_qk_norm=True,
        shared_expert_intermediate_size=0,
    )


CASES = {
    "as published": Case({}, as_published),
    "joined, tied": Case({"tie_word_embeddings": True}, join_experts),
    "weights as they are": Case({"norm_topk_prob": False, "num_experts_per_tok": 2}),
    "one expert of all": Case({"num_experts_per_tok": 1, "num_key_value_heads": 1}),
    "every expert": Case({"num_experts_per_tok": 8, "attention_bias": True}),
    "some layers dense": Case({"mlp_only_layers": [2], "decoder_sparse_step": 1}),
    "every other layer dense": Case({"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "a window": Case({"use_sliding_window": True, "sliding_window": 6}),
    "odd sizes": Case({"moe_intermediate_size": 15, "num_experts": 5}),
    "several files": Case({}, shards="20KB"),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    case, path = CASES[request.param], tmp_path_factory.mktemp("qwen3_moe")
    changes = SHAPE | case.changes
    hf = make_target(path, Qwen3MoeForCausalLM, seed=3, shards=case.shards, **changes)
    hf.set_experts_implementation("eager")  # a loop over experts
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), [GEOMETRY[1], GEOMETRY[3]])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


@pytest.mark.parametrize("model", ["as published", "joined, tied"], indirect=True)
def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, layers=3, family=Qwen3MoeForCausalLM, seed=3, **SHAPE))


@pytest.mark.parametrize("c", FAMILY_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


def test_layers_have_experts_or_mlps_as_the_config_says(tmp_path: Path):
    changes = SHAPE | {"mlp_only_layers": [3], "decoder_sparse_step": 2}
    make_target(tmp_path, Qwen3MoeForCausalLM, **changes)
    with torch.device("meta"):
        target = make_module(load_target_config(tmp_path), 4)
    kinds = [type(getattr(layer.mlp, "experts", layer.mlp)) for layer in target.layers]
    assert kinds == [MLP, Experts, MLP, MLP, MLP]


BAD = {
    "num_experts_per_tok": (9, "num_experts_per_tok is 9, but there are 8 experts"),
    "mlp_only_layers": ([7], "mlp_only_layers holds 7, but the layers are 0 to 4"),
    "use_qk_norm": (False, "use_qk_norm is False, which is not supported"),
    "shared_expert_intermediate_size": (32, "shared_expert_intermediate_size is 32"),
    "n_group": (4, "n_group is 4, which is not known"),
}


@pytest.mark.parametrize("key", BAD)
def test_unsupported_field_is_named(tmp_path: Path, key: str):
    make_target(tmp_path, Qwen3MoeForCausalLM, **SHAPE)
    value, message = BAD[key]
    check_rejected(tmp_path, message.replace("[", r"\["), **{key: value})


def test_missing_expert_is_named(tmp_path: Path):
    make_target(tmp_path, Qwen3MoeForCausalLM, **SHAPE)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.5\.up_proj\.weight is missing"):
        resolve(EngineConfig(target=str(tmp_path)))
