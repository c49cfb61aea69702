"""Codes of quantized tensors in GGUF files, in the form of `grouped`.

A type is kept if each value is a code of 2, 4 or 8 bits times its group's scale, in some plus an
offset of the group, exactly: values then equal those of the package gguf bit by bit. Codes of 3, 5
and 6 bits take 4 or 8, values of small tables 8. A scale of two levels becomes their product, which
float32 holds exactly. Legend: B blocks, V values of a block, N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.hub.gguf_file import TYPES
from strobe.models.quantization.grouped import GroupWeight, powers_of_two

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of IQ4_NL's and IQ4_XS's codes, before scales."""
_POWERS = (1, 3, 9, 27, 81)
_VALUES_AT_ONCE = 1 << 20
_BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}


class Block(NamedTuple):
    """What blocks hold. codes: [B, V] uint8. scale, offset: [B, groups of a block]."""

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None


@dataclass(frozen=True)
class CodesType:
    """A type of tensors that can be kept. bits, group, zero, is_float: see `GroupWeight`. scale:
    dtype of scales and offsets. read: blocks as bytes [B, size] -> their parts."""

    bits: int
    group: int
    scale: torch.dtype
    read: Callable[[Tensor], Block]
    zero: int | None = None
    has_offset: bool = False
    is_float: bool = False

    @property
    def bits_per_value(self) -> float:
        """Bits of a value in memory."""
        by_group = self.scale.itemsize * (2 if self.has_offset else 1)
        by_group += 0 if self.zero is None else 1
        return self.bits + 8 * by_group / self.group


def _spread(data: Tensor, run: int, shifts: Sequence[int], mask: int) -> Tensor:
    """data [B, bytes] -> [B, codes]: of each `run` bytes the bits at the first shift, then those at
    the next one."""
    runs = data.unflatten(-1, (-1, 1, run))
    steps = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (runs >> steps & mask).flatten(1)


def _half(data: Tensor) -> Tensor:
    """data [B, 2] -> [B, 1] float16."""
    return data.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Block:
    scale, data = blocks.split([2, 16], 1)
    return Block(codes=_spread(data, 16, (0, 4), 15), scale=_half(scale))


def _q4_1(blocks: Tensor) -> Block:
    scale, low, data = blocks.split([2, 2, 16], 1)
    return Block(codes=_spread(data, 16, (0, 4), 15), scale=_half(scale), offset=_half(low))


def _five_bits(high: Tensor, data: Tensor) -> Tensor:
    """high [B, 4], data [B, 16] -> codes [B, 32]."""
    return _spread(data, 16, (0, 4), 15) | _spread(high, 1, range(8), 1) << 4


def _q5_0(blocks: Tensor) -> Block:
    scale, high, data = blocks.split([2, 4, 16], 1)
    return Block(codes=_five_bits(high, data) + (128 - 16), scale=_half(scale))


def _q5_1(blocks: Tensor) -> Block:
    scale, low, high, data = blocks.split([2, 2, 4, 16], 1)
    return Block(codes=_five_bits(high, data), scale=_half(scale), offset=_half(low))


def _q8_0(blocks: Tensor) -> Block:
    scale, data = blocks.split([2, 32], 1)
    return Block(codes=data ^ 128, scale=_half(scale))


def _q2_k(blocks: Tensor) -> Block:
    scales, data, step, low = blocks.split([16, 64, 2, 2], 1)
    return Block(
        codes=_spread(data, 32, (0, 2, 4, 6), 3),
        scale=_half(step).float() * (scales & 15).float(),
        offset=_half(low).float() * (scales >> 4).float().neg(),
    )


def _q3_k(blocks: Tensor) -> Block:
    high, data, scales, step = blocks.split([32, 64, 12, 2], 1)
    codes = _spread(data, 32, (0, 2, 4, 6), 3) | _spread(high, 32, range(8), 1) << 2
    low_bits = _spread(scales[:, :8], 8, (0, 4), 15)
    high_bits = _spread(scales[:, 8:], 4, (0, 2, 4, 6), 3)
    factors = (low_bits | high_bits << 4).float() - 32
    return Block(codes=codes + (8 - 4), scale=_half(step).float() * factors)


def _scales_of_k(data: Tensor) -> tuple[Tensor, Tensor]:
    """data [B, 12] -> factors of 6 bits of scales and of offsets [B, 8]."""
    first, second, rest = data.split(4, 1)
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    offsets = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return scales.float(), offsets.float()


