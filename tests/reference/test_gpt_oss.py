"""gpt-oss against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.mxfp4 import Mxfp4, fill_scales, fill_values
from strobe.models.weight_loading import load_target
from strobe.sampling_params import SamplingParams
from strobe.tools.checkpoint_info import describe
from strobe.tools.doctor.pair_checks import memory_facts
from tests.support.engine_runs import make_engine, run
from tests.support.losslessness_matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from tests.support.quantized_checkpoints import with_mxfp4_experts
from tests.support.tiny_checkpoints import LAYERS, edit_json, make_draft, make_target
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_rejected,
    check_text,
)

SHAPE: dict[str, Any] = {
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
        "rope_theta": 1500.0,
    },
}
ENDS = [7, 23]


def make(path: Path, *, seed: int = 4, **changes: Any) -> Any:
    hf = make_target(path, GptOssForCausalLM, seed=seed, **(SHAPE | changes))
    hf.set_experts_implementation("eager")  # a loop over experts
    return hf


def as_published(path: Path) -> None:
    """Write the keys of the published checkpoints."""
    config = json.loads((path / "config.json").read_text())
    rope = config["rope_parameters"]
    edit_json(
        path / "config.json",
        rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope,
        rope_parameters=None,
        experts_per_token=config["num_experts_per_tok"],
        initial_context_length=32,
        swiglu_alpha=None,
    )


def packed(path: Path, hf: Any) -> None:
    """Write random experts in MXFP4, and set `hf`'s to transformers' values of them."""
    for name, (blocks, scales) in with_mxfp4_experts(path).items():
        parameter = hf.get_parameter(name)
        value = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameter.data.copy_(value.view(parameter.shape))


CASES = {
    "as published, but whole": Case({}, as_published),
    "packed": Case({}),
    "tied, clamped early": Case({"tie_word_embeddings": True, "swiglu_limit": 0.4}),
    "full layers only": Case({"layer_types": ["full_attention"] * LAYERS}),
    "no biases of attention": Case({"attention_bias": False, "num_experts_per_tok": 6}),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Return (transformers' model, directory)."""
    case, path = CASES[request.param], tmp_path_factory.mktemp("gpt_oss")
    hf = make(path, **case.changes)
    case.after(path)
    if request.param == "packed":
        packed(path, hf)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), [GEOMETRY[1], GEOMETRY[3]])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget)


@pytest.mark.parametrize("model", ["as published, but whole", "packed"], indirect=True)
def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    return PlainAnswers(make_pair(tmp_path_factory.mktemp("pair"), make, layers=3))


@pytest.mark.parametrize("c", FAMILY_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


@pytest.mark.parametrize("groups", [3, 4])
def test_mxfp4_values_match_the_format(groups: int):
    """E2M1: a sign, two exponent bits with a bias of 1, one mantissa bit. Also compared with
    transformers, over every pair of values and usual and extreme scales."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)[:, :, :groups]
    scales = torch.tensor([[118, 192, 0, 130]] * 4, dtype=torch.uint8)[None, :, :groups]
    values = torch.empty(1, 4, 64, dtype=torch.uint8)
    words = torch.empty(1, 1, 4, dtype=torch.int32)
    fill_values(values, blocks)
    fill_scales(words, scales)
    out = Mxfp4(32 * groups).dequantize(values, words)

    def value(code: int) -> float:
        sign, exponent, half = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (2 ** (exponent - 1) * (1 + half / 2) if exponent else half / 2)

    expected = [
        value(byte >> shift & 15) * 2.0 ** (int(scales[0, 0, byte // 16 % 4]) - 127)
        for byte in blocks.flatten().tolist()
        for shift in (0, 4)
    ]
    assert out.flatten().tolist() == expected
    reference = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(out, reference.transpose(1, 2).contiguous().view_as(out))


def test_packed_experts_stay_packed(tmp_path: Path):
    make(tmp_path / "whole")
    packed(tmp_path / "packed", make(tmp_path / "packed"))
    models: list[Any] = []
    for name in ("whole", "packed"):
        path, device = tmp_path / name, torch.device("cpu")
        config = load_target_config(path)
        options: dict[str, Any] = {"max_positions": 64, "dtype": torch.float32, "device": device}
        models.append(load_target(path, config, **options))
    held = [
        sum(tensor.nbytes for name, tensor in model.state_dict(keep_vars=True).items())
        + sum(b.nbytes for n, b in model.named_buffers() if n.endswith("proj.scale"))
        for model in models
    ]
    linears = [m for m in models[0].modules() if isinstance(m, Linear) and m.weight.ndim == 3]
    values = sum(linear.weight.numel() for linear in linears)
    # Every group of 32 values takes 16 bytes, but units are of two groups and scales of four.
    assert held[0] - held[1] == values * 4 - 2 * values // 2 - 4 * values // 32
    facts = [describe(tmp_path / name) for name in ("whole", "packed")]
    assert facts[0]["parameters"] == facts[1]["parameters"] == held[0] // 4
    assert facts[1]["quantization"] == "mxfp4, a scale per 1 x 32 values, kept as they are"
    draft, bills = make_draft(tmp_path / "draft"), list[dict[str, Any]]()
    for name in ("whole", "packed"):
        resolved = resolve(EngineConfig(str(tmp_path / name), draft=str(draft)))
        bills.append(memory_facts(resolved))
    head = models[0].output.weight.nbytes  # packed beside the weights, which are freed after it
    assert [bill["weights of target"] for bill in bills] == [size + head for size in held]
    kept = "experts in mxfp4 as in the checkpoint, the rest in float32"
    assert bills[1]["held in"] == kept
    assert "held in" not in bills[0]


def test_random_weights_are_packed_too(tmp_path: Path):
    make(tmp_path)
    packed(tmp_path, make(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    draft = make_draft(tmp_path / "draft")
    config = EngineConfig(str(tmp_path), draft=str(draft), load_format="dummy", method="none")
    engine = make_engine(config)
    linear = engine.components.runner.model.layers[0].mlp.experts.down_proj
    assert linear.weight.dtype == torch.uint8
    weight = linear.dense(torch.float32)
    assert weight.isfinite().all()
    assert 0.01 < weight.std() < 0.1
    run(engine, [[1, 2, 3]], SamplingParams(max_tokens=4))


BAD = {
    "swiglu_alpha": (1.5, "swiglu_alpha is 1.5, which is not supported"),
    "experts_per_token": (4, "experts_per_token is 4, which is not supported"),
    "hidden_act": ("gelu", "hidden_act is 'gelu', which is not supported"),
    "num_local_experts": (1, "num_experts_per_tok is 2, but there are 1 experts"),
    "quantization_config": (
        {"quant_method": "later"},
        "quantized by quant_method 'later', which is not supported",
    ),
    "attention_chunk_size": (8, "attention_chunk_size is 8, which is not known"),
    "rope_parameters": (None, "there is no rope_scaling"),
}


@pytest.mark.parametrize("key", BAD)
def test_unsupported_field_is_named(tmp_path: Path, key: str):
    make(tmp_path)
    value, message = BAD[key]
    check_rejected(tmp_path, message, **{key: value})


def test_packed_experts_need_whole_blocks(tmp_path: Path):
    make(tmp_path, intermediate_size=24)
    check_rejected(
        tmp_path,
        "size of 24 does not divide into MXFP4's blocks of 32",
        quantization_config={"quant_method": "mxfp4"},
    )
