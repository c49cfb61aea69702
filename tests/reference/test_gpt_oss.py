"""gpt-oss against transformers, and its speculation against plain decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import FAMILY_CASES, PlainAnswers, compare, make_pair
from parity import GEOMETRY, Case, check_layers, check_rejected, check_text
from safetensors.torch import load_file, save_file
from tiny import LAYERS, edit_json, make_draft, make_target
from transformers import GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_target_config
from strobe.models.load import check_draft_tensors, check_target_tensors, load_target
from strobe.models.quantization.mxfp4 import unpack
from strobe.tools.doctor.pair_checks import memory_bill
from strobe.tools.info import describe

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
    noise = torch.Generator().manual_seed(5)
    tensors = load_file(path / "model.safetensors")
    for i, layer in enumerate(hf.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{i}.mlp.experts.{name}"
            count, inner, rows = tensors.pop(key).shape
            blocks = torch.randint(0, 256, (count, rows, inner // 32, 16), generator=noise)
            scales = torch.randint(121, 124, (count, rows, inner // 32), generator=noise)
            blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
            tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales
            value = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            getattr(layer.mlp.experts, name).data.copy_(value.view(count, inner, rows))
    save_file(tensors, path / "model.safetensors")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    edit_json(path / "config.json", quantization_config=config)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_values_match_the_format(dtype: torch.dtype):
    """E2M1: a sign, two exponent bits with a bias of 1, one mantissa bit. Also compared with
    transformers, over every pair of values and the usual scales."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    scales = torch.tensor([[118, 127, 120, 130]] * 4, dtype=torch.uint8)[None]
    out = torch.empty(1, 4, 128, dtype=dtype)
    unpack(out, blocks, scales)

    def value(code: int) -> float:
        sign, exponent, half = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        return sign * (2 ** (exponent - 1) * (1 + half / 2) if exponent else half / 2)

    expected = [
        value(byte >> shift & 15) * 2.0 ** (int(scales[0, 0, byte // 16 % 4]) - 127)
        for byte in range(256)
        for shift in (0, 4)
    ]
    assert out.flatten().tolist() == expected
    reference = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(out, reference.transpose(1, 2).contiguous().view_as(out))


def test_packed_experts_are_counted_in_full(tmp_path: Path):
    make(tmp_path / "whole")
    packed(tmp_path / "packed", make(tmp_path / "packed"))
    sizes: list[int] = []
    for name in ("whole", "packed"):
        path, device = tmp_path / name, torch.device("cpu")
        config = load_target_config(path)
        model = load_target(path, config, max_positions=64, dtype=torch.float32, device=device)
        sizes.append(sum(p.nbytes for p in model.parameters()))
    assert sizes[0] == sizes[1]
    facts = [describe(tmp_path / name) for name in ("whole", "packed")]
    assert facts[0]["parameters"] == facts[1]["parameters"] == sizes[0] // 4
    assert facts[1]["quantization"] == "mxfp4, a scale per 1 x 32 values, dequantized when loaded"
    draft, bills = make_draft(tmp_path / "draft"), list[dict[str, Any]]()
    for name in ("whole", "packed"):
        resolved = resolve(EngineConfig(str(tmp_path / name), draft=str(draft)))
        assert resolved.draft is not None
        modules = (
            check_target_tensors(tmp_path / name, resolved.target),
            check_draft_tensors(draft, resolved.draft),
        )
        bills.append(memory_bill(resolved, *modules))
    head = model.output.weight.nbytes  # packed beside the weights, which are freed after it
    assert [bill["target's weights"] for bill in bills] == [sizes[0] + head, sizes[1] + head]
    assert bills[1]["held in"] == "float32; the checkpoint has them in mxfp4"
    assert "held in" not in bills[0]


BAD = {
    "swiglu_alpha": (1.5, "swiglu_alpha is 1.5, which is not supported"),
    "experts_per_token": (4, "experts_per_token is 4, which is not supported"),
    "hidden_act": ("gelu", "hidden_act is 'gelu', which is not supported"),
    "num_local_experts": (1, "num_experts_per_tok is 2, but there are 1 experts"),
    "quantization_config": ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
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
