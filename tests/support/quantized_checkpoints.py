"""FP8 checkpoints by blocks, converted from others by a transcription of the format, and random
experts in MXFP4."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import edit_json

Block = tuple[int, int]
LARGEST = 448.0
"""The largest value of e4m3."""


def is_linear(name: str) -> bool:
    """Whether a tensor is a layer's or an expert's linear weight; not the router, embedding or
    head."""
    return name.endswith(("_proj.weight", "_proj"))


def expanded(scale: Tensor, rows: int, columns: int, block: Block) -> Tensor:
    """Look up each value's scale. scale [..., row blocks, column blocks]."""
    i, j = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    return scale[..., i[:, None], j]


def scales(value: Tensor, block: Block) -> Tensor:
    """Return the scales with which each block's largest value becomes `LARGEST`. value [..., N,
    K]."""
    blocks = [rows.split(block[1], -1) for rows in value.split(block[0], -2)]
    largest = [torch.stack([part.abs().amax((-2, -1)) for part in row], -1) for row in blocks]
    return torch.stack(largest, -2) / LARGEST


def quantize(
    path: Path,
    plain: Path,
    block: Block,
    *,
    stored: Callable[[str], bool] = is_linear,
    dtype: torch.dtype = torch.float32,
    **keys: object,
) -> None:
    """Quantize the checkpoint in `path` to FP8, and write one with the same values unquantized to
    `plain`. stored: which tensors to quantize; dtype: the scales'; keys: of quantization_config."""
    shutil.copytree(path, plain, dirs_exist_ok=True)
    values = load_file(path / "model.safetensors")
    small, names = dict(values), [name for name in values if stored(name)]
    assert names
    for name in names:
        scale = scales(values[name], block).to(dtype)
        each = expanded(scale.float(), *values[name].shape[-2:], block)
        small[name] = (values[name] / each).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        small[f"{name}_scale_inv"] = scale
        values[name] = small[name].float() * each
    save_file(small, path / "model.safetensors")
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    known = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    edit_json(path / "config.json", quantization_config=known | keys)


def with_mxfp4_experts(path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Replace gpt-oss's experts in a checkpoint by random ones in MXFP4. Return their blocks and
    scales by tensor name."""
    noise, experts = torch.Generator().manual_seed(5), dict[str, tuple[Tensor, Tensor]]()
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inner, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, inner // 32, 16), generator=noise)
        scales = torch.randint(121, 124, (count, rows, inner // 32), generator=noise)
        blocks, scales = blocks.to(torch.uint8), scales.to(torch.uint8)
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        experts[name] = blocks, scales
    save_file(tensors, path / "model.safetensors")
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    edit_json(path / "config.json", quantization_config=config)
    return experts
