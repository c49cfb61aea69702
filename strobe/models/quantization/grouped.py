"""Weights in the forms that all formats of checkpoints are brought into, and their values.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from strobe.models.linear import StoredWeight

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Sizes of the 4-bit floating-point values 0 to 7; 8 to 15 are their negatives."""
_ROWS = 1024
"""Rows at a time: values are computed in float32."""


@dataclass(frozen=True)
class GroupWeight:
    """Codes of 2, 4 or 8 bits with a scale per group of inputs.

    codes: [N, K * bits / 8] uint8, packed along K, the first in the low bits. scale: [N, G]. zero:
    [N, G], subtracted from the codes; None for the middle of their range. global_scale: a factor
    of all values, or with `is_divisor` their divisor; several belong to equal parts of the outputs.
    is_float: codes of 4 bits are E2M1. index: the group of each input [K], if the groups are not
    consecutive inputs.
    """

    codes: Tensor
    scale: Tensor
    bits: int
    group: int
    inputs: int
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    is_divisor: bool = False
    is_float: bool = False
    index: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See `StoredWeight`."""
        return len(self.codes), self.inputs

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """See `StoredWeight`."""
        return (self.scale,) if self.global_scale is None else (self.scale, self.global_scale)

    def rows(self, first: int, last: int) -> Tensor:
        """See `StoredWeight`."""
        codes = unpacked(self.codes[first:last], self.bits)[:, : self.inputs]
        values = _e2m1(codes.device)[codes.int()] if self.is_float else codes.float()
        if self.zero is not None:
            values -= self._by_value(self.zero[first:last].float())
        elif not self.is_float:
            values -= 2 ** (self.bits - 1)
        values *= self._by_value(self.scale[first:last].float())
        if self.global_scale is None:
            return values
        factors = self._factors(self.global_scale, first, last)
        return values / factors if self.is_divisor else values * factors

    def copied(self) -> GroupWeight:
        """See `StoredWeight`."""
        return replace(
            self,
            codes=_copy(self.codes),
            scale=_copy(self.scale),
            zero=None if self.zero is None else _copy(self._small(self.zero)),
            global_scale=None if self.global_scale is None else _copy(self.global_scale),
        )

    def _factors(self, global_scale: Tensor, first: int, last: int) -> Tensor:
        """Return the global scale of rows first to last - 1, or the one of all."""
        if global_scale.numel() == 1:
            return global_scale
        size = len(self.codes) // global_scale.numel()
        index = torch.arange(first, last, device=global_scale.device) // size
        return global_scale[index][:, None]

    def _small(self, zero: Tensor) -> Tensor:
        """Return zeros in the smallest dtype; zeros of 8 bits may be 256."""
        return zero.to(torch.uint8 if self.bits < 8 else torch.int16)

    def take(self, order: Tensor) -> GroupWeight:
        """See `StoredWeight`."""
        zero = None if self.zero is None else self.zero[order]
        return replace(self, codes=self.codes[order], scale=_taken(self.scale, order), zero=zero)

    def scaled(self, factor: float) -> GroupWeight:
        """See `StoredWeight`."""
        return replace(self, scale=self.scale.float() * factor)

    def _by_value(self, by_group: Tensor) -> Tensor:
        if self.index is not None:
            return by_group[:, self.index]
        return by_group.repeat_interleave(self.group, 1)[:, : self.inputs]


@dataclass(frozen=True)
class GridWeight:
    """Values of 8 bits with a grid of scales.

    values: [N, K] e4m3 or int8. scale: [N / block[0], K / block[1]]. zero: of the scale's shape,
    subtracted from the values.
    """

    values: Tensor
    scale: Tensor
    block: tuple[int, int]
    zero: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """See `StoredWeight`."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """See `StoredWeight`."""
        return (self.scale,)

    def rows(self, first: int, last: int) -> Tensor:
        """See `StoredWeight`."""
        values = self.values[first:last].float()
        if self.zero is not None:
            values -= self._by_value(self.zero, first, last)
        return values.mul_(self._by_value(self.scale, first, last))

    def copied(self) -> GridWeight:
        """See `StoredWeight`."""
        zero = None if self.zero is None else _copy(self.zero)
        return replace(self, values=_copy(self.values), scale=_copy(self.scale), zero=zero)

    def take(self, order: Tensor) -> GridWeight:
        """See `StoredWeight`."""
        rows = order // self.block[0]
        return GridWeight(
            values=_taken(self.values, order),
            scale=_taken(self.scale, rows),
            block=(1, self.block[1]),
            zero=None if self.zero is None else self.zero[rows],
        )

    def scaled(self, factor: float) -> GridWeight:
        """See `StoredWeight`."""
        return replace(self, scale=self.scale.float() * factor)

    def _by_value(self, grid: Tensor, first: int, last: int) -> Tensor:
        index = torch.arange(first, last, device=grid.device) // self.block[0]
        by_row = grid.float()[index]
        return by_row.repeat_interleave(self.block[1], 1)[:, : self.values.shape[1]]


def empty_stack(weight: GroupWeight | GridWeight, count: int) -> GroupWeight | GridWeight:
    """Return a weight for the outputs of `count` weights like this one; see `put`."""
    tensors = {
        name: value.new_empty((count * _length(value), *value.shape[1:]))
        for name, value in _tensors(weight).items()
    }
    return replace(weight, **tensors)


def put(stack: GroupWeight | GridWeight, index: int, weight: GroupWeight | GridWeight) -> None:
    """Copy a weight to its place in a stack of weights."""
    places = _tensors(stack)
    for name, value in _tensors(weight).items():
        length = _length(value)
        places[name].narrow(0, index * length, length).copy_(value)


def _tensors(weight: GroupWeight | GridWeight) -> dict[str, Any]:
    return {name: value for name, value in vars(weight).items() if isinstance(value, Tensor)}


def _length(tensor: Tensor) -> int:
    """Return the tensor's rows; a number is one."""
    return tensor.shape[0] if tensor.ndim else 1


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _taken(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return rows of a tensor, which may be in FP8."""
    if tensor.dtype.itemsize > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


@cache
def _e2m1(device: torch.device) -> Tensor:
    return torch.tensor((*E2M1, *(-size for size in E2M1)), device=device)


def unpacked(packed: Tensor, bits: int) -> Tensor:
    """packed [N, bytes] uint8, the first code in the low bits -> codes [N, bytes * 8 / bits]."""
    shifts = range(0, 8, bits)
    codes = [packed >> shift & (1 << bits) - 1 for shift in shifts]
    return codes[0] if len(codes) == 1 else torch.stack(codes, -1).flatten(1)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Scales in E8M0, exponents plus 127 -> float32."""
    ones = torch.ones(exponents.shape, device=exponents.device)
    return torch.ldexp(ones, exponents.view(torch.uint8).int() - 127)


def fill_dequantized(out: Tensor, weight: StoredWeight) -> None:
    """Write a weight's values to out [N, K], rounded once to its dtype."""
    for first in range(0, len(out), _ROWS):
        last = min(first + _ROWS, len(out))
        out[first:last].copy_(weight.rows(first, last))
