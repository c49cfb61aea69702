"""Families whose layers are Llama's but for a few settings, against transformers; their speculation
against plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Ministral3ForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    SmolLM3ForCausalLM,
)

from strobe.models.architectures import load_target_config
from strobe.models.architectures import make_target as make_module
from tests.support.losslessness_matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from tests.support.target_families import FAMILIES, MINISTRAL3, PAD, PHI3
from tests.support.tiny_checkpoints import make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_rejected,
    check_text,
)


def nest(path: Path) -> None:
    """Write the form of the published checkpoints: the text's config inside a multimodal one, and
    tensors for images."""
    text = json.loads((path / "config.json").read_text())
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": text.pop("dtype"),
        "text_config": text,
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "vision_config": {"model_type": "pixtral"},
    }
    del text["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    named["vision_tower.patch_conv.weight"] = torch.ones(2, 3)
    named["multi_modal_projector.norm.weight"] = torch.ones(4)
    save_file(named, path / "model.safetensors")


CASES: dict[str, tuple[Any, Case]] = {
    "qwen2": (Qwen2ForCausalLM, Case({})),
    "qwen2, windows in the last layers": (
        Qwen2ForCausalLM,
        Case({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ),
    "mistral, no window": (MistralForCausalLM, Case({"sliding_window": None})),
    "mistral, windows": (
        MistralForCausalLM,
        Case({"sliding_window": 7, "head_dim": 6, "num_key_value_heads": 1}),
    ),
    "mistral, as Mistral Small 3.2": (
        MistralForCausalLM,
        Case({"sliding_window": None, "rope_theta": 1e6}, nest),
    ),
    "ministral3": (Ministral3ForCausalLM, Case(MINISTRAL3)),
    "ministral3, as published": (
        Ministral3ForCausalLM,
        Case({**MINISTRAL3, "tie_word_embeddings": True}, nest),
    ),
    "smollm3": (SmolLM3ForCausalLM, Case({**PAD, "no_rope_layer_interval": 2})),
    "smollm3, windows without rope": (
        SmolLM3ForCausalLM,
        Case(
            {
                **PAD,
                "use_sliding_window": True,
                "sliding_window": 6,
                "no_rope_layer_interval": 2,
            }
        ),
    ),
    "phi3": (Phi3ForCausalLM, Case({**PHI3, "sliding_window": None})),
    "phi3, windows": (Phi3ForCausalLM, Case({**PHI3, "sliding_window": 6})),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    family, case = CASES[request.param]
    path = tmp_path_factory.mktemp("kin")
    hf = make_target(path, family, seed=len(request.param), **case.changes)
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1:2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


PAIRS = ("qwen2", "mistral", "ministral3", "smollm3", "phi3")


@pytest.fixture(scope="module", params=PAIRS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    write, changes = FAMILIES[request.param]
    return PlainAnswers(make_pair(root, write, layers=3, **changes))


@pytest.mark.parametrize("c", FAMILY_CASES[:3])
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            Phi3ForCausalLM,
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope type 'longrope' is not supported",
        ),
        (
            Phi3ForCausalLM,
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}},
            "partial_rotary_factor is 0.75",
        ),
        (SmolLM3ForCausalLM, {"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        (Qwen2ForCausalLM, {"use_mrope": True}, "use_mrope is True"),
        (MistralForCausalLM, {"sliding_window": -1}, "sliding_window is -1"),
        (
            Ministral3ForCausalLM,
            {"rope_parameters": {**MINISTRAL3["rope_parameters"], "llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta is -1",
        ),
    ],
)
def test_unsupported_value_is_named(
    family: Any, changes: dict[str, Any], message: str, tmp_path: Path
):
    options = {
        Ministral3ForCausalLM: MINISTRAL3,
        Phi3ForCausalLM: PHI3,
        SmolLM3ForCausalLM: PAD,
    }
    make_target(tmp_path, family, **options.get(family, {}))
    check_rejected(tmp_path, message, **changes)


def test_queries_of_the_training_length_need_no_factors(tmp_path: Path):
    make_target(tmp_path, Ministral3ForCausalLM, **MINISTRAL3)
    config = load_target_config(tmp_path)
    assert config.decoder.max_position == 256
    short, long = (make_module(config, length) for length in (8, 9))
    assert not hasattr(short.layers[0], "scales")
    assert hasattr(long.layers[0], "scales")


def test_only_attentions_inputs_have_biases_in_qwen2(tmp_path: Path):
    make_target(tmp_path, Qwen2ForCausalLM)
    decoder = load_target_config(tmp_path).decoder
    assert decoder.attention_bias
    assert not decoder.output_bias
    assert not decoder.mlp_bias
