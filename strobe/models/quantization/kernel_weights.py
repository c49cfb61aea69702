"""Linear layers as weights of kernels."""

from __future__ import annotations

from strobe.kernels.gemm_table import Weight
from strobe.kernels.unpack import PackedWeight
from strobe.models.linear import AnyLinear
from strobe.models.quantization.fp8 import FP8_ROWS, Fp8Groups
from strobe.models.quantization.mxfp4 import BLOCK, Mxfp4


def kernel_weight(linear: AnyLinear) -> Weight | PackedWeight | None:
    """Return the layer's weight for kernels, None if there is none for its format."""
    weight, scale, stored = linear.weight, linear.scale, linear.format
    if stored is None or scale is None:
        return Weight(weight)
    if weight.ndim == 2:
        return Weight(weight, scale) if stored is FP8_ROWS else None
    if isinstance(stored, Mxfp4):
        return PackedWeight(weight, scale, stored.inputs, BLOCK)
    inputs = weight.shape[2]
    if stored is FP8_ROWS:
        return PackedWeight(weight, scale, inputs, inputs)
    if isinstance(stored, Fp8Groups) and stored.group % 32 == 0:
        return PackedWeight(weight, scale, inputs, stored.group)
    return None
