"""Checks of the values of scales, zeros and groups of inputs, which loading makes before it reads a
weight.

A check returns what is wrong with a tensor, which follows the tensor's name in a sentence, or None.
A rank checks its own part of a tensor.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

from strobe.models.weight_mapping import Check

E4M3_NAN = 0x7F
"""The first byte of e4m3 that is no number of zero or above."""
E8M0_NAN = 0xFF
HINT = "; download the checkpoint again, or use another one of the model."
ONE_RANK = "; use tensor_parallel_size 1, or another checkpoint of the model."


def check_scales(scales: Tensor, is_part: bool) -> str | None:
    """Scales of FP8, NVFP4, MXFP8 or MXFP4, which are never negative. One that is zero makes its
    group zero, as small weights do; all of a weight's cannot be."""
    return _scale_problem(scales, is_part, signed=False)


def check_signed_scales(scales: Tensor, is_part: bool) -> str | None:
    """Scales of integers, which AutoRound writes with either sign."""
    return _scale_problem(scales, is_part, signed=True)


def _scale_problem(scales: Tensor, is_part: bool, *, signed: bool) -> str | None:
    if not scales.numel():
        return None
    if scales.dtype == torch.uint8:
        return f"has the scale NaN{HINT}" if int(scales.max()) == E8M0_NAN else None
    low, high = _bounds(scales)
    if not (isfinite(low) and isfinite(high)):
        value = high if isfinite(low) else low
        return f"has the scale {value}, but scales must be finite numbers{HINT}"
    if low < 0 and not signed:
        return f"has the scale {low}, but scales of this format are never negative{HINT}"
    if low == high == 0 and not is_part:
        return f"has only scales of zero{HINT}"
    return None


def _bounds(scales: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest scale; NaN if there is one."""
    if scales.dtype == torch.float8_e4m3fn:
        codes = scales.view(torch.uint8)
        low, high = (int(code) for code in codes.aminmax())
        if high < E4M3_NAN:  # codes are in the order of their values
            ends = torch.tensor([low, high], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            return float(ends[0]), float(ends[1])
        scales = scales.float()
    low, high = scales.aminmax()
    return float(low), float(high)


def check_global_scale(scale: Tensor, is_part: bool) -> str | None:
    """A factor or divisor of a whole weight."""
    value = float(scale.flatten()[0])
    if isfinite(value) and value > 0:
        return None
    return f"is {value}, but must be a finite number above zero{HINT}"


def check_exponents(limit: int) -> Check:
    """Return the check of scales in E8M0 that are at most 2^`limit`."""

    def check(exponents: Tensor, is_part: bool) -> str | None:
        largest = int(exponents.max()) if exponents.numel() else 0
        if largest == E8M0_NAN:
            return f"has the scale NaN{HINT}"
        if largest - 127 > limit:
            return f"has the scale 2^{largest - 127}, but at most 2^{limit} is supported{HINT}"
        return None

    return check


def check_size(wanted: list[int]) -> Check:
    """Return the check of a tensor that repeats the shape of a weight."""

    def check(size: Tensor, is_part: bool) -> str | None:
        if size.tolist() == wanted:
            return None
        return f"says {size.tolist()}, but the weight has {wanted}{HINT}"

    return check


def is_consecutive(groups: Tensor, group: int) -> bool:
    """Whether consecutive inputs, `group` each, share a group."""
    plain = torch.arange(len(groups), device=groups.device) // group
    return torch.equal(groups - groups[0], plain.to(groups.dtype))


def check_groups(group: int, num_groups: int) -> Check:
    """Return the check of the group of each input. group: inputs of each group of the whole
    weight."""

    def check(groups: Tensor, is_part: bool) -> str | None:
        wrong = groups[(groups < 0) | (groups >= num_groups)]
        if len(wrong):
            return f"names group {int(wrong[0])}, but {num_groups} groups have scales{HINT}"
        if is_consecutive(groups, group):
            return None
        if is_part:
            return f"orders groups by activations, which several ranks cannot share{ONE_RANK}"
        counts = groups.bincount(minlength=num_groups).tolist()
        index = next((index for index, count in enumerate(counts) if count != group), None)
        if index is None:
            return None
        return f"gives group {index} {counts[index]} inputs, but groups have {group}{HINT}"

    return check


def check_experts_groups(group: int) -> Check:
    """Return the check of the group of each input of an expert that is kept as stored."""

    def check(groups: Tensor, is_part: bool) -> str | None:
        if is_consecutive(groups, group):
            return None
        return (
            "orders groups by activations (desc_act), which experts that are kept as stored do not "
            "support; use weight_dtype auto."
        )

    return check


def check_zeros(bits: int, outputs: int) -> Check:
    """Return the check of zeros [G, W] in words of 32 bits that are stored less by one. outputs:
    number of outputs, which the last word may exceed."""

    def check(words: Tensor, is_part: bool) -> str | None:
        largest = 2**bits - 1
        for place in range(32 // bits):
            num_words = -(-(outputs - place) * bits // 32)
            zeros = words[:, :num_words] >> place * bits & largest
            if bool((zeros == largest).any()):
                return f"makes a zero of {2**bits}, which codes of {bits} bits do not have{HINT}"
        return None

    return check
