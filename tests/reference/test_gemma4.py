"""Gemma 4's text decoder against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
)

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_target_config
from strobe.models.architectures import make_target as make
from strobe.models.model_config import TargetConfig
from strobe.models.weight_counts import WeightCounts
from strobe.sampling_params import SamplingParams
from strobe.tools.bench import floor
from tests.support.engine_runs import make_engine
from tests.support.losslessness_matrix import (
    EXPERT_CASES,
    FAMILY_CASES,
    Pair,
    PlainAnswers,
    compare,
)
from tests.support.tiny_checkpoints import edit_json, make_draft, make_target
from tests.support.transformers_parity import GEOMETRY, Case, check_layers, check_text

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
EXPERTS: dict[str, Any] = TINY | {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
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
    """Write the form of the published checkpoints: separate keys for full-attention layers."""
    edit_json(
        path / "config.json",
        per_layer_config=None,
        global_head_dim=32,
        num_global_key_value_heads=1,
    )


def one_by_one(path: Path) -> None:
    """Split experts into one tensor each, as tools that quantize experts do."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        prefix, leaf = name.rsplit(".", 1)
        for e, value in enumerate(tensors.pop(name)):
            names = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            for own, part in zip(names, value.chunk(len(names)), strict=True):
                tensors[f"{prefix}.{e}.{own}.weight"] = part.contiguous()
    save_file(tensors, path / "model.safetensors")


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
    "untied, separate values, other ropes, no cap": Case(
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
    "more than ten layers": Case({"num_hidden_layers": 12, "layer_types": None}),
    "equal heads": Case({"global_head_dim": 16, "num_global_key_value_heads": None}),
    "experts, as published": Case(EXPERTS, as_published),
    "separate experts, one per token": Case(EXPERTS | {"top_k_experts": 1}, one_by_one),
    "all of five experts, odd sizes": Case(
        EXPERTS | {"num_experts": 5, "top_k_experts": 5, "moe_intermediate_size": 15},
        lambda path: edit_json(
            path / "config.json", moe_intermediate_size=None, expert_intermediate_size=15
        ),
    ),
}


BOUND = 3e-4
"""Measured 1.2e-4, and 0.9e-4 between transformers in single and in double precision."""


def make_gemma(path: Path, family: Any = Gemma4ForCausalLM, **changes: Any) -> Any:
    """Write a tiny target whose routers choose clearly; run its experts as a plain loop."""
    hf = make_target(path, family, embedding=0.2, **changes)
    for name, parameter in hf.named_parameters():
        if "router" in name:
            parameter.data.mul_(4) if parameter.ndim > 1 else parameter.data.add_(1)
    hf.save_pretrained(path)
    hf.set_experts_implementation("eager")
    return hf


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, directory)"""
    case, path = CASES[request.param], tmp_path_factory.mktemp("gemma4")
    hf = make_gemma(path, seed=len(request.param), **(TINY | case.changes))
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1::2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget, atol=BOUND)


def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


def test_text_decoder_is_unchanged_by_towers(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    wrapper = {"vision_config": VISION, "audio_config": None}
    hf = make_gemma(tmp_path, Gemma4ForConditionalGeneration, seed=4, wrapper=wrapper, **EXPERTS)
    with caplog.at_level(logging.INFO, "strobe"):
        check_layers(hf, tmp_path, 16, 7, atol=BOUND)
    assert sum("reads text only" in line for line in caplog.messages) == 1


def test_outer_config_fields_apply_to_text_decoder(tmp_path: Path):
    """Chat answers end with a token that only the outer config names."""
    wrapper = {"vision_config": VISION, "audio_config": None}
    make_gemma(tmp_path, Gemma4ForConditionalGeneration, seed=4, wrapper=wrapper, **TINY)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())["text_config"]
    edit_json(path, eos_token_id=[1, 6], dtype="float16", text_config={**inner, "dtype": None})
    config = load_target_config(tmp_path)
    assert (config.eos_ids, config.dtype) == ((1, 6), "float16")
    edit_json(path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="quantized by quant_method 'fp8'"):
        load_target_config(tmp_path)


UNIFIED = {key: value for key, value in TINY.items() if "per_layer" not in key}


@pytest.mark.parametrize(
    "family", [Gemma4UnifiedForCausalLM, Gemma4UnifiedForConditionalGeneration]
)
def test_text_decoder_of_12b_is_supported(family: Any, tmp_path: Path):
    """It embeds image patches and sound frames without towers."""
    images = {"mm_embed_dim": 16, "mm_posemb_size": 8, "patch_size": 4, "output_proj_dims": 32}
    wrapper = {"vision_config": images, "audio_config": {"audio_embed_dim": 8}}
    wrapped = family is Gemma4UnifiedForConditionalGeneration
    hf = make_target(
        tmp_path, family, seed=3, embedding=0.2, wrapper=wrapper if wrapped else None, **UNIFIED
    )
    check_layers(hf, tmp_path, 16, 7, atol=BOUND)
    check_text(hf, tmp_path)


def make_pair(root: Path, **changes: Any) -> PlainAnswers:
    make_gemma(root / "target", **changes)
    return PlainAnswers(Pair(root / "target", make_draft(root / "draft")))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    return make_pair(tmp_path_factory.mktemp("pair"), **TINY)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    return make_pair(tmp_path_factory.mktemp("sparse"), seed=3, **EXPERTS)


@pytest.mark.parametrize("c", FAMILY_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


@pytest.mark.parametrize("c", EXPERT_CASES)
def test_outputs_equal_plain_decoding_with_experts(c: Any, sparse: PlainAnswers):
    compare(c, sparse.pair, sparse(c.workload))


def test_layers_store_keys_and_values_in_their_own_shapes(plain: PlainAnswers):
    engine = make_engine(EngineConfig(target=str(plain.pair.target), max_model_len=64))
    store = engine.components.stores["target"]
    assert [tuple(layer.shape[2:]) for layer in store.layers] == [
        (2, 16), (2, 16), (1, 32), (2, 16), (1, 32)
    ]  # fmt: skip
    assert store.spec.bytes_per_page(16) == 16 * 2 * 4 * (3 * 2 * 16 + 2 * 32)
    assert store.spec.bytes_per_page(store.layers[0].shape[0]) == store.data.nbytes


def linear_values(answers: PlainAnswers) -> tuple[TargetConfig, int]:
    """Return a target's config and the number of values in its linear layers."""
    config = resolve(EngineConfig(target=str(answers.pair.target))).target
    with torch.device("meta"):
        layers = make(config, 1).layers
    return config, sum(p.numel() for p in layers.parameters() if p.ndim > 1)


