"""Weights in FP8, the drafter's copy of the head, and checkpoints in FP8."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.fp8 import dequantized, fp8_rows
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.weight_loading import (
    check_target_tensors,
    load_draft,
    load_target,
)
from strobe.sampling_params import SamplingParams
from strobe.tools.checkpoint_info import describe
from strobe.tools.doctor.pair_checks import memory_facts
from tests.support.engine_runs import make_engine, run
from tests.support.quantized_checkpoints import expanded, is_linear, quantize
from tests.support.tiny_checkpoints import make_draft, make_target

LOAD_OPTIONS: dict[str, Any] = {
    "max_positions": 40,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "fp8": True,
}
BLOCK = (20, 28)
"""Divides none of the tiny models' sizes."""
Pair = tuple[Path, Path]
"""A checkpoint in FP8, and one with the same values unquantized."""
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (Qwen3ForCausalLM, {}),
    "experts": (
        Qwen3MoeForCausalLM,
        {"moe_intermediate_size": 36, "num_experts": 6, "num_experts_per_tok": 2},
    ),
}


def test_fp8_rows_keep_four_bits_and_the_largest_value():
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(3))
    weight[7] = 0
    weight *= torch.logspace(-6, 6, 5000)[:, None]
    rows, scale = fp8_rows(weight)
    assert rows.dtype == torch.float8_e4m3fn
    assert scale[7] == 1
    back = rows.float() * scale[:, None]
    rounding = scale[:, None] * 2.0**-10  # half a step among subnormal values
    assert ((back - weight).abs() <= weight.abs() * 2.0**-4 + rounding).all()
    largest = weight.abs().amax(1)
    assert torch.allclose(back.abs().amax(1), largest)


@pytest.mark.parametrize(
    ("vocab", "changes", "copied"),
    [
        (64, {}, True),
        (61, {}, False),
        (64, {"final_logit_softcapping": 9.0}, False),
        (64, {"output_multiplier": 0.5}, False),
    ],
    ids=str,
)
def test_drafter_copies_the_head_if_it_can_use_it(
    vocab: int, changes: dict[str, float], copied: bool, tmp_path: Path
):
    make_target(tmp_path / "target", vocab_size=vocab)
    directory = make_draft(tmp_path / "draft", top={"vocab_size": vocab, **changes})
    target = load_target(
        tmp_path / "target", load_target_config(tmp_path / "target"), **LOAD_OPTIONS
    )
    draft = load_draft(directory, load_draft_config(directory), target, **LOAD_OPTIONS)
    assert target.lm_head is not None
    assert target.lm_head.weight.dtype == draft.output.weight.dtype == torch.float32
    assert target.layers[0].self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    assert (draft.fp8_head is not None) == copied
    if draft.fp8_head is not None:
        weight = draft.output.weight
        assert draft.fp8_head.weight.dtype == torch.float8_e4m3fn
        assert (draft.fp8_head.dense(torch.float32) - weight).norm() < 0.04 * weight.norm()
    assert not [name for name, _ in draft.named_parameters() if "head" in name]


# checkpoints


