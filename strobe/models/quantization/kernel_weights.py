"""Linear layers as weights of kernels."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from strobe.kernels.gemm_table import Weight
from strobe.kernels.unpack import PackedWeight
from strobe.models.linear import AnyLinear, LinearView
from strobe.models.quantization.fp8 import FP8_ROWS, Fp8Groups
from strobe.models.quantization.mxfp4 import BLOCK, Mxfp4


def kernel_weight(linear: AnyLinear) -> Weight | PackedWeight | None:
    """Return the layer's weight for kernels, None if there is none for its format."""
    weight = linear.weight
    scale = linear.scale
    stored = linear.format
    if stored is None or scale is None:
        return Weight(weight)
    if weight.ndim == 2:
        return Weight(weight, scale) if stored is FP8_ROWS else None
    if isinstance(stored, Mxfp4):
        return PackedWeight(data=weight, scale=scale, inputs=stored.inputs, group=BLOCK)
    inputs = weight.shape[2]
    if stored is FP8_ROWS:
        return PackedWeight(data=weight, scale=scale, inputs=inputs, group=inputs)
    if isinstance(stored, Fp8Groups) and stored.group % 32 == 0:
        return PackedWeight(data=weight, scale=scale, inputs=inputs, group=stored.group)
    return None


@runtime_checkable
class JoinsLinears(Protocol):
    """A module with linear layers that can be one."""

    def join(self) -> None:
        """Join them if their formats allow it."""
        ...


def join_all(model: nn.Module) -> None:
    """Join the linear layers that kernels compute at once, on the device."""
    for module in model.modules():
        if isinstance(module, JoinsLinears):
            module.join()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the former weights: the next ones may need the room


def join_linears(*linears: AnyLinear) -> LinearView | None:
    """Return a layer with the outputs of all, or experts and one more of their shape; the weights
    become views of its weight. None if shapes differ, or if one has a bias or is quantized."""
    weights = [x.weight for x in linears]
    most = max(x.weight.ndim for x in linears)
    parts = [weight.data if weight.ndim == most else weight.data[None] for weight in weights]
    if any(x.bias is not None or x.format or x.product for x in linears):
        return None
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    joined = torch.cat(parts)
    for weight, part in zip(weights, joined.split([len(part) for part in parts]), strict=True):
        weight.data = part.view(weight.shape)
    return LinearView(weight=joined)
