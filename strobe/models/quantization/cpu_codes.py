"""Products of torch for CPUs with codes as a checkpoint stores them, for inputs in bfloat16.

torch multiplies codes of 4 bits whose groups have a scale and a zero, and codes of 8 bits whose
rows have a scale, all in bfloat16; it sums in float32 and rounds outputs to bfloat16. Scales that
bfloat16 does not hold are sums of two that it holds, of which each has a product. Legend: T rows, N
outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.models.linear import StoredWeight
from strobe.models.quantization.grouped import GridWeight, GroupWeight, unpacked

GROUPS = (32, 64, 128, 256)
"""Sizes of groups that torch's product takes."""
MULTIPLE = 16
"""Of outputs."""
MAX_TERMS = 2


class Int4Codes:
    """Codes of 4 bits. scales: for each term [G, N, 2], scales and the values of code 8."""

    def __init__(self, codes: Tensor, scales: list[Tensor], group: int):
        self.values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.scales = scales
        self.group = group

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + sum(scale.nbytes for scale in self.scales)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x Wᵀ [T, N]."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = product(x, self.values, self.group, self.scales[0])
        for scale in self.scales[1:]:
            y += product(x, self.values, self.group, scale)
        return y


class Int8Codes:
    """Codes of 8 bits. scale [N]: in bfloat16 if that is exact, else in float32."""

    def __init__(self, values: Tensor, scale: Tensor):
        self.values = values
        is_exact = torch.equal(scale.bfloat16().float(), scale)
        self.scale = scale.bfloat16() if is_exact else torch.ones_like(scale).bfloat16()
        self.factor = None if is_exact else scale

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        factor = 0 if self.factor is None else self.factor.nbytes
        return self.values.nbytes + self.scale.nbytes + factor

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x Wᵀ [T, N]."""
        y = torch.ops.aten._weight_int8pack_mm(x, self.values, self.scale)
        return y if self.factor is None else (y * self.factor).bfloat16()


CodesProduct = Int4Codes | Int8Codes


def codes_product(weight: StoredWeight) -> CodesProduct | None:
    """Return torch's product with exactly the values of a weight on a CPU; None if there is
    none."""
    if weight.shape[0] % MULTIPLE or weight.shape[1] % GROUPS[0]:
        return None
    if isinstance(weight, GridWeight):
        return _int8_rows(weight)
    if not isinstance(weight, GroupWeight) or weight.is_float or weight.index is not None:
        return None
    if weight.global_scale is not None or weight.offset is not None:
        return None
    if weight.bits == 4 and weight.group in GROUPS:
        return _int4_groups(weight)
    if weight.bits == 8 and weight.group >= weight.inputs and weight.zero is None:
        values = (weight.codes ^ 128).view(torch.int8)
        return Int8Codes(values, weight.scale[:, 0].float())
    return None


def _int8_rows(weight: GridWeight) -> Int8Codes | None:
    outputs, _ = weight.shape
    is_plain = weight.values.dtype == torch.int8 and weight.zero is None
    rows = weight.scale.shape[0]
    if not is_plain or weight.scale.shape[1] != 1 or rows not in (1, outputs):
        return None
    return Int8Codes(weight.values, weight.scale[:, 0].float().expand(outputs).contiguous())


def _int4_groups(weight: GroupWeight) -> Int4Codes | None:
    if weight.inputs % weight.group:
        return None
    scale = weight.scale.double()
    middle = torch.zeros_like(scale)  # the value of code 8
    if weight.zero is not None:
        middle = (8 - weight.zero.double()) * scale
    terms = _terms(torch.stack([scale, middle], 2))
    if terms is None:
        return None
    codes = unpacked(weight.codes, 4)[:, : weight.inputs]
    return Int4Codes(codes, [term.transpose(0, 1).contiguous() for term in terms], weight.group)


def _terms(values: Tensor) -> list[Tensor] | None:
    """Return the fewest numbers in bfloat16 that sum up to values exactly; None if more than
    MAX_TERMS."""
    terms = list[Tensor]()
    while len(terms) < MAX_TERMS:
        terms.append(values.bfloat16())
        values = values - terms[-1].double()
        if not bool(values.any()):
            return terms
    return None
