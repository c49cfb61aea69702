"""Linear layers as weights of kernels."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import nn

from strobe.kernels.coded import CodedExperts, CodedWeight, Codes
from strobe.kernels.gemm_table import Weight
from strobe.kernels.unpack import PackedWeight
from strobe.models.linear import AnyLinear, Linear, LinearView, StoredExperts, StoredWeight
from strobe.models.quantization.fp8_formats import FP8_ROWS, Fp8Groups
from strobe.models.quantization.grouped import GridWeight, GroupWeight
from strobe.models.quantization.mxfp4 import BLOCK, Mxfp4

AnyWeight = Weight | PackedWeight | CodedWeight | CodedExperts


def kernel_weight(linear: AnyLinear) -> AnyWeight | None:
    """Return the layer's weight for kernels, None if there is none for its format."""
    if isinstance(linear, Linear) and linear.held_experts is not None:
        return _experts(linear.held_experts)
    if linear.stored is not None:
        codes = [codes_of(part) for part in linear.stored.parts]
        parts = tuple(part for part in codes if part is not None)
        return CodedWeight(parts) if len(parts) == len(codes) else None
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


def has_experts_kernel(linear: AnyLinear) -> bool:
    """Whether kernels multiply by experts as they are held; others are dequantized."""
    return linear.held_experts is None or kernel_weight(linear) is not None


def _experts(experts: StoredExperts) -> CodedExperts | None:
    codes = None if experts.stack is None else codes_of(experts.stack)
    return None if codes is None else CodedExperts(codes, experts.shape[0])


def codes_of(weight: StoredWeight) -> Codes | None:
    """Return a stored weight for kernels, None if there is none for its form."""
    if isinstance(weight, GridWeight):
        codes = _grid_codes(weight)
    elif isinstance(weight, GroupWeight) and weight.bits in (4, 8) and weight.offset is None:
        codes = _group_codes(weight)
    else:
        return None
    return codes if codes.has_words else None


def _grid_codes(weight: GridWeight) -> Codes:
    return Codes(
        kind="e4m3" if weight.values.dtype == torch.float8_e4m3fn else "s8",
        codes=weight.values.view(torch.uint8),
        scale=weight.scale,
        inputs=weight.shape[1],
        group=weight.block[1],
        rows=weight.block[0],
        zero=weight.zero,
    )


def _group_codes(weight: GroupWeight) -> Codes:
    kind = "e2m1" if weight.is_float else f"int{weight.bits}"
    scale = weight.scale
    is_fp8 = scale.dtype == torch.float8_e4m3fn
    return Codes(
        kind=kind,
        codes=weight.codes,
        scale=scale.view(torch.uint8) if is_fp8 else scale,
        inputs=weight.inputs,
        group=weight.group,
        zero=weight.zero,
        middle=2 ** (weight.bits - 1) if weight.zero is None else 0,
        factor=None if weight.global_scale is None else weight.global_scale.flatten(),
        divides=weight.is_divisor,
        index=weight.index,
    )


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


def join_parts(model: nn.Module) -> None:
    """Join what linear layers hold as stored in several parts, on the device."""
    for module in model.modules():
        if isinstance(module, Linear) and module.stored is not None:
            module.stored.join()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # the former parts


def join_linears(*linears: AnyLinear) -> LinearView | None:
    """Return a layer with the outputs of all, or experts and one more of their shape; the weights
    become views of its weight. None if shapes differ, or if one has a bias or is quantized."""
    weights = [x.weight for x in linears]
    ndim = max(weight.ndim for weight in weights)
    parts = [weight.data if weight.ndim == ndim else weight.data[None] for weight in weights]
    if any(x.bias is not None or x.format or x.product or x.held_experts for x in linears):
        return None
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    joined = torch.cat(parts)
    for weight, part in zip(weights, joined.split([len(part) for part in parts]), strict=True):
        weight.data = part.view(weight.shape)
    return LinearView(weight=joined)
