"""Llama against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from tests.support.losslessness_matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from tests.support.tiny_checkpoints import edit_json, make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    LLAMA3,
    Case,
    check_layers,
    check_rejected,
    check_text,
)


def as_published(path: Path) -> None:
    """Write the form of the published checkpoints: rope_scaling next to rope_theta, no head_dim."""
    parameters = json.loads((path / "config.json").read_text())["rope_parameters"]
    theta = parameters.pop("rope_theta")
    edit_json(
        path / "config.json",
        rope_parameters=None,
        rope_theta=theta,
        rope_scaling=parameters,
        head_dim=None,
    )


CASES = {
    "untied, stretched as published": Case(
        {"head_dim": None, "rope_parameters": LLAMA3}, as_published
    ),
    "tied, heads narrower than hidden allows": Case({"tie_word_embeddings": True, "head_dim": 6}),
    "biases everywhere": Case({"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "one key-value head": Case({"num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    case, path = CASES[request.param], tmp_path_factory.mktemp("llama")
    hf = make_target(path, LlamaForCausalLM, seed=len(request.param), **case.changes)
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1::2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, layers=3, family=LlamaForCausalLM, rope_parameters=LLAMA3))


@pytest.mark.parametrize("c", FAMILY_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


def test_llama_has_no_query_or_key_norms(plain: PlainAnswers):
    """Otherwise a checkpoint with norms would run without them."""
    from strobe.models.weight_loading import check_target_tensors

    resolved = resolve(EngineConfig(target=str(plain.pair.target)))
    own = check_target_tensors(plain.pair.target, resolved.target)
    model = LlamaForCausalLM.from_pretrained(plain.pair.target)
    num_values = sum(p.numel() for p in own.parameters())
    assert num_values == sum(p.numel() for p in model.parameters())
    assert not any("q_norm" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("key", ["query_pre_attn_scalar", "attn_logit_softcapping"])
def test_unknown_key_is_named(tmp_path: Path, key: str):
    make_target(tmp_path, LlamaForCausalLM)
    check_rejected(tmp_path, f"{key} is 3, which is not known", **{key: 3})