def _q4_k(blocks: Tensor) -> Block:
    step, low, factors, data = blocks.split([2, 2, 12, 128], 1)
    scales, offsets = _scales_of_k(factors)
    return Block(
        codes=_spread(data, 32, (0, 4), 15),
        scale=_half(step).float() * scales,
        offset=_half(low).float() * offsets.neg(),
    )


def _q5_k(blocks: Tensor) -> Block:
    step, low, factors, high, data = blocks.split([2, 2, 12, 32, 128], 1)
    scales, offsets = _scales_of_k(factors)
    return Block(
        codes=_spread(data, 32, (0, 4), 15) | _spread(high, 32, range(8), 1) << 4,
        scale=_half(step).float() * scales,
        offset=_half(low).float() * offsets.neg(),
    )


def _q6_k(blocks: Tensor) -> Block:
    data, high, scales, step = blocks.split([128, 64, 16, 2], 1)
    codes = _spread(data, 64, (0, 4), 15) | _spread(high, 32, (0, 2, 4, 6), 3) << 4
    factors = scales.contiguous().view(torch.int8).float()
    return Block(codes=codes + (128 - 32), scale=_half(step).float() * factors)


def _from_table(codes: Tensor) -> Tensor:
    """Codes of 4 bits -> codes of 8 bits, whose middle is 128."""
    return (torch.tensor(TABLE) + 128).to(torch.uint8)[codes.int()]


def _iq4_nl(blocks: Tensor) -> Block:
    scale, data = blocks.split([2, 16], 1)
    return Block(codes=_from_table(_spread(data, 16, (0, 4), 15)), scale=_half(scale))


def _iq4_xs(blocks: Tensor) -> Block:
    step, high, low, data = blocks.split([2, 2, 4, 128], 1)
    low_bits = _spread(low, 1, (0, 4), 15)
    high_bits = _spread(high, 1, (0, 2, 4, 6), 3)
    factors = (low_bits | high_bits << 4).float() - 32
    return Block(
        codes=_from_table(_spread(data, 16, (0, 4), 15)),
        scale=_half(step).float() * factors,
    )


def _digits(data: Tensor, run: int, count: int) -> Tensor:
    """data [B, bytes] -> [B, digits]: of each `run` bytes the first digits of base 3, then the
    next ones. A byte is the upper part of its number."""
    powers = torch.tensor(_POWERS[:count], dtype=torch.uint8)[:, None]
    shifted = data.unflatten(-1, (-1, 1, run)) * powers
    return (shifted.int() * 3 >> 8).to(torch.uint8).flatten(1)


def _tq1_0(blocks: Tensor) -> Block:
    first, second, last, scale = blocks.split([32, 16, 4, 2], 1)
    digits = [_digits(first, 32, 5), _digits(second, 16, 5), _digits(last, 4, 4)]
    return Block(codes=torch.cat(digits, 1), scale=_half(scale))


def _tq2_0(blocks: Tensor) -> Block:
    data, scale = blocks.split([64, 2], 1)
    return Block(codes=_spread(data, 32, (0, 2, 4, 6), 3), scale=_half(scale))


def _mxfp4(blocks: Tensor) -> Block:
    exponents, data = blocks.split([1, 16], 1)
    return Block(codes=_spread(data, 16, (0, 4), 15), scale=powers_of_two(exponents))


def _nvfp4(blocks: Tensor) -> Block:
    scales, data = blocks.split([4, 32], 1)
    scales = scales & 127
    scales = torch.where(scales == 127, 0, scales)
    return Block(
        codes=_spread(data, 8, (0, 4), 15),
        scale=scales.to(torch.uint8).view(torch.float8_e4m3fn),
    )


