"""Weights rounded to codes while loading, as for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.rounding import GROUP, NAMES, rounded, rounded_bytes
from strobe.models.quantization.sizes import held_bytes, weight_bytes
from strobe.models.weight_loading import check_target_tensors, load_draft, load_target
from tests.support.tiny_checkpoints import make_draft, make_target

OPTIONS: dict[str, Any] = {
    "max_positions": 16,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


def random_weight(outputs: int = 12, inputs: int = 3 * GROUP + 10) -> Tensor:
    noise = torch.Generator().manual_seed(2)
    weight = torch.randn(outputs, inputs, generator=noise)
    weight[3] = 0
    weight[4] = 7.5
    return weight


def test_int8_is_within_half_a_step_of_each_row():
    weight = random_weight()
    back = rounded(weight, "int8").rows(0, len(weight))
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((back - weight).abs() <= step * 0.501).all()


def test_int4_is_within_a_step_of_each_group():
    weight = random_weight()
    back = rounded(weight, "int4").rows(0, len(weight))
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP))
    groups = padded.unflatten(1, (-1, GROUP))
    span = groups.amax(2).clamp(min=0) - groups.amin(2).clamp(max=0)
    step = (span / 15).repeat_interleave(GROUP, 1)[:, : weight.shape[1]]
    assert ((back - weight).abs() <= step * 1.01).all()
    assert torch.equal(back[3], weight[3])


def test_an_odd_number_of_inputs_takes_int8():
    weight = random_weight(inputs=33)
    assert torch.equal(rounded(weight, "int4").rows(0, 12), rounded(weight, "int8").rows(0, 12))
    assert rounded_bytes(weight.shape, "int4") == rounded_bytes(weight.shape, "int8")


@pytest.mark.parametrize("name", NAMES)
def test_layers_hold_what_was_planned_for_them(tmp_path: Path, name: str):
    changes = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    make_target(tmp_path, family=Qwen3MoeForCausalLM, mlp_only_layers=[0], **changes)
    config = load_target_config(tmp_path)
    plain = load_target(tmp_path, config, **OPTIONS)
    small = load_target(tmp_path, config, **OPTIONS, rounded=name)
    held = [path for path, m in small.named_modules() if isinstance(m, Linear) and m.stored]
    assert {path.rpartition(".")[2] for path in held} == {
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj",
    }  # fmt: skip
    for path in held:
        product = small.get_submodule(path).product
        weight = plain.get_submodule(path).weight
        (part,) = product.parts
        tensors = (value for value in vars(part).values() if isinstance(value, Tensor))
        assert sum(value.nbytes for value in tensors) == product.nbytes
        bound = 0.01 if name == "int8" else 0.12
        assert (product.dense(torch.float32) - weight).norm() < bound * weight.norm()
    size = sum(p.nbytes for p in small.parameters()) + held_bytes(small)
    planned = check_target_tensors(tmp_path, config)
    assert weight_bytes(planned, torch.float32, fp8=False, rounded=name) == size


def test_drafters_are_rounded_too(tmp_path: Path):
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    target = load_target(tmp_path / "target", load_target_config(tmp_path / "target"), **OPTIONS)
    config = load_draft_config(tmp_path / "draft")
    plain, small = (
        load_draft(tmp_path / "draft", config, target, **OPTIONS, rounded=name)
        for name in (None, "int8")
    )
    features = torch.randn(5, plain.fc.in_features, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5)
    expected = plain.context_kv(features, positions)
    for actual, wanted in zip(small.context_kv(features, positions), expected, strict=True):
        assert 0 < (actual - wanted).norm() < 0.05 * wanted.norm()
