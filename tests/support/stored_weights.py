"""Weights quantized by a transcription of published formats, with their exact values."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.quantized_checkpoints import Block, expanded, scales
from tests.support.tiny_checkpoints import edit_json

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 16
BLOCK: Block = (16, 32)
Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors by what follows the module's name, and the weight's values."""


def fp8_rows(weight: Tensor) -> Stored:
    """compressed-tensors' FP8 with a bfloat16 scale per row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_tensor(weight: Tensor) -> Stored:
    """FP8 with one scale, and the scale of activations in its static form."""
    scale = weight.abs().max() / 448
    values = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {
        "weight": values,
        "weight_scale": scale.reshape(1),
        "input_scale": torch.ones(1),
    }
    return tensors, values.float() * scale


def ministral_fp8(weight: Tensor) -> Stored:
    """Ministral 3's FP8: the scale is one number, and so is that of activations."""
    tensors, values = fp8_tensor(weight)
    scale = tensors["weight_scale"].reshape(())
    return {
        "weight": tensors["weight"],
        "weight_scale_inv": scale,
        "activation_scale": torch.tensor(0.5),
    }, values


def fp8_blocks(weight: Tensor, leaf: str = "weight_scale") -> Stored:
    """FP8 with a scale per block; the last blocks may be smaller."""
    scale = scales(weight, BLOCK)
    by_value = expanded(scale, *weight.shape, BLOCK)
    values = (weight / by_value).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, leaf: scale}, values.float() * by_value


def native_fp8(weight: Tensor) -> Stored:
    """The FP8 of Qwen and DeepSeek."""
    return fp8_blocks(weight, "weight_scale_inv")


