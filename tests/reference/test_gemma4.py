"""Gemma 4's text decoder against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Pair, PlainAnswers, compare, some
from parity import GEOMETRY, Case, check_layers, check_text
from tiny import edit_json, make_draft, make_engine, make_target
from transformers import Gemma4ForCausalLM, Gemma4ForConditionalGeneration

from strobe.bench import floor
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.registry import make_target as make
from strobe.request import SamplingParams

TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
TINY: dict[str, Any] = {
    "rope_theta": None,
    "layer_types": [*TYPES, *TYPES[1:]],
    "sliding_window": 6,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 16,
}


def as_published(path: Path) -> None:
    """The form of the published checkpoints: what full layers have has keys of its own."""
    edit_json(
        path / "config.json",
        per_layer_config=None,
        global_head_dim=32,
        num_global_key_value_heads=1,
    )


ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "rope_theta": 500.0,
        "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
}
CASES = {
    "as published": Case({}, as_published),
    "untied, values of their own, other ropes, no cap": Case(
        {
            "tie_word_embeddings": False,
            "attention_k_eq_v": False,
            "rope_parameters": ROPES,
            "final_logit_softcapping": None,
            "attention_bias": True,
        }
    ),
    "six layers without types, one key-value head": Case(
        {"num_hidden_layers": 6, "layer_types": None, "num_key_value_heads": 1},
        lambda path: edit_json(path / "config.json", layer_types=None, rope_parameters=None),
    ),
    "heads alike": Case({"global_head_dim": 16, "num_global_key_value_heads": None}),
}


BOUND = 3e-4
"""Measured 1.2e-4, and 0.9e-4 between transformers in single and in double precision."""


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, directory)"""
    case, path = CASES[request.param], tmp_path_factory.mktemp("gemma4")
    hf = make_target(
        path, Gemma4ForCausalLM, seed=len(request.param), embedding=0.2, **(TINY | case.changes)
    )
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1::2])
def test_every_layer_and_the_logits_agree_however_the_prompt_is_cut(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget, atol=BOUND)


def test_greedy_text_is_what_transformers_generates(model: tuple[Any, Path]):
    check_text(*model)


def test_beside_its_towers_the_text_decoder_is_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    hf = make_target(
        tmp_path,
        Gemma4ForConditionalGeneration,
        seed=4,
        beside={"vision_config": VISION, "audio_config": None},
        **TINY,
    )
    with caplog.at_level(logging.INFO, "strobe"):
        check_layers(hf, tmp_path, 16, 7, atol=BOUND)
    assert sum("reads text only" in line for line in caplog.messages) == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    make_target(root / "target", Gemma4ForCausalLM, embedding=0.2, **TINY)
    return PlainAnswers(Pair(root / "target", make_draft(root / "draft")))


@pytest.mark.parametrize("c", some(), ids=str)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


def test_the_layers_hold_keys_and_values_of_their_own_shapes(plain: PlainAnswers):
    engine = make_engine(EngineConfig(target=str(plain.pair.target), max_model_len=64))
    store = engine.parts.stores["target"]
    assert [tuple(layer.shape[2:]) for layer in store.layers] == [
        (2, 16), (2, 16), (1, 32), (2, 16), (1, 32)
    ]  # fmt: skip
    assert store.spec.bytes_per_page(16) == 16 * 2 * 4 * (3 * 2 * 16 + 2 * 32)
    assert store.spec.bytes_per_page(store.layers[0].shape[0]) == store.data.nbytes


def test_what_the_bench_counts_is_what_its_products_have(plain: PlainAnswers):
    config = resolve(EngineConfig(target=str(plain.pair.target))).target
    with torch.device("meta"):
        layers = make(config, 1).layers
    held = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert floor.linear_values(config.decoder) == held
    assert floor.kv_values(config.decoder) == 2 * (3 * 2 * 16 + 2 * 32)
    far, near = (floor.attention_operations(config.decoder, 1, n) for n in (100, 99))
    assert far - near == 4 * 4 * 2 * 32  # of full layers only


def test_half_precision_rounds_the_embedding_scale_as_transformers_does(tmp_path: Path):
    hf = make_target(tmp_path, Gemma4ForCausalLM, **TINY).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(target=str(tmp_path), dtype="bfloat16", max_model_len=64))
    engine.add([3, 1, 4], SamplingParams(temperature=0, max_tokens=2))
    model, seen = engine.parts.runner.model, list[torch.Tensor]()
    model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    engine.step()
    ids = torch.tensor([3, 1, 4])
    assert torch.equal(seen[0], hf.model.embed_tokens(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8, but per-layer"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is 256"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2, .* cannot share keys"),
        ({"enable_moe_block": True}, "enable_moe_block is True, .* experts beside"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not known"),
        ({"per_layer_config": {"2": {"window": 4}}}, "window is 4, which is not known"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, "for sliding_attention"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
    ],
)
def test_what_is_not_computed_is_named(
    tmp_path: Path, plain: PlainAnswers, changes: dict[str, Any], message: str
):
    config = plain.pair.target / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(target=str(tmp_path)))
