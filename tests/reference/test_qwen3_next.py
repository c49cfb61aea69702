"""Qwen3-Next against transformers; its speculation against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.models.architectures import load_target_config
from strobe.models.weight_loading import load_target
from tests.support.losslessness_matrix import EXPERT_CASES, PlainAnswers, compare, make_pair
from tests.support.quantized_checkpoints import quantize
from tests.support.recurrent_checkpoints import KINDS, make_next
from tests.support.tiny_checkpoints import LAYERS, edit_json, join_experts
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_rejected,
    check_text,
)

BOUND = 1e-3
"""As for Qwen3.5."""


def as_published(path: Path) -> None:
    """Write the keys of the published configs, whose layer types follow from an interval, and
    tensors of a drafting head."""
    edit_json(
        path / "config.json",
        layer_types=None,
        full_attention_interval=2,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=None,
        partial_rotary_factor=0.25,
    )
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors")


CASES = {
    "as published": Case({"layer_types": [KINDS[i % 2] for i in range(LAYERS)]}, as_published),
    "joined experts, tied": Case({"tie_word_embeddings": True}, join_experts),
    "three value heads of a key head": Case(
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 8}
    ),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp("qwen3_next")
    hf = make_next(path, seed=len(request.param), **case.changes)
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1:2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget, atol=BOUND)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, make_next, layers=3, layer_types=KINDS[:3]))


@pytest.mark.parametrize("c", EXPERT_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


def loaded(path: Path) -> dict[str, torch.Tensor]:
    target = load_target(
        path,
        load_target_config(path),
        max_positions=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return target.state_dict()


def test_stacked_projections_load_in_fp8(tmp_path: Path):
    """Blocks of scales belong to rows as they are stored."""
    make_next(tmp_path / "target")
    plain = tmp_path / "plain"
    quantize(tmp_path / "target", plain, (16, 16), stored=lambda name: name.endswith("qkvz.weight"))
    quantized = loaded(tmp_path / "target")
    for name, value in loaded(plain).items():
        assert torch.equal(quantized[name], value), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ({"linear_num_key_heads": 3}, "is not a multiple of linear_num_key_heads 3"),
    ],
)
def test_unsupported_value_is_named(changes: dict[str, Any], message: str, tmp_path: Path):
    make_next(tmp_path)
    check_rejected(tmp_path, message, **changes)
