"""The target against transformers: every layer's residual stream, logits and greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where
from tests.support.tiny_checkpoints import LAYERS, edit_json, make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    LLAMA3,
    Case,
    check_layers,
    check_text,
    greedy,
    layer_outputs,
    prompts,
    record,
)

WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "rope_theta": 500.0,
}


def legacy_rope(path: Path) -> None:
    """Write the form of older checkpoints: top-level rope_theta, no rope_parameters."""
    theta = json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit_json(path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=None)


def legacy_window(path: Path) -> None:
    """Write the form of older checkpoints: no layer_types, only the number of full layers."""
    edit_json(path / "config.json", layer_types=None)


CASES = {
    "untied, grouped": Case({}),
    "tied": Case({"tie_word_embeddings": True}),
    "one key-value head": Case({"num_key_value_heads": 1}),
    "as many key-value heads": Case({"num_key_value_heads": 4}),
    "heads as wide as hidden allows": Case({"head_dim": 8}),
    "odd number of heads": Case({"num_attention_heads": 3, "num_key_value_heads": 1}),
    "attention bias": Case({"attention_bias": True}),
    "rope at the top": Case({"rope_theta": 777.0}, legacy_rope),
    "stretched by yarn": Case({"rope_parameters": YARN, "max_position_embeddings": 128}),
    "stretched as llama 3.1": Case({"rope_parameters": LLAMA3}),
    "another epsilon": Case({"rms_norm_eps": 1e-3}),
    "sliding layers by type": Case(
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": WINDOWED,
        }
    ),
    "sliding layers by number": Case(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, legacy_window
    ),
    "a window that is not used": Case(
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}, legacy_window
    ),
    "a window without a size": Case(
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, legacy_window
    ),
    "several files": Case({}, shards="20KB"),
    "several files, tied": Case({"tie_word_embeddings": True}, shards="20KB"),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp("target")
    hf = make_target(path, seed=len(request.param), shards=case.shards, **case.changes)
    case.after(path)
    assert (path / "model.safetensors.index.json").exists() == (case.shards is not None)
    return hf, path


@full_where(lambda model, page_size: page_size != 16 and model != "untied, grouped")
@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY)
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


def test_tiny_target_has_no_near_ties(target: Any):
    for prompt in prompts([3, 17, 40, 1, 8]):
        tokens = prompt + greedy(target.hf, prompt, 40)
        best = layer_outputs(target.hf, tokens)[1][len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3


def test_half_precision_weights_run_in_fp32_on_a_cpu(tmp_path: Path):
    hf = make_target(tmp_path).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(target=str(tmp_path), max_model_len=64))
    assert engine.resolved.target.dtype == "bfloat16"
    weight = engine.components.runner.model.embed_tokens.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, hf.model.embed_tokens.weight.float())
    seen = record(engine)
    (out,) = run(engine, prompts([20]), SamplingParams(temperature=0, max_tokens=10))
    again = type(hf).from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected, _ = layer_outputs(again, prompts([20])[0] + out[:-1])
    request = next(iter(seen))[0]
    outputs = torch.stack([seen[request, p] for p in range(len(expected))]).view(expected.shape)
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-5)


def test_tiny_target_depth_matches_the_drafters(target: Any):
    assert len(target.hf.model.layers) == LAYERS
