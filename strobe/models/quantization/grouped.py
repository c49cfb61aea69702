"""Weights in the forms that all formats of checkpoints are brought into, and their values.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from math import gcd
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
    consecutive inputs. offset: [N, G], added to scaled codes; then codes have no middle.
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
    offset: Tensor | None = None

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
        elif not self.is_float and self.offset is None:
            values -= 2 ** (self.bits - 1)
        values *= self._by_value(self.scale[first:last].float())
        if self.offset is not None:
            values += self._by_value(self.offset[first:last].float())
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
            offset=None if self.offset is None else _copy(self.offset),
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
        return replace(
            self,
            codes=self.codes[order],
            scale=_taken(self.scale, order),
            zero=None if self.zero is None else self.zero[order],
            offset=None if self.offset is None else self.offset[order],
        )

    def scaled(self, factor: float) -> GroupWeight:
        """See `StoredWeight`."""
        offset = None if self.offset is None else self.offset.float() * factor
        return replace(self, scale=self.scale.float() * factor, offset=offset)

    def to(self, device: torch.device) -> GroupWeight:
        """Return the weight on a device."""
        tensors = {name: value.to(device) for name, value in _tensors(self).items()}
        return replace(self, **tensors)

    def columns(self, first: int, last: int) -> GroupWeight:
        """Return the weight of inputs first to last - 1, which are whole groups."""
        groups = slice(first // self.group, -(-last // self.group))
        return replace(
            self,
            codes=self.codes[:, first * self.bits // 8 : last * self.bits // 8],
            scale=self.scale[:, groups],
            inputs=last - first,
            zero=None if self.zero is None else self.zero[:, groups],
            offset=None if self.offset is None else self.offset[:, groups],
        )

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


def joined(weights: Sequence[StoredWeight]) -> StoredWeight | None:
    """Return a weight with the outputs of all, whose values are the same; None if their forms
    differ."""
    first = weights[0]
    if isinstance(first, GroupWeight):
        return _joined_groups([w for w in weights if isinstance(w, GroupWeight)], len(weights))
    if isinstance(first, GridWeight):
        return _joined_grids([w for w in weights if isinstance(w, GridWeight)], len(weights))
    return None


def _joined_groups(weights: Sequence[GroupWeight], count: int) -> GroupWeight | None:
    first = weights[0]
    forms = {
        (w.bits, w.group, w.inputs, w.is_float, w.is_divisor, w.codes.shape[1], *_dtypes(w))
        for w in weights
    }
    if len(weights) < count or len(forms) > 1 or first.index is not None:
        return None
    return replace(
        first,
        codes=torch.cat([w.codes for w in weights]),
        scale=_cat([w.scale for w in weights]),
        zero=None
        if first.zero is None
        else torch.cat([w.zero for w in weights if w.zero is not None]),
        global_scale=_joined_factors(weights),
        offset=None
        if first.offset is None
        else torch.cat([w.offset for w in weights if w.offset is not None]),
    )


def _joined_factors(weights: Sequence[GroupWeight]) -> Tensor | None:
    """Return the global scales of equal parts of all outputs."""
    factors = [w.global_scale.flatten() for w in weights if w.global_scale is not None]
    if not factors:
        return None
    sizes = [len(w.codes) // len(f) for w, f in zip(weights, factors, strict=True)]
    rows = reduce(gcd, sizes)
    pairs = zip(factors, sizes, strict=True)
    factor = torch.cat([f.repeat_interleave(size // rows) for f, size in pairs])
    return factor[:1] if bool((factor == factor[0]).all()) else factor


def _joined_grids(weights: Sequence[GridWeight], count: int) -> GridWeight | None:
    first = weights[0]
    inputs = first.shape[1]
    forms = {(w.shape[1], min(w.block[1], inputs), *_dtypes(w)) for w in weights}
    if len(weights) < count or len(forms) > 1:
        return None
    blocks = [len(w.values) if len(w.scale) == 1 else w.block[0] for w in weights]
    rows = reduce(gcd, [len(w.values) for w in weights], reduce(gcd, blocks))
    if rows < min([8, *blocks]):  # scales would take too much memory
        return None
    index = [
        torch.arange(0, len(w.values), rows, device=w.scale.device) // block
        for w, block in zip(weights, blocks, strict=True)
    ]
    zeros = [w.zero[i] for w, i in zip(weights, index, strict=True) if w.zero is not None]
    return GridWeight(
        values=_cat([w.values for w in weights]),
        scale=_cat([_taken(w.scale, i) for w, i in zip(weights, index, strict=True)]),
        block=(rows, first.block[1]),
        zero=torch.cat(zeros) if zeros else None,
    )


def _dtypes(weight: GroupWeight | GridWeight) -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((name, value.dtype) for name, value in _tensors(weight).items())


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors, which may be in FP8, by rows."""
    dtype = tensors[0].dtype
    if dtype.itemsize > 1:
        return torch.cat([*tensors])
    return torch.cat([tensor.view(torch.uint8) for tensor in tensors]).view(dtype)


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
