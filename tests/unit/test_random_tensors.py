"""Random weights of quantized checkpoints, which benchmarks measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.linear import Linear
from strobe.models.quantization.sizes import linear_bytes
from strobe.sampling_params import SamplingParams
from strobe.tools.bench.bench_report import shapes_of
from strobe.tools.bench.published_shapes import FORMATS, directories
from tests.support.engine_runs import make_engine, run
from tests.support.tiny_checkpoints import edit_json, make_draft, make_target

BITS = {
    "modelopt-mixed": 4.5, "nvfp4": 4.5, "int4-g128": 4.125, "fp8-rows": 8, "fp8-block": 8,
    "gptq-int4": 4.125, "awq-int4": 4.1875,
}  # fmt: skip
"""Of a value of the MLP in each format, without what rows share."""
MOE = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}


def write(path: Path, name: str, **options: Any) -> EngineConfig:
    """Write the config of a target in a format; return settings for random weights."""
    make_target(path / "target", hidden_size=128, intermediate_size=256, **options)
    (path / "target" / "model.safetensors").unlink()
    edit_json(path / "target" / "config.json", quantization_config=FORMATS[name])
    return EngineConfig(
        target=str(path / "target"),
        device="cpu",
        dtype="float32",
        weight_dtype="stored",
        load_format="dummy",
        kv_cache_memory="4MiB",
        max_num_seqs=2,
        max_model_len=64,
    )


def linears(config: EngineConfig) -> dict[str, Linear]:
    engine = make_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    run(engine, [[5, 1, 60], [7] * 9], params)
    model = engine.runner.model
    return {path: m for path, m in model.named_modules() if isinstance(m, Linear)}


@pytest.mark.parametrize("name", FORMATS)
def test_layers_hold_what_the_config_says(tmp_path: Path, name: str):
    config = write(tmp_path, name)
    layers = linears(config)
    mlp = layers["layers.0.mlp.down_proj"]
    assert mlp.stored is not None
    assert mlp.dense(torch.float32).abs().max() < 8
    values = mlp.in_features * mlp.out_features
    assert 8 * linear_bytes(mlp, torch.float32) / values == pytest.approx(BITS[name], abs=0.3)
    assert (layers["lm_head"].stored is not None) == (name == "modelopt-mixed")
    widths = shapes_of(resolve(config)).widths
    assert BITS[name] / 8 - 0.05 < widths.linear < (1.1 if name != "modelopt-mixed" else 0.9)
    assert widths.head == (4 if name != "modelopt-mixed" else pytest.approx(0.5625, abs=0.01))
    tensors = [value for part in mlp.stored.parts for value in vars(part).values()]
    assert mlp.stored.nbytes == sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("name", ["nvfp4", "int4-g128", "fp8-rows", "gptq-int4", "fp8-block"])
def test_experts_hold_what_the_config_says(tmp_path: Path, name: str):
    config = write(tmp_path, name, family=Qwen3MoeForCausalLM, **MOE)
    experts = linears(config)["layers.1.mlp.experts.down_proj"]
    assert (experts.held_experts is None) == name.startswith("fp8")
    assert experts.dense(torch.float32).abs().max() < 8
    widths = shapes_of(resolve(config)).widths
    assert widths.experts == pytest.approx(BITS[name] / 8, abs=0.04)


def test_floor_counts_an_unquantized_drafter(tmp_path: Path):
    make_draft(tmp_path / "draft")
    config = write(tmp_path, "modelopt-mixed")
    make_target(tmp_path / "other")
    edit_json(tmp_path / "other" / "config.json", quantization_config=FORMATS["fp8-rows"])
    (tmp_path / "other" / "model.safetensors").unlink()
    config = config.with_(target=str(tmp_path / "other"), draft=str(tmp_path / "draft"))
    widths = shapes_of(resolve(config)).widths
    assert widths.draft == 4
    assert widths.draft_output in (None, 4)
    assert widths.linear < 2


def test_shapes_name_a_format_after_a_slash():
    with directories("qwen3-8b/int4-g128") as (target, _):
        assert '"num_bits": 4' in (Path(target) / "config.json").read_text()
    for name in ("qwen3-8b/int5", "demo/nvfp4", "qwen3-8b/"):
        with (
            pytest.raises(ValueError, match="what follows / must be one of modelopt-mixed, nvfp4"),
            directories(name),
        ):
            pass
