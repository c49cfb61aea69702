"""MXFP4 weights, as published for gpt-oss: 4-bit values with one power of two per 32 values.

Format: OCP Microscaling Formats (MX) specification 1.0, E2M1 values with E8M0 scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from strobe.models.config import DecoderConfig, Quantization
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.linear import Linear
from strobe.models.weight_mapping import WeightMapping, WeightPart

BLOCK = 32
"""Values that share a scale."""

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_SIZES, *(-size for size in _SIZES))
_BIAS = 127


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
    return Quantization("mxfp4", (1, BLOCK))


def apply(
    module: nn.Module,
    mapping: WeightMapping,
    dtypes: Mapping[str, str],
    quantization: Quantization,
) -> WeightMapping:
    """Dequantize experts' weights when they are read. X is stored as X_blocks and X_scales."""
    packed = dict(mapping)
    for path, linear in module.named_modules():
        if isinstance(linear, Linear) and linear.weight.ndim == 3:
            name = f"{path}.weight"
            packed[name] = [_packed(part, linear.weight) for part in mapping[name]]
    return packed


def _packed(part: WeightPart, weight: Tensor) -> WeightPart:
    *outer, inputs = weight[part.at].shape
    scales = (*outer, inputs // BLOCK)
    shapes = {"blocks": (*scales, BLOCK // 2), "scales": scales}
    sources = {f"{name}_{k}": shape for name in part.sources for k, shape in shapes.items()}
    return part._replace(sources=sources, fill=unpack, dtypes=("U8",))


def unpack(out: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """blocks [E, N, K / 32, 16] uint8, two values each, the first in the low bits; scales [E, N, K
    / 32] uint8, exponents plus 127 -> out [E, N, K] in its dtype, on its device.

    One matrix at a time, to save memory. Exact in bfloat16 and float32.
    """
    values = torch.tensor(_VALUES, dtype=torch.float32, device=out.device)
    for matrix, packed, exponents in zip(out, blocks, scales, strict=True):
        packed, exponents = packed.to(out.device), exponents.to(out.device)
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2).int()
        unpacked = torch.ldexp(values[codes], exponents.int()[..., None] - _BIAS)
        matrix.copy_(unpacked.view(matrix.shape))
