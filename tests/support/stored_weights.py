"""Weights quantized by a transcription of published formats, with their exact values."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import edit_json

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 16
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors by what follows the module's name, and the weight's values."""


def fp8_rows(weight: Tensor) -> Stored:
    """compressed-tensors' FP8 with a bfloat16 scale per row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def nvfp4(weight: Tensor) -> Stored:
    """ModelOpt's NVFP4."""
    factor = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / (6 * factor)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    step = (scale.float() * factor)[..., None]
    codes = ((groups / step).abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * groups.sign() * step).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {
        "weight": packed,
        "weight_scale": scale,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(1.0),
    }, values


def int4(weight: Tensor) -> Stored:
    """compressed-tensors' pack-quantized int4, symmetric."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    values = (codes * scale.float()[..., None]).flatten(1)
    words = (codes.flatten(1).long() + 8).unflatten(1, (-1, 8)) << 4 * torch.arange(8)
    packed = words.sum(2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }, values


def _config(bits: int, kind: str, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **options}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "FP8": (fp8_rows, _config(8, "float", strategy="channel")),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "int4": (int4, _config(4, "int", strategy="group", group_size=GROUP)),
}


def store(path: Path, plain: Path, name: str, stored: Callable[[str], bool]) -> None:
    """Quantize the checkpoint in `path`; `plain` becomes one of the same values. stored: which
    tensors to quantize."""
    shutil.copytree(path, plain)
    quantize, config = FORMATS[name]
    dense = load_file(path / "model.safetensors")
    small = dict(dense)
    for key in filter(stored, dense):
        tensors, values = quantize(small.pop(key))
        small |= {f"{key.removesuffix('weight')}{leaf}": value for leaf, value in tensors.items()}
        dense[key] = values
    assert len(small) > len(dense)
    small = {key: value.contiguous() for key, value in small.items()}
    save_file(small, path / "model.safetensors")
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", quantization_config=config)
