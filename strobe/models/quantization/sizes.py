"""Bytes of weights in memory."""

from __future__ import annotations

import torch
from torch import nn

from strobe.models.dflash_drafter import DFlash
from strobe.models.linear import Linear
from strobe.models.quantization.rounding import rounded_bytes
from strobe.models.target import Target


def weight_bytes(
    module: Target | DFlash,
    dtype: torch.dtype,
    *,
    fp8: bool,
    packed: str | None = None,
    rounded: str | None = None,
) -> int:
    """Return the bytes of a module's weights in memory; if they are packed, the peak while packing.
    packed: their format; rounded: the one they are rounded to. The module may be on the meta
    device."""
    loaded = 4 if packed == "float32" else 2
    total = 0
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            total += parameter.numel() * kind.itemsize
        if isinstance(part, Linear) and part.stored is not None:
            total += part.stored.nbytes
            continue
        if isinstance(part, Linear) and part.held_experts is not None:
            total += part.held_experts.nbytes
            continue
        if isinstance(part, Linear) and part.scale is not None:
            total += part.scale.nbytes
        if fp8 and isinstance(part, Linear) and not part.fixed:
            total += part.weight.numel() * (1 - dtype.itemsize) + part.weight[..., 0].numel() * 4
        if rounded and isinstance(part, Linear) and part.weight.ndim == 2 and not part.fixed:
            total += rounded_bytes(part.weight.shape, rounded)
            total -= part.weight.numel() * dtype.itemsize
        if packed and isinstance(part, Linear) and part.weight.ndim == 2 and not part.fixed:
            total += part.weight.numel() * (loaded - dtype.itemsize)
    if packed and isinstance(module, Target):
        total += loaded * module.output.weight.numel()
    if fp8 and isinstance(module, DFlash) and module.head_in_fp8:
        decoder = module.config.decoder
        total += decoder.own_rows(module.config.head_rows) * (decoder.hidden_size + 4)
    return total


def held_bytes(module: Target | DFlash) -> int:
    """Return the bytes of the weights that a module's layers hold as stored."""
    linears = (part for part in module.modules() if isinstance(part, Linear))
    held = [part for linear in linears for part in (linear.stored, linear.held_experts)]
    return sum(part.nbytes for part in held if part is not None)


def mean_width(module: nn.Module, dtype: torch.dtype, *, experts: bool = False) -> float | None:
    """Return the mean bytes of a value of a module's linear layers, or of its experts, that hold
    their weights as stored or in dtype; None if there are none."""
    values = 0
    nbytes = 0
    for linear in module.modules():
        if isinstance(linear, Linear) and bool(linear.experts) == experts:
            counts = linear.weight_counts()
            values += counts.experts if experts else counts.linear
            nbytes += linear_bytes(linear, dtype)
    return nbytes / values if values else None


def linear_bytes(linear: Linear, dtype: torch.dtype) -> int:
    """Return the bytes of a layer's weight, as stored or in dtype."""
    for held in (linear.stored, linear.held_experts):
        if held is not None:
            return held.nbytes
    weight = linear.weight
    kind = dtype if weight.is_floating_point() else weight.dtype
    return weight.numel() * kind.itemsize + (0 if linear.scale is None else linear.scale.nbytes)