def target_counts(config: TargetConfig) -> WeightCounts:
    return floor.Shapes(config, None, 1, floor.Widths(2, 2, 2, 2)).target_counts


def test_bench_counts_match_linear_layers(plain: PlainAnswers):
    config, num_values = linear_values(plain)
    assert target_counts(config).linear == num_values
    assert floor.kv_values(config.decoder) == 2 * (3 * 2 * 16 + 2 * 32)
    far, near = (floor.attention_operations(config.decoder, 1, n) for n in (100, 99))
    assert far - near == 4 * 4 * 2 * 32  # of full layers only


def test_bench_counts_experts_and_mlp(sparse: PlainAnswers):
    config, num_values = linear_values(sparse)
    counts = target_counts(config)
    assert counts.linear + counts.experts == num_values
    assert counts.experts == 5 * 8 * 3 * 24 * 32
    assert floor.active_share(config.decoder) == 3 / 8


def test_embedding_scale_rounds_like_transformers(tmp_path: Path):
    hf = make_target(tmp_path, Gemma4ForCausalLM, **TINY).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(target=str(tmp_path), dtype="bfloat16", max_model_len=64))
    engine.add([3, 1, 4], SamplingParams(temperature=0, max_tokens=2))
    model, seen = engine.components.runner.model, list[torch.Tensor]()
    model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1].value))
    engine.step()
    ids = torch.tensor([3, 1, 4])
    assert torch.equal(seen[0], hf.model.embed_tokens(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is 8, but per-layer"),
        ({"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input is 256"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2, .* cannot share keys"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not known"),
        ({"per_layer_config": {"2": {"window": 4}}}, "window is 4, which is not known"),
        ({"per_layer_config": {"5": {"head_dim": 4}}}, "per_layer_config has '5': .* 0 to 4"),
        ({"per_layer_config": {"a": {"head_dim": 4}}}, "per_layer_config has 'a'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized by quant_method 'fp8'"),
        ({"rope_parameters": {"full_attention": ROPES["full_attention"]}}, "for sliding_attention"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        ({"top_k_experts": 9}, "top_k_experts is 9, but there are 8 experts"),
        ({"num_experts": None}, "num_experts is None, but must be a whole number"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None, but must be"),
        ({"expert_intermediate_size": 16}, "expert_intermediate_size is 16, .* must be moe"),
        ({"enable_moe_block": 1}, "enable_moe_block is 1, but must be true or false"),
        ({"num_shared_experts": 1}, "num_shared_experts is 1, which is not known"),
    ],
)
def test_unsupported_field_is_named(
    tmp_path: Path, sparse: PlainAnswers, changes: dict[str, Any], message: str
):
    config = sparse.pair.target / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(target=str(tmp_path)))


@pytest.mark.parametrize(
    "leaf", ["router.per_expert_scale", "experts.down_proj", "pre_feedforward_layernorm_2.weight"]
)
def test_missing_expert_tensor_is_named(tmp_path: Path, sparse: PlainAnswers, leaf: str):
    path = Path(shutil.copytree(sparse.pair.target, tmp_path / "target"))
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.1.{leaf}"]
    save_file(tensors, path / "model.safetensors")
    tensor = leaf.replace("down_proj", "0.down_proj.weight")
    with pytest.raises(ValueError, match=rf"tensor layers\.1\.{tensor} is missing"):
        resolve(EngineConfig(target=str(path)))


def test_unexpected_experts_are_rejected(tmp_path: Path, sparse: PlainAnswers):
    path = Path(shutil.copytree(sparse.pair.target, tmp_path / "target"))
    edit_json(path / "config.json", enable_moe_block=False)
    with pytest.raises(ValueError, match="is not part of this architecture"):
        resolve(EngineConfig(target=str(path)))
