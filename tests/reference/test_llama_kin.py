"""Families whose layers are Llama's but for a few settings, against transformers; their speculation
against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    MistralForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    SmolLM3ForCausalLM,
)

from strobe.models.architectures import load_target_config
from tests.support.losslessness_matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from tests.support.tiny_checkpoints import make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_rejected,
    check_text,
)

PAD = {"pad_token_id": 0}
"""transformers' default is beyond these vocabularies."""
PHI3 = {**PAD, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


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
    return make_target(path, family, seed=len(request.param), **case.changes), path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1:2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


PAIRS = {
    "qwen2": {"family": Qwen2ForCausalLM},
    "mistral": {"family": MistralForCausalLM, "sliding_window": 9},
    "smollm3": {"family": SmolLM3ForCausalLM, **PAD, "no_rope_layer_interval": 2},
    "phi3": {"family": Phi3ForCausalLM, **PHI3},
}


@pytest.fixture(scope="module", params=PAIRS)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, layers=3, **PAIRS[request.param]))


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
    ],
)
def test_unsupported_value_is_named(
    family: Any, changes: dict[str, Any], message: str, tmp_path: Path
):
    options = {Phi3ForCausalLM: PHI3, SmolLM3ForCausalLM: PAD}
    make_target(tmp_path, family, **options.get(family, {}))
    check_rejected(tmp_path, message, **changes)


def test_only_attentions_inputs_have_biases_in_qwen2(tmp_path: Path):
    make_target(tmp_path, Qwen2ForCausalLM)
    decoder = load_target_config(tmp_path).decoder
    assert decoder.attention_bias
    assert not decoder.output_bias
    assert not decoder.mlp_bias
