"""Quantized tensors that contradict their config or each other are one sentence before weights are
read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.models.architectures import load_target_config
from strobe.models.weight_loading import check_target_tensors, load_target
from tests.support.stored_weights import store
from tests.support.tiny_checkpoints import make_target

RECORDED = Path(__file__).parents[1] / "recorded"
STEM = "model.layers.0.mlp.down_proj"
FP8 = RECORDED / "compressed-tensors-fp8-block"


def is_down(name: str) -> bool:
    return name == f"{STEM}.weight"


def check(path: Path, leaf: str, value: Tensor | None) -> str:
    """Replace a tensor, or leave it out; return the sentence."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(f"{STEM}.{leaf}")
    if value is not None:
        tensors[f"{STEM}.{leaf}"] = value
    save_file(tensors, file)
    with pytest.raises(ValueError, match=leaf) as caught:
        check_target_tensors(path, load_target_config(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("shape", [(1, 4), (2, 8), (4, 2), (8,)])
def test_grid_of_other_blocks_than_the_configs(tmp_path: Path, shape: tuple[int, ...]):
    shutil.copytree(FP8, tmp_path / "target")
    text = check(tmp_path / "target", "weight_scale", torch.ones(shape))
    assert f"has shape {list(shape)} for a weight of [64, 128] in blocks of [32, 32]" in text


@pytest.mark.parametrize("shape", [(2,), (0,)])
@pytest.mark.parametrize("name", ["NVFP4", "recorded"])
def test_global_scale_that_is_not_one_number(tmp_path: Path, name: str, shape: tuple[int, ...]):
    path = tmp_path / "target"
    if name == "NVFP4":
        make_target(path)
        store(path, tmp_path / "dense", name, is_down)
    else:
        shutil.copytree(RECORDED / "compressed-tensors-nvfp4", path)
    leaf = "weight_scale_2" if name == "NVFP4" else "weight_global_scale"
    text = check(path, leaf, torch.ones(shape))
    assert f"has shape {list(shape)}, but must be one number" in text


@pytest.mark.parametrize(
    ("name", "leaf"),
    [("GPTQ", "qweight"), ("GPTQ", "scales"), ("AWQ", "qweight"), ("FP8", "weight")],
)
def test_weight_that_is_no_matrix(tmp_path: Path, name: str, leaf: str):
    path = tmp_path / "target"
    make_target(path)
    store(path, tmp_path / "dense", name, is_down)
    flat = load_file(path / "model.safetensors")[f"{STEM}.{leaf}"].flatten()
    assert "but must be a matrix" in check(path, leaf, flat)


def test_zero_beyond_the_codes(tmp_path: Path):
    """GPTQ's first version stores zeros less by one, so that its largest is out of range."""
    path = tmp_path / "target"
    make_target(path)
    store(path, tmp_path / "dense", "GPTQ", is_down)
    tensors = load_file(path / "model.safetensors")
    tensors[f"{STEM}.qzeros"][1, 2] = -1
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj\.qzeros makes a zero of 16, which") as caught:
        load_target(
            path,
            load_target_config(path),
            max_positions=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_groups_that_do_not_divide_the_inputs(tmp_path: Path, name: str):
    path = tmp_path / "target"
    make_target(path)
    store(path, tmp_path / "dense", name, is_down)
    scales = load_file(path / "model.safetensors")[f"{STEM}.scales"]
    text = check(path, "scales", torch.cat([scales, scales])[:5].contiguous())
    assert "has 5 groups, which do not divide 48 inputs" in text


@pytest.mark.parametrize("name", ["GPTQ", "AWQ"])
def test_zeros_of_another_shape(tmp_path: Path, name: str):
    path = tmp_path / "target"
    make_target(path)
    store(path, tmp_path / "dense", name, is_down)
    zeros = load_file(path / "model.safetensors")[f"{STEM}.qzeros"]
    assert "has shape [2, 4]" in check(path, "qzeros", zeros[:2].contiguous())


def test_groups_by_activations_need_their_order(tmp_path: Path):
    path = tmp_path / "target"
    make_target(path)
    store(path, tmp_path / "dense", "GPTQ by activations", is_down)
    assert f"tensor {STEM.removeprefix('model.')}.g_idx is missing" in check(path, "g_idx", None)