_F16 = torch.float16
_F32 = torch.float32
CODES: dict[str, CodesType] = {
    "Q4_0": CodesType(bits=4, group=32, scale=_F16, read=_q4_0),
    "Q4_1": CodesType(bits=4, group=32, scale=_F16, read=_q4_1, has_offset=True),
    "Q5_0": CodesType(bits=8, group=32, scale=_F16, read=_q5_0),
    "Q5_1": CodesType(bits=8, group=32, scale=_F16, read=_q5_1, has_offset=True),
    "Q8_0": CodesType(bits=8, group=32, scale=_F16, read=_q8_0),
    "Q2_K": CodesType(bits=2, group=16, scale=_F32, read=_q2_k, has_offset=True),
    "Q3_K": CodesType(bits=4, group=16, scale=_F32, read=_q3_k),
    "Q4_K": CodesType(bits=4, group=32, scale=_F32, read=_q4_k, has_offset=True),
    "Q5_K": CodesType(bits=8, group=32, scale=_F32, read=_q5_k, has_offset=True),
    "Q6_K": CodesType(bits=8, group=16, scale=_F32, read=_q6_k),
    "IQ4_NL": CodesType(bits=8, group=32, scale=_F16, read=_iq4_nl),
    "IQ4_XS": CodesType(bits=8, group=32, scale=_F32, read=_iq4_xs),
    "TQ1_0": CodesType(bits=2, group=256, scale=_F16, read=_tq1_0, zero=1),
    "TQ2_0": CodesType(bits=2, group=256, scale=_F16, read=_tq2_0, zero=1),
    "MXFP4": CodesType(bits=4, group=32, scale=_F32, read=_mxfp4, is_float=True),
    "NVFP4": CodesType(
        bits=4, group=16, scale=torch.float8_e4m3fn, read=_nvfp4, is_float=True
    ),
}  # fmt: skip
"""Types whose codes can be kept. IQ1 to IQ3 take eight values at once from tables."""


def read_codes(
    kind: str, data: Tensor, shape: tuple[int, int], factor: float | None
) -> GroupWeight:
    """Return a tensor [N, K] of a type in CODES, some rows at a time. data: its bytes in the file.
    factor: of all values."""
    form = CODES[kind]
    outputs, inputs = shape
    groups = inputs // form.group
    values, size = _BLOCKS[kind]
    rows = data.view(outputs, inputs // values, size)
    codes = torch.empty(outputs, inputs * form.bits // 8, dtype=torch.uint8)
    scale = torch.empty(outputs, groups, dtype=form.scale)
    offset = torch.empty(outputs, groups, dtype=form.scale) if form.has_offset else None
    count = max(_VALUES_AT_ONCE // inputs, 1)
    for first in range(0, outputs, count):
        part = slice(first, first + count)
        block = form.read(rows[part].flatten(0, 1))
        codes[part] = _packed(block.codes.view(-1, inputs), form.bits)
        scale[part].view(torch.uint8).copy_(block.scale.view(-1, groups).view(torch.uint8))
        if offset is not None and block.offset is not None:
            offset[part] = block.offset.view(-1, groups)
    zero = None
    if form.zero is not None:
        zero = torch.full((outputs, groups), form.zero, dtype=torch.uint8)
    return GroupWeight(
        codes=codes,
        scale=scale,
        bits=form.bits,
        group=form.group,
        inputs=inputs,
        zero=zero,
        offset=offset,
        global_scale=None if factor is None else torch.tensor([factor]),
        is_float=form.is_float,
    )


def _packed(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] -> [N, K * bits / 8], the first in the low bits."""
    if bits == 8:
        return codes
    count = 8 // bits
    packed = codes[:, ::count].clone()
    for place in range(1, count):
        packed |= codes[:, place::count] << place * bits
    return packed


def group_order(order: Tensor, group: int) -> Tensor | None:
    """Return the order of groups that is an order of inputs; None if it parts groups."""
    if len(order) % group:
        return None
    groups = order.view(-1, group)
    whole = groups[:, :1] + torch.arange(group)
    is_whole = torch.equal(groups, whole) and not bool((groups[:, 0] % group).any())
    return groups[:, 0] // group if is_whole else None


def with_groups(weight: GroupWeight, order: Tensor) -> GroupWeight:
    """Return a weight whose group i is the group order[i] of this one."""
    codes = weight.codes.unflatten(1, (weight.scale.shape[1], -1))[:, order].flatten(1)
    scale = weight.scale.view(torch.uint8).unflatten(1, (-1, weight.scale.itemsize))
    return replace(
        weight,
        codes=codes,
        scale=scale[:, order].flatten(1).view(weight.scale.dtype),
        zero=None if weight.zero is None else weight.zero[:, order],
        offset=None if weight.offset is None else weight.offset[:, order],
        inputs=len(order) * weight.group,
    )
