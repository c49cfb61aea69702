"""Tiny checkpoints that compressed-tensors, AutoRound, AutoAWQ, llm-compressor and ModelOpt wrote,
and tensors under ModelOpt's names: logits against those of the library's own dequantization."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.models.architectures import load_target_config
from strobe.models.weight_loading import check_target_tensors, load_target
from tests.support.tested_formats import RECORDED
from tests.support.tiny_checkpoints import edit_json

DIRECTORY = Path(__file__).parents[1] / "recorded"
MIXED = "compressed-tensors-mixed"
Tensors = dict[str, Tensor]


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention of one sequence over itself. q, k, v [T, heads, D]."""
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).flatten(1)


def logits_of(directory: Path, ids: Tensor) -> Tensor:
    config = load_target_config(directory)
    target = load_target(
        directory,
        config,
        max_positions=len(ids),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    x, _ = target(ids, torch.arange(len(ids)), attend)  # type: ignore[arg-type]
    return target.head(x)


def check_logits(directory: Path, name: str) -> None:
    expected = load_file(DIRECTORY / name / "expected.safetensors")
    actual = logits_of(directory, expected["ids"])
    torch.testing.assert_close(actual, expected["logits"], atol=2e-4, rtol=2e-4)


def changed(name: str, directory: Path, change: Callable[[Tensors], None]) -> Path:
    """Copy a recorded checkpoint with changed tensors."""
    shutil.copytree(DIRECTORY / name, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", RECORDED)
def test_logits_equal_the_librarys_dequantization(name: str):
    check_logits(DIRECTORY / name, name)


def as_modelopt(tensors: Tensors) -> None:
    """Give tensors the names and forms of ModelOpt, and scales that its exports add."""
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        tensors[stem] = tensors.pop(name)
        factor = 1 / tensors.pop(f"{stem}_global_scale")
        tensors[f"{stem}_scale_2"] = factor.reshape(())
        tensors[f"{stem.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
    for layer in [name for name in tensors if name.endswith("k_proj.weight")]:
        tensors[layer.replace("weight", "k_scale")] = torch.tensor(1.0)


LAYERS = {
    **{f"model.layers.0.self_attn.{name}_proj": {"quant_algo": "FP8"} for name in "qkvo"},
    "model.layers.0.mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
    "lm_head": {"quant_algo": "FP8"},
}
MIXED_PRECISION = {"quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS}
MODELOPT: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": (MIXED, MIXED_PRECISION),
    "NVFP4": ("compressed-tensors-nvfp4", {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}),
    "NVFP4 with its head": ("compressed-tensors-nvfp4-head", {"quant_algo": "NVFP4"}),
    "FP8": ("compressed-tensors-fp8-static", {"quant_algo": "FP8", "ignore": ["lm_head*"]}),
}


@pytest.mark.parametrize("place", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("kind", MODELOPT)
def test_modelopts_files_have_the_same_logits(tmp_path: Path, kind: str, place: str):
    name, description = MODELOPT[kind]
    directory = changed(name, tmp_path, as_modelopt)
    if place == "config.json":
        edit_json(
            directory / place, quantization_config={"quant_method": "modelopt", **description}
        )
    else:
        edit_json(directory / "config.json", quantization_config=None)
        (directory / place).write_text(json.dumps({"quantization": description}))
    check_logits(directory, name)


def test_globals_of_a_fused_layers_members_differ():
    tensors = load_file(DIRECTORY / MIXED / "model.safetensors")
    names = [name for name in tensors if name.endswith("weight_global_scale")]
    assert len(names) == 2
    assert len({tensors[name].item() for name in names}) == 2


def edited(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((directory / "config.json").read_text())
    edit(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))


CONTRADICTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "ignored": (
        MIXED,
        lambda values: values["ignore"].append("re:.*q_proj$"),
        r"layers\.0\.self_attn\.q_proj is stored in FP8, but quantization_config says by "
        r"'re:\.\*q_proj\$' that it is not quantized",
    ),
    "another kind": (
        MIXED,
        lambda values: (
            values["config_groups"].pop("group_1")
            and values["config_groups"]["group_0"]["targets"].append("Linear")
        ),
        r"gate_proj is stored in NVFP4, but quantization_config says FP8",
    ),
    "another group": (
        "compressed-tensors-int4-g32",
        lambda values: values["config_groups"]["group_0"]["weights"].update(group_size=64),
        r"is stored in int4 with groups of 32, but quantization_config says int4 with groups of 64",
    ),
    "sparse": (
        MIXED,
        lambda values: values.update(sparsity_config={"format": "sparse-24-bitmask"}),
        r"sparsity_config\.format is 'sparse-24-bitmask', but sparse weights are not supported",
    ),
    "marlin-24": (
        MIXED,
        lambda values: values.update(format="marlin-24"),
        r"format is 'marlin-24', which is not supported",
    ),
    "transformed": (
        MIXED,
        lambda values: values.update(transform_config={"config_groups": {"u": {}}}),
        r"weights that are to be transformed are not supported",
    ),
    "3 bits": (
        "compressed-tensors-int4-g32",
        lambda values: values["config_groups"]["group_0"]["weights"].update(num_bits=3),
        r"config_groups\.group_0\.weights has 3 bits of type 'int', which is not supported",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions_are_one_sentence_before_weights_are_read(tmp_path: Path, kind: str):
    name, edit, sentence = CONTRADICTIONS[kind]
    directory = shutil.copytree(DIRECTORY / name, tmp_path / "target")
    edited(directory, edit)
    with pytest.raises(ValueError, match=sentence) as error:
        check_target_tensors(directory, load_target_config(directory))
    assert "\n" not in str(error.value)


def scale(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = change(tensors[name]).contiguous()

    return edit


def without(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


DOWN = "model.layers.0.mlp.down_proj"
DAMAGES: dict[str, tuple[str, Callable[[Tensors], None], str]] = {
    "a scale is missing": (
        MIXED,
        without(f"{DOWN}.weight_scale"),
        r"down_proj\.weight_scale is missing",
    ),
    "a global scale is missing": (
        "compressed-tensors-nvfp4",
        without(f"{DOWN}.weight_global_scale"),
        r"down_proj\.weight_global_scale is missing",
    ),
    "zeros are missing": (
        "compressed-tensors-int4-g32-asymmetric",
        without(f"{DOWN}.weight_zero_point"),
        r"down_proj\.weight_zero_point is missing",
    ),
    "scales of another shape": (
        MIXED,
        scale(f"{DOWN}.weight_scale", lambda value: value[:50]),
        r"weight_scale has shape \[50, 1\] for a weight of \[64, 128\]",
    ),
    "groups that do not divide": (
        "compressed-tensors-int4-g32",
        scale(f"{DOWN}.weight_scale", lambda value: value[:, :3]),
        r"weight_scale has shape \[64, 3\], which does not divide 128 inputs",
    ),
    "groups of another size": (
        "compressed-tensors-nvfp4",
        scale(f"{DOWN}.weight_scale", lambda value: value[:, :4]),
        r"weight_scale has groups of 32, but NVFP4 has groups of 16",
    ),
    "integer scales": (
        MIXED,
        scale(f"{DOWN}.weight_scale", lambda value: value.int()),
        r"weight_scale holds I32 values, but must hold",
    ),
    "groups in another order": (
        "compressed-tensors-int4-g32",
        lambda tensors: tensors.update({f"{DOWN}.weight_g_idx": torch.arange(128).int()}),
        r"weight_g_idx orders its groups by activations, which is not supported",
    ),
    "a stray scale": (
        MIXED,
        lambda tensors: tensors.update({"model.layers.0.weight_scale": torch.ones(1)}),
        r"layers\.0\.weight_scale is not part of this architecture",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_wrong_tensors_are_one_sentence_before_weights_are_read(tmp_path: Path, kind: str):
    name, change, sentence = DAMAGES[kind]
    directory = changed(name, tmp_path, change)
    with pytest.raises(ValueError, match=sentence):
        check_target_tensors(directory, load_target_config(directory))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(torch.nan, "has the scale nan, but"), (0.0, "has only scales of zero")],
)
def test_scales_without_a_value_are_named(tmp_path: Path, value: float, sentence: str):
    edit = scale(f"{DOWN}.weight_scale", lambda scales: torch.full_like(scales, value))
    directory = changed(MIXED, tmp_path, edit)
    with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.down_proj\.weight_scale {sentence}"):
        logits_of(directory, torch.tensor([1, 2]))


def test_config_without_quantized_tensors_is_an_error(tmp_path: Path):
    def dense(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            stem = name.removesuffix("_scale")
            tensors[stem] = tensors[stem].float() * tensors.pop(name).float()

    directory = changed("compressed-tensors-fp8-dynamic", tmp_path, dense)
    with pytest.raises(ValueError, match="compressed-tensors in FP8, but no tensor is quantized"):
        check_target_tensors(directory, load_target_config(directory))


ACTIVATIONS: dict[str, tuple[str, Callable[[dict[str, Any]], None], bool]] = {
    "W8A8": (
        "compressed-tensors-fp8-dynamic",
        lambda values: values["config_groups"]["group_0"].update(
            input_activations={"num_bits": 8, "type": "float", "dynamic": True}
        ),
        True,
    ),
    "W8A16": ("compressed-tensors-fp8-dynamic", lambda values: None, False),
    "W4A4": ("modelopt-nvfp4", lambda values: None, True),
    "W4A16": ("modelopt-nvfp4", lambda values: values.update(quant_algo="W4A16_NVFP4"), False),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_log_says_that_activations_are_not_rounded(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
):
    name, edit, is_said = ACTIVATIONS[kind]
    directory = shutil.copytree(DIRECTORY / name, tmp_path / "target")
    edited(directory, edit)
    with caplog.at_level(logging.INFO):
        check_logits(directory, name)
    assert ("activations, too, but they stay in float32" in caplog.text) == is_said


def test_layers_left_unquantized_are_used_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def dense(tensors: Tensors) -> None:
        values = tensors[f"{DOWN}.weight"].float() * tensors.pop(f"{DOWN}.weight_scale").float()
        tensors[f"{DOWN}.weight"] = values

    directory = changed(MIXED, tmp_path, dense)
    with caplog.at_level(logging.WARNING):
        check_logits(directory, MIXED)
    assert "1 of 8 layers" in caplog.text
    assert "the first is layers.0.mlp.down_proj" in caplog.text
