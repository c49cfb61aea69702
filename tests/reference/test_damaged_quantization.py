"""Quantized tensors that contradict their config or each other are one sentence before weights are
read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.models.weight_mapping import WeightPart
from strobe.parallel.split import Split
from tests.support.stored_weights import store
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target

RECORDED = Path(__file__).parents[1] / "recorded"
MODEL = "model.safetensors"
STEM = "model.layers.0.mlp.down_proj"
LOADING: dict[str, Any] = {
    "max_positions": 8,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
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


def make_quantized(path: Path, name: str, leaf: str, edit: Callable[[Tensor], None]) -> Path:
    """Make a target with a quantized layer, one of whose tensors is edited."""
    make_target(path, intermediate_size=64)
    store(path, path.with_name("dense"), name, is_down)
    tensors = load_file(path / MODEL)
    edit(tensors[f"{STEM}.{leaf}"])
    save_file(tensors, path / MODEL)
    return path


def filled(value: float) -> Callable[[Tensor], None]:
    """Return an edit that sets every value."""
    return lambda tensor: tensor.copy_(torch.full(tensor.shape, value))


def at(row: int, column: int, value: float) -> Callable[[Tensor], None]:
    """Return an edit that sets one value."""

    def edit(tensor: Tensor) -> None:
        tensor[row, column] = torch.tensor(value)

    return edit


def entry(index: int, value: int) -> Callable[[Tensor], None]:
    """Return an edit that sets one value of a vector."""

    def edit(tensor: Tensor) -> None:
        tensor[index] = value

    return edit


FINITE = "but scales must be finite numbers;"
ABOVE = "but must be a finite number above zero;"
SIGN = "but scales of this format are never negative;"
WRONG_VALUES = {
    "NaN of FP8": ("FP8", "weight_scale", at(3, 0, torch.nan), f"has the scale nan, {FINITE}"),
    "infinity of FP8": ("FP8", "weight_scale", at(3, 0, torch.inf), f"has the scale inf, {FINITE}"),
    "negative FP8": ("FP8", "weight_scale", at(3, 0, -0.5), rf"has the scale -0\.5, {SIGN}"),
    "zero of FP8": ("FP8 with one scale", "weight_scale", filled(0), "has only scales of zero;"),
    "NaN of native FP8": (
        "native FP8",
        "weight_scale_inv",
        at(1, 0, torch.nan),
        f"has the scale nan, {FINITE}",
    ),
    "zeros of native FP8": (
        "native FP8",
        "weight_scale_inv",
        filled(0),
        "has only scales of zero;",
    ),
    "zero of Ministral's FP8": (
        "Ministral's FP8",
        "weight_scale_inv",
        filled(0),
        "has only scales of zero;",
    ),
    "NaN of int8": ("int8", "weight_scale", at(3, 0, torch.nan), f"has the scale nan, {FINITE}"),
    "NaN of NVFP4": ("NVFP4", "weight_scale", at(3, 1, torch.nan), f"has the scale nan, {FINITE}"),
    "negative NVFP4": ("NVFP4", "weight_scale", at(3, 1, -2.0), rf"has the scale -2\.0, {SIGN}"),
    "zeros of NVFP4": ("NVFP4", "weight_scale", filled(0), "has only scales of zero;"),
    "global NaN": ("NVFP4", "weight_scale_2", filled(torch.nan), f"is nan, {ABOVE}"),
    "global zero": ("NVFP4", "weight_scale_2", filled(0), rf"is 0\.0, {ABOVE}"),
    "negative global": ("NVFP4", "weight_scale_2", filled(-1), rf"is -1\.0, {ABOVE}"),
    "NaN of MXFP4": ("MXFP4", "weight_scale", at(3, 0, 255), "has the scale NaN;"),
    "NaN of MXFP8": ("MXFP8", "weight_scale", at(3, 0, 255), "has the scale NaN;"),
    "NaN of int4": ("int4", "weight_scale", at(3, 1, torch.nan), f"has the scale nan, {FINITE}"),
    "zeros of int4": ("int4", "weight_scale", filled(0), "has only scales of zero;"),
    "NaN of GPTQ": ("GPTQ", "scales", at(1, 3, torch.nan), f"has the scale nan, {FINITE}"),
    "infinity of AWQ": ("AWQ", "scales", at(1, 3, -torch.inf), f"has the scale -inf, {FINITE}"),
    "zero beyond GPTQ's codes": (
        "GPTQ",
        "qzeros",
        at(1, 2, -1),
        "makes a zero of 16, which codes of 4 bits do not have;",
    ),
    "group without scales": (
        "GPTQ by activations",
        "g_idx",
        entry(5, 9),
        "names group 9, but 4 groups have scales;",
    ),
    "negative group": (
        "GPTQ by activations",
        "g_idx",
        entry(5, -1),
        "names group -1, but 4 groups have scales;",
    ),
    "groups of other sizes": (
        "GPTQ by activations",
        "g_idx",
        entry(0, 1),
        "gives group 0 15 inputs, but groups have 16;",
    ),
    "all inputs in one group": (
        "GPTQ",
        "g_idx",
        filled(0),
        "gives group 0 64 inputs, but groups have 16;",
    ),
    "another size": (
        "int4",
        "weight_shape",
        entry(1, 32),
        r"says \[32, 32\], but the weight has \[32, 64\];",
    ),
}
"""Format, tensor, edit and sentence."""


@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_value_that_cannot_be_is_one_sentence(tmp_path: Path, kind: str):
    name, leaf, edit, sentence = WRONG_VALUES[kind]
    path = make_quantized(tmp_path / "target", name, leaf, edit)
    config = load_target_config(path)
    full_name = re.escape(f"{STEM.removeprefix('model.')}.{leaf}")
    with pytest.raises(ValueError, match=rf"tensor {full_name} {sentence}") as caught:
        check_target_tensors(path, config, values=True)
    assert "\n" not in str(caught.value)
    check_target_tensors(path, config)


EXPERTS = {
    "gpt_oss in MXFP4": {
        "NaN": ("gate_up_proj_scales", 255, "has the scale NaN;"),
        "too large": ("down_proj_scales", 200, r"has the scale 2\^73, but at most 2\^65 is"),
    },
    "experts in FP8": {
        "NaN": ("up_proj.weight_scale_inv", torch.nan, f"has the scale nan, {FINITE}"),
    },
}


@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family, kinds in EXPERTS.items() for kind in kinds]
)
def test_value_of_experts_that_cannot_be_is_one_sentence(tmp_path: Path, family: str, kind: str):
    leaf, value, sentence = EXPERTS[family][kind]
    make, changes = FAMILIES[family]
    make(tmp_path, **changes)
    file = tmp_path / MODEL
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(leaf))
    tensors[name].view(-1)[0] = value
    save_file(tensors, file)
    full_name = re.escape(name.removeprefix("model."))
    with pytest.raises(ValueError, match=f"tensor {full_name} {sentence}"):
        check_target_tensors(tmp_path, load_target_config(tmp_path), values=True)


@pytest.mark.parametrize("name", ["GPTQ", "AutoRound", "int4", "int8"])
def test_scales_of_integers_may_be_negative(tmp_path: Path, name: str):
    """AutoRound writes scales of either sign."""
    leaf = "scales" if name in ("GPTQ", "AutoRound") else "weight_scale"
    path = make_quantized(tmp_path / "target", name, leaf, lambda scales: scales.neg_())
    loaded = load_target(path, load_target_config(path), **LOADING)
    dense = load_target(tmp_path / "dense", load_target_config(tmp_path / "dense"), **LOADING)
    weights = [target.layers[0].mlp.down_proj.weight for target in (loaded, dense)]
    torch.testing.assert_close(weights[0], -weights[1], atol=0, rtol=3e-7)


@pytest.mark.parametrize("name", ["FP8", "NVFP4", "int4", "native FP8"])
def test_scale_of_zero_makes_its_group_zero(tmp_path: Path, name: str):
    """Scales of small weights round to zero."""
    leaf = "weight_scale_inv" if name == "native FP8" else "weight_scale"
    path = make_quantized(tmp_path / "target", name, leaf, at(0, 0, 0.0))
    target = load_target(path, load_target_config(path), **LOADING)
    weight = target.layers[0].mlp.down_proj.weight
    assert not weight[0, :16].any()
    assert weight[16:].any(1).all()


def test_rank_may_have_only_scales_of_zero(tmp_path: Path):
    def edit(scales: Tensor) -> None:
        scales[:, :2] = torch.zeros(len(scales), 2)

    path = make_quantized(tmp_path / "target", "NVFP4", "weight_scale", edit)
    split = Split(rank=0, size=2, draft_size=2)
    config, _ = split.split(load_target_config(path), None)
    check_target_tensors(path, config, split.opener("auto"), values=True)


@pytest.mark.parametrize("damaged", ["target", "draft"])
def test_no_weight_is_read_before_a_wrong_value_is_found(
    tmp_path: Path, damaged: str, monkeypatch: pytest.MonkeyPatch
):
    def fill(self: Checkpoint, out: Tensor, part: WeightPart) -> None:
        raise AssertionError(f"{list(part.sources)} was read")

    monkeypatch.setattr(Checkpoint, "fill", fill)
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    own = tmp_path / damaged
    store(own, tmp_path / "dense", "FP8", lambda name: name.endswith("down_proj.weight"))
    tensors = load_file(own / MODEL)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight_scale"))
    tensors[name][2] = torch.nan
    save_file(tensors, own / MODEL)
    config = EngineConfig(
        target=str(tmp_path / "target"),
        draft=str(tmp_path / "draft"),
        device="cpu",
        kv_cache_memory="8MiB",
    )
    with pytest.raises(ValueError, match=r"1\.mlp\.down_proj\.weight_scale has the scale nan, but"):
        Engine(config)