def int8_rows(weight: Tensor) -> Stored:
    """compressed-tensors' int8 with a scale per row."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def mxfp8(weight: Tensor) -> Stored:
    """compressed-tensors' MXFP8."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 448).log2().ceil().clamp(-60, 60)
    step = torch.exp2(exponents)[..., None]
    values = (groups / step).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {
        "weight": values.flatten(1),
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, (values.float() * step).flatten(1)


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


def _asymmetric(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 4-bit codes [N, K], scales and zeros [N, G], and the values."""
    groups = weight.unflatten(1, (-1, GROUP))
    low = groups.amin(2)
    scale = ((groups.amax(2) - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(1, 15)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    values = ((codes - zero[..., None]) * scale.float()[..., None]).flatten(1)
    return codes.flatten(1).long(), scale, zero.long(), values


def _words(codes: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """codes [R, C] of 4 bits -> [R, C / 8] int32, the code `order[i]` of eight in bits 4 i."""
    eights = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    words = (eights[..., list(order)] << 4 * torch.arange(8)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def int4_with_zeros(weight: Tensor) -> Stored:
    """compressed-tensors' pack-quantized int4, whose zeros are packed along the outputs."""
    codes, scale, zero, values = _asymmetric(weight)
    return {
        "weight_packed": _words(codes),
        "weight_scale": scale,
        "weight_zero_point": _words(zero.t()).t(),
        "weight_shape": torch.tensor(weight.shape),
    }, values


def gptq(weight: Tensor) -> Stored:
    """GPTQ's first version, whose zeros are less by one, with groups in the order of inputs."""
    codes, scale, zero, values = _asymmetric(weight)
    return {
        "qweight": _words(codes).t(),
        "scales": scale.t(),
        "qzeros": _words((zero - 1).t()),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, values


def gptq_by_activations(weight: Tensor) -> Stored:
    """GPTQ's second version, with inputs that take their groups in turns."""
    index = torch.arange(weight.shape[1]) % (weight.shape[1] // GROUP)
    order = index.argsort(stable=True)
    codes, scale, zero, values = _asymmetric(weight[:, order])
    back = order.argsort()
    return {
        "qweight": _words(codes[:, back]).t(),
        "scales": scale.t(),
        "qzeros": _words(zero.t()),
        "g_idx": index.int(),
    }, values[:, back]


def gptq_symmetric(weight: Tensor) -> Stored:
    """Symmetric GPTQ, whose stored zeros have no meaning."""
    tensors, values = int4(weight)
    scale = tensors["weight_scale"].half()
    return {
        "qweight": tensors["weight_packed"].t(),
        "scales": scale.t(),
        "qzeros": torch.zeros(scale.shape[1], -(-len(weight) // 8), dtype=torch.int32),
    }, values


def awq(weight: Tensor) -> Stored:
    """AWQ's layout gemm."""
    codes, scale, zero, values = _asymmetric(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _words(codes.t(), order),
        "scales": scale.t(),
        "qzeros": _words(zero.t(), order),
    }, values


def mxfp4(weight: Tensor) -> Stored:
    """compressed-tensors' MXFP4."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil().clamp(-60, 60)
    step = torch.exp2(exponents)[..., None]
    codes = ((groups / step).abs()[..., None] - E2M1).abs().argmin(-1)
    values = (E2M1[codes] * groups.sign() * step).flatten(1)
    codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    return {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (exponents + 127).to(torch.uint8),
    }, values


def _config(bits: int, kind: str, **options: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, **options}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "FP8": (fp8_rows, _config(8, "float", strategy="channel")),
    "FP8 with one scale": (fp8_tensor, _config(8, "float", strategy="tensor")),
    "FP8 by blocks": (
        fp8_blocks,
        _config(8, "float", strategy="block", block_structure=list(BLOCK)),
    ),
    "native FP8": (
        native_fp8,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
    ),
    "Ministral's FP8": (
        ministral_fp8,
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    ),
    "int8": (int8_rows, _config(8, "int", strategy="channel")),
    "NVFP4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "MXFP4": (mxfp4, _config(4, "float", strategy="group", group_size=32)),
    "MXFP8": (mxfp8, _config(8, "float", strategy="group", group_size=32)),
    "int4": (int4, _config(4, "int", strategy="group", group_size=GROUP)),
    "int4 with zeros": (
        int4_with_zeros,
        _config(4, "int", strategy="group", group_size=GROUP, symmetric=False),
    ),
    "GPTQ": (gptq, {**GPTQ, "sym": False}),
    "GPTQ by activations": (
        gptq_by_activations,
        {**GPTQ, "sym": False, "desc_act": True, "checkpoint_format": "gptq_v2"},
    ),
    "AutoRound": (gptq_symmetric, {**GPTQ, "quant_method": "auto-round"}),
    "AWQ": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    ),
}


PLAIN = re.compile(r"embed_tokens|codebook|norm|markov_w1")
"""Names of tensors that stay unquantized."""
UNEVEN = re.compile(r"lm_head|markov_w2|confidence_head")
"""Names of weights whose rows are not multiples of 8."""
IN_WHOLE_BLOCKS = (
    "FP8 by blocks", "native FP8", "int4 with zeros", "GPTQ", "GPTQ by activations", "AutoRound",
    "AWQ",
)  # fmt: skip
"""Formats whose blocks or words the rows of `UNEVEN` do not fill."""


def is_quantizable(name: str, format: str) -> bool:
    """Whether a weight of a tiny target or drafter can be in a format."""
    if not name.endswith(".weight") or PLAIN.search(name):
        return False
    return format not in IN_WHOLE_BLOCKS or not UNEVEN.search(name)


def with_an_entry_per_expert(path: Path) -> None:
    """Write the stacked experts of a checkpoint as three linear layers each."""
    tensors = load_file(path / "model.safetensors")
    stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "s.down_proj"))]
    for name in stacks:
        around, _, leaf = name.rpartition(".")
        names = ("down_proj",) if leaf == "down_proj" else ("gate_proj", "up_proj")
        for expert, weight in enumerate(tensors.pop(name)):
            for part, value in zip(names, weight.chunk(len(names)), strict=True):
                tensors[f"{around}.{expert}.{part}.weight"] = value.contiguous()
    save_file(tensors, path / "model.safetensors")


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
