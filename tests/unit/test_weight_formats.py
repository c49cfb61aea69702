"""A new weight format works in every family without a change in layers or families."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.methods import METHODS
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.sampling_params import SamplingParams
from strobe.tools.bench.bench_report import shapes_of
from strobe.tools.checkpoint_info import describe
from tests.support.engine_runs import make_engine, run
from tests.support.int8_format import Int8, to_int8
from tests.support.quantized_checkpoints import is_linear
from tests.support.recurrent_checkpoints import EXPERTS as SHARED
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import make_draft, make_target

CPU = torch.device("cpu")
MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[Path], Any]] = {
    "qwen3": partial(make_target, family=Qwen3ForCausalLM),
    "biased": partial(make_target, family=LlamaForCausalLM, attention_bias=True, mlp_bias=True),
    "experts": partial(make_target, family=Qwen3MoeForCausalLM, **MOE),
    "transposed experts": partial(make_target, family=GptOssForCausalLM, **GPT_OSS),
    "reordered heads": make_hybrid,
    "shared expert": partial(make_hybrid, **SHARED),
}


@pytest.fixture(autouse=True)
def int8(monkeypatch: pytest.MonkeyPatch) -> Int8:
    method = Int8()
    monkeypatch.setitem(METHODS, "int8", method)
    return method


def load(path: Path, **options: Any) -> Any:
    config = load_target_config(path)
    return load_target(path, config, max_positions=64, dtype=torch.float32, device=CPU, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_answers_as_with_dequantized_weights(family: str, tmp_path: Path, int8: Int8):
    FAMILIES[family](tmp_path / "int8")
    to_int8(tmp_path / "int8", tmp_path / "plain")
    quantized, plain = load(tmp_path / "int8"), load(tmp_path / "plain")
    formats = set[Any]()
    for path, linear in plain.named_modules():
        if isinstance(linear, Linear):
            stored = quantized.get_submodule(path)
            formats.add(stored.format)
            assert torch.equal(stored.dense(torch.float32), linear.weight), path
    assert int8 in formats
    draft = make_draft(tmp_path / "draft")
    greedy = SamplingParams(temperature=0, max_tokens=12)
    answers = [
        run(
            make_engine(EngineConfig(str(tmp_path / name), draft=str(draft))),
            [[1, 2, 3], [5, 6, 7, 8, 9]],
            greedy,
        )
        for name in ("int8", "plain")
    ]
    assert answers[0] == answers[1]


def test_experts_are_held_in_fp8_on_demand(tmp_path: Path):
    FAMILIES["experts"](tmp_path)
    plain, small = load(tmp_path), load(tmp_path, fp8=True)
    size = sum(p.nbytes for p in small.parameters())
    size += sum(b.nbytes for n, b in small.named_buffers() if n.endswith("scale"))
    planned = check_target_tensors(tmp_path, load_target_config(tmp_path))
    assert weight_bytes(planned, torch.float32, fp8=True) == size
    linear = small.layers[1].mlp.experts.gate_up_proj
    assert linear.weight.dtype == torch.uint8
    expected = plain.layers[1].mlp.experts.gate_up_proj.weight
    assert (linear.dense(torch.float32) - expected).norm() < 0.04 * expected.norm()


def test_planned_bytes_are_those_held(tmp_path: Path):
    FAMILIES["experts"](tmp_path / "int8")
    to_int8(tmp_path / "int8", tmp_path / "plain")
    model = load(tmp_path / "int8", fp8=True)
    size = sum(p.nbytes for p in model.parameters())
    size += sum(b.nbytes for n, b in model.named_buffers() if n.endswith("scale"))
    planned = check_target_tensors(tmp_path / "int8", load_target_config(tmp_path / "int8"))
    for fp8 in (False, True):
        assert weight_bytes(planned, torch.float32, fp8=fp8) == size


def test_layers_not_stored_in_the_format_stay_dense(tmp_path: Path, int8: Int8):
    FAMILIES["qwen3"](tmp_path / "int8")
    kept = "model.layers.2.mlp.down_proj"
    to_int8(tmp_path / "int8", tmp_path / "plain", lambda n: is_linear(n) and kept not in n)
    layers = load(tmp_path / "int8").layers
    assert layers[2].mlp.down_proj.format is None
    assert layers[2].mlp.gate_up_proj.format is int8


def test_missing_scale_is_named(tmp_path: Path):
    FAMILIES["qwen3"](tmp_path / "int8")
    to_int8(tmp_path / "int8", tmp_path / "plain")
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    del tensors["model.layers.3.self_attn.v_proj.weight_scale"]
    save_file(tensors, tmp_path / "int8" / "model.safetensors")
    with pytest.raises(ValueError, match=r"self_attn\.v_proj\.weight_scale is missing"):
        load(tmp_path / "int8")


@pytest.mark.parametrize("family", ["qwen3", "biased"])
def test_fp8_layers_compute_in_plain_torch(family: str, tmp_path: Path):
    """Biases stay in the model's dtype."""
    FAMILIES[family](tmp_path)
    plain, small = load(tmp_path), load(tmp_path, fp8=True)
    linear = small.layers[0].mlp.gate_up_proj
    assert linear.weight.dtype == torch.float8_e4m3fn
    x = torch.randn(7, linear.in_features, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(small.layers, plain.layers, strict=True):
        actual = small.ops.linear(x, ours.mlp.gate_up_proj, "silu")
        expected = plain.ops.linear(x, theirs.mlp.gate_up_proj, "silu")
        assert 1e-3 < (actual - expected).norm() / expected.norm() < 0.1
        bias = theirs.mlp.gate_up_proj.bias
        assert (bias is None) or torch.equal(ours.mlp.gate_up_proj.bias, bias)


def test_new_format_fills_random_weights_and_reports_itself(tmp_path: Path, int8: Int8):
    FAMILIES["experts"](tmp_path / "int8")
    to_int8(tmp_path / "int8", tmp_path / "plain")
    facts = describe(tmp_path / "int8")
    assert facts["quantization"] == "int8, a scale per tensor, kept as they are"
    resolved = resolve(EngineConfig(str(tmp_path / "int8")))
    assert shapes_of(resolved).widths.experts == 1
    module = load(tmp_path / "int8", open=None)
    experts = [m for m in module.modules() if isinstance(m, Linear) and m.weight.ndim == 3]
    assert experts
    for linear in experts:
        assert linear.format is int8
        assert len(linear.weight.unique()) > 200
        assert 0 < linear.dense(torch.float32).abs().max() < 0.05