@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (1, 1), (1500, 3)])
def test_blocks_are_multiplied_with_their_scales(shape: tuple[int, int]):
    noise = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=noise).to(torch.float8_e4m3fn)
    scale = torch.rand([-(-size // 128) for size in shape], generator=noise) + 0.1
    expected = weight.float() * expanded(scale, *shape, (128, 128))
    assert torch.equal(dequantized(weight, scale, (128, 128), torch.float32), expected)
    two = weight.expand(2, *shape), scale.expand(2, *scale.shape)
    both = dequantized(*two, (128, 128), torch.bfloat16)
    assert torch.equal(both[1], expected.bfloat16())


def make_pair(directory: Path, family: str, **options: Any) -> Pair:
    kind, shape = FAMILIES[family]
    make_target(directory / "fp8", kind, **shape)
    quantize(directory / "fp8", directory / "plain", BLOCK, **options)
    return directory / "fp8", directory / "plain"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directories = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {
        family: make_pair(directory, family, fmt="e4m3", modules_to_not_convert=["lm_head"])
        for family, directory in directories.items()
    }


def loaded(path: Path, *, fp8: bool = False) -> Any:
    return load_target(path, load_target_config(path), **{**LOAD_OPTIONS, "fp8": fp8})


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_checkpoint_matches_scaled_linear_layers(
    pairs: dict[str, Pair], family: str, tmp_path: Path
):
    loaded_fp8, loaded_plain = map(loaded, pairs[family])
    for name, value in loaded_plain.named_parameters():
        layer, _, leaf = name.rpartition(".")
        module = loaded_fp8.get_submodule(layer)
        is_linear = isinstance(module, Linear) and leaf == "weight"
        actual = module.dense(torch.float32) if is_linear else module.get_parameter(leaf)
        assert torch.equal(actual, value), name
    draft, prompts = make_draft(tmp_path), [[1, 2, 3], [5, 6, 7, 8, 9]]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    answers = [
        run(make_engine(EngineConfig(str(path), draft=str(draft))), prompts, greedy)
        for path in pairs[family]
    ]
    assert answers[0] == answers[1]


def test_fp8_layers_come_from_fp8_tensors(pairs: dict[str, Pair]):
    small, plain = pairs["dense"]
    in_full, in_fp8 = loaded(plain), loaded(small, fp8=True)
    linear = in_fp8.layers[0].self_attn.qkv_proj
    assert linear.weight.dtype == torch.float8_e4m3fn
    back = linear.dense(torch.float32)
    full_weight = in_full.layers[0].self_attn.qkv_proj.weight
    assert (back - full_weight).norm() < 0.04 * full_weight.norm()
    check_size(small, in_full, fp8=False)
    check_size(small, in_fp8, fp8=True)
    assert not resolve(EngineConfig(str(small))).backends.weights.fp8, "this device has no FP8"


def check_size(path: Path, module: Any, *, fp8: bool) -> None:
    """Check that a target's weights take the planned number of bytes."""
    num_bytes = sum(p.nbytes for p in module.parameters())
    num_bytes += sum(b.nbytes for n, b in module.named_buffers() if n.endswith("scale"))
    planned = check_target_tensors(path, load_target_config(path))
    assert weight_bytes(planned, torch.float32, fp8=fp8) == num_bytes


def test_unconverted_modules_are_loaded_as_stored(tmp_path: Path):
    """Also a fused layer of which only one part is unconverted, here the keys."""
    full = ["model.layers.1.self_attn", "model.layers.2.mlp.down_proj"]
    partly = "model.layers.3.self_attn.k_proj"
    names = [*full, partly, "lm_head"]

    def stored(name: str) -> bool:
        return is_linear(name) and not name.startswith(tuple(names))

    small, plain = make_pair(tmp_path, "dense", stored=stored, modules_to_not_convert=names)
    expected, in_fp8, in_full = loaded(plain), loaded(small, fp8=True), loaded(small)
    unconverted = {
        name for name, part in in_fp8.named_modules() if getattr(part, "format", None)
    } ^ {
        f"layers.{i}.{name}"
        for i in range(len(in_fp8.layers))
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    }
    assert unconverted == {
        "layers.1.self_attn.qkv_proj",
        "layers.1.self_attn.o_proj",
        "layers.2.mlp.down_proj",
        "layers.3.self_attn.qkv_proj",
    }
    for name in unconverted:
        assert torch.equal(in_fp8.get_submodule(name).weight, expected.get_submodule(name).weight)
    for name, value in expected.named_parameters():
        assert torch.equal(in_full.get_parameter(name), value), name
    check_size(small, in_fp8, fp8=True)


def test_memory_bill_reports_fp8_storage(
    pairs: dict[str, Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    facts = {family: [describe(path) for path in pair] for family, pair in pairs.items()}
    for small, plain in facts.values():
        assert small["parameters"] == plain["parameters"]
        assert small["bytes_on_disk"] < plain["bytes_on_disk"]
        assert small["quantization"].startswith("fp8, a scale per 20 x 28 values, ")
    rows = "kept in FP8 with a scale per row on a GPU with FP8, else dequantized"
    assert facts["dense"][0]["quantization"].endswith(f"values, {rows}")
    kept = f"values, experts kept as they are, the rest {rows}"
    assert facts["experts"][0]["quantization"].endswith(kept)
    draft, bills = make_draft(tmp_path), list[dict[str, Any]]()
    for path in pairs["experts"]:
        resolved = resolve(EngineConfig(str(path), draft=str(draft)))
        bills.append(memory_facts(resolved))
    models = [loaded(path) for path in pairs["experts"]]
    small, size = (sum(p.nbytes for p in model.parameters()) for model in models)
    scales = sum(b.nbytes for n, b in models[0].named_buffers() if n.endswith("scale"))
    assert 3 * (small + scales) < 2 * size
    head = 4 * resolved.target.decoder.vocab_size * resolved.target.decoder.hidden_size
    assert [bill["weights of target"] for bill in bills] == [small + scales + head, size + head]
    assert bills[0]["held in"] == "experts in fp8 as in the checkpoint, the rest in float32"
    assert "held in" not in bills[1]
    with caplog.at_level(logging.INFO, "strobe.engine.build"):
        make_engine(EngineConfig(str(pairs["experts"][0])))
    assert f"Weights in fp8 take {small} bytes in memory." in caplog.messages


NAMES = {
    "dense": "model.layers.0.mlp.up_proj.weight",
    "experts": "model.layers.1.mlp.experts.4.down_proj.weight",
}
DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor], str], object], str]] = {
    "no scale": (lambda t, name: t.pop(f"{name}_scale_inv"), "weight_scale_inv is missing"),
    "another scale": (
        lambda t, name: t.update({f"{name}_scale_inv": torch.ones(1, 1)}),
        r"weight_scale_inv has shape \[1, 1\], config.json asks for \[[23], 2\]",
    ),
    "a scale of whole numbers": (
        lambda t, name: t.update({f"{name}_scale_inv": t[f"{name}_scale_inv"].int()}),
        "weight_scale_inv holds I32 values",
    ),
    "a scale of nothing": (
        lambda t, name: t.update({name: t[name].float()}),
        "weight_scale_inv is not part of",
    ),
    "static": (
        lambda t, name: t.update({name.replace("weight", "input_scale"): torch.ones(1)}),
        "input_scale is not part of",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_mismatched_scales_are_named(
    pairs: dict[str, Pair], tmp_path: Path, family: str, name: str
):
    change, message = DAMAGES[name]
    small, _ = pairs[family]
    tensors = load_file(small / "model.safetensors")
    change(tensors, NAMES[family])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((small / "config.json").read_text())
    own = NAMES[family].removeprefix("model.").removesuffix("weight").replace(".", r"\.")
    with pytest.raises(ValueError, match=own + message):
        check_target_tensors(tmp_path, load_target_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantized by bitsandbytes, which is not supported",
        ),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (
            {"weight_block_size": None, "activation_scheme": "other"},
            "activation_scheme is 'other'",
        ),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"rotation": True}, "rotation is True"),
    ],
    ids=str,
)
def test_unsupported_quantization_is_rejected_by_name(
    pairs: dict[str, Pair], tmp_path: Path, changes: dict[str, Any], message: str
):
    config = json.loads((pairs["dense"][0] / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_target_config(tmp_path)
