"""MXFP4 weights, as published for gpt-oss: 4-bit values with one power of two per 32 values. Linear
layers hold them as they are, in the order of `strobe.kernels.unpack`.

Format: OCP Microscaling Formats (MX) specification 1.0, E2M1 values with E8M0 scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.held import fill_bytes, hold, scale_at
from strobe.models.quantization.value_checks import check_exponents
from strobe.models.weight_mapping import CheckpointTensors, Fill, WeightMapping, WeightPart

BLOCK = 32
"""Values that share a scale."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_SIZES, *(-size for size in _SIZES))
_BIAS = 127
_SHIFT = 62
"""What kernels add to the exponents of scales."""
_PLACES = ((6, 15), (3, 12), (0, 13), (9, 14))
"""Of the sizes and signs of four values in the half of a word."""
MAX_EXPONENT = 65
"""See `strobe.kernels.unpack`; weights are many orders of magnitude smaller."""


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError unless the model has experts whose input sizes are multiples of `BLOCK`."""
    if decoder.experts is None:
        raise ValueError(
            f"{fields.path}: quant_method is 'mxfp4', which is supported for experts only, but "
            "this model has none; use an unquantized checkpoint."
        )
    for size in (decoder.hidden_size, decoder.experts.moe_intermediate_size):
        if size % BLOCK:
            raise ValueError(
                f"{fields.path}: a size of {size} does not divide into MXFP4's blocks of {BLOCK}; "
                f"{HINT}"
            )
    return Quantization(method="mxfp4", block=(1, BLOCK))


@dataclass(frozen=True)
class Mxfp4:
    """64 values in 32 bytes, ordered as `strobe.kernels.unpack` describes. A scale [K / 128, N]
    int32 holds the exponents of four groups. inputs: K, which need not be a multiple of 128."""

    inputs: int

    @property
    def bits_per_value(self) -> float:
        """See `Format.bits_per_value`."""
        return 4 + 8 / BLOCK

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        """values [..., N, K / 2], scale [..., K / 128, N] -> [..., N, K] float32, exactly."""
        table = torch.tensor(_VALUES, dtype=torch.float32, device=values.device)
        halves = values.view(torch.int16).unflatten(-1, (-1, 4, 2, 2)).int()
        codes = [(halves >> size & 7) | (halves >> sign & 1) << 3 for size, sign in _PLACES]
        codes = torch.stack(codes, -1).movedim((-3, -1), (-4, -3)).flatten(-3).flatten(-3, -2)
        exponents = scale[..., None].view(torch.uint8).transpose(-3, -2).flatten(-2)
        exponents = exponents[..., : codes.shape[-2], None].int() - (_BIAS + _SHIFT)
        return torch.ldexp(table[codes.int()], exponents).flatten(-2)[..., : self.inputs]

    def fill_random(self, values: Tensor, generator: torch.Generator) -> None:
        """See `Format.fill_random`."""
        fill_bytes(values, generator)

    def fill_scale(self, scale: Tensor) -> None:
        """See `Format.fill_scale`."""
        scale.view(torch.uint8).fill_(_BIAS + _SHIFT - 6)  # 2^-6


def experts_format(quantization: Quantization, inputs: int) -> Mxfp4:
    """See `Method.experts_format`."""
    return Mxfp4(inputs)


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """See `Method.describe`."""
    rows, columns = quantization.block
    return f"mxfp4, a scale per {rows} x {columns} values, kept as they are"


def apply(
    module: nn.Module,
    mapping: WeightMapping,
    tensors: CheckpointTensors,
    quantization: Quantization,
) -> WeightMapping:
    """Hold experts' weights in MXFP4. X is stored as X_blocks and X_scales."""
    mapping = dict(mapping)
    for path, linear in module.named_modules():
        if isinstance(linear, Linear) and linear.weight.ndim == 3:
            weight = linear.weight
            parts = mapping[f"{path}.weight"]
            mapping[f"{path}.weight"] = [
                _part(part, weight, "blocks", fill_values) for part in parts
            ]
            mapping[f"{path}.scale"] = [
                _part(part, weight, "scales", fill_scales) for part in parts
            ]
            hold_mxfp4(linear)
    return mapping


def hold_mxfp4(linear: Linear) -> None:
    """Make experts on the meta device hold MXFP4."""
    count, outputs, inputs = linear.weight.shape
    hold(
        linear,
        Mxfp4(inputs),
        values=(count, outputs, -(-inputs // 64) * BLOCK),
        scale=(count, -(-inputs // 128), outputs),
        scale_dtype=torch.int32,
    )


def _part(part: WeightPart, weight: Tensor, name: str, fill: Fill) -> WeightPart:
    """Return the part of values or of scales for a part of an unquantized weight."""
    *outer, inputs = weight[part.at].shape
    groups = inputs // BLOCK
    shape = (*outer, groups, BLOCK // 2) if name == "blocks" else (*outer, groups)
    at = part.at if name == "blocks" else scale_at(part.at)
    sources = {f"{source}_{name}": shape for source in part.sources}
    checks = dict.fromkeys(sources, check_exponents(MAX_EXPONENT)) if name == "scales" else {}
    return part._replace(sources=sources, at=at, fill=fill, dtypes=("U8",), checks=checks)


def fill_values(out: Tensor, blocks: Tensor) -> None:
    """blocks [..., N, K / 32, 16] uint8, two values each, the first in the low bits -> out [..., N,
    K / 2], one matrix at a time, to save memory."""
    for matrix, packed in zip(out.flatten(0, -3), blocks.flatten(0, -4), strict=True):
        packed = packed.to(out.device)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2)  # [N, K / 32, 32]
        codes = F.pad(codes, (0, 0, 0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
        pairs = codes.int().unflatten(-1, (4, 4, 2)).unbind(-3)  # 4 x [N, K / 64, 2, lane, 2]
        halves = torch.zeros_like(pairs[0])
        for codes, (size, sign) in zip(pairs, _PLACES, strict=True):
            halves |= (codes & 7) << size | codes >> 3 << sign
        halves = halves.transpose(-3, -2).to(torch.int16)
        matrix.copy_(halves.flatten(1).view(torch.uint8))


def fill_scales(out: Tensor, scales: Tensor) -> None:
    """scales [..., N, K / 32] uint8, exponents plus 127 -> out [..., K / 128, N] int32. Raises
    ValueError for a scale above 2^`MAX_EXPONENT`."""
    scales = scales.to(out.device)
    if (largest := int(scales.max()) - _BIAS) > MAX_EXPONENT:
        raise ValueError(
            f"A block of MXFP4 has the scale 2^{largest}, but at most 2^{MAX_EXPONENT} is "
            "supported; download the checkpoint again or use an unquantized one."
        )
    padded = F.pad(scales + _SHIFT, (0, -scales.shape[-1] % 4))
    out.copy_(padded.contiguous().view(torch.int32).transpose(-2, -1))
