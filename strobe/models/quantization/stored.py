"""Linear layers whose weights stay as a checkpoint stores them.

A value is dequantized whenever it is multiplied, and rounded once to the dtype of the rows, so that
a product is that with the weight dequantized while loading. `cpu_codes` has products that round no
value. Legend: T rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.checkpoint import TORCH
from strobe.models.linear import Linear, StoredWeight
from strobe.models.quantization.cpu_codes import CodesProduct, codes_product
from strobe.models.quantization.forms import EXPONENTS, Form
from strobe.models.quantization.grouped import fill_dequantized, joined
from strobe.models.weight_mapping import CheckpointTensors, WeightPart, copy

HEAD = "lm_head.weight"
ZEROS = ("zero_point", "qzeros")


class HeldProduct:
    """The product of a linear layer with weights that are held as stored.

    parts: weights whose outputs follow one another; empty before loading, and once they are packed.
    packed: torch's products with the weights, in the place of `parts`. nbytes: of the tensors that
    they are read from, or of packed weights."""

    def __init__(self, linear: Linear, nbytes: int):
        self.linear = linear
        self.nbytes = nbytes
        self.parts: tuple[StoredWeight, ...] = ()
        self.packed: tuple[CodesProduct, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x Wᵀ + bias [T, N]."""
        if self.packed:
            rows = x.flatten(0, -2).bfloat16().contiguous()
            y = torch.cat([product(rows) for product in self.packed], -1)
            y = y.unflatten(0, x.shape[:-1]).to(x.dtype)
        else:
            y = torch.cat([F.linear(x, self._dense(part, x.dtype)) for part in self.parts], -1)
        bias = self.linear.bias
        return y if bias is None else y + bias

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in dtype, of packed ones rounded to bfloat16."""
        if self.packed:
            one_each = torch.eye(self.linear.in_features, dtype=torch.bfloat16)
            return torch.cat([product(one_each).t() for product in self.packed]).to(dtype)
        return torch.cat([self._dense(part, dtype) for part in self.parts])

    def reorder(self, order: Tensor) -> None:
        """See `Linear.reorder`. Raises ValueError if outputs would leave their part."""
        parts = list[StoredWeight]()
        first = 0
        for part in self.parts:
            own = order[first : first + part.shape[0]] - first
            if int(own.min()) < 0 or int(own.max()) >= len(own):
                raise ValueError("Outputs are reordered beyond a stored weight; this is an error.")
            parts.append(part.take(own))
            first += len(own)
        self.parts = tuple(parts)

    def multiply(self, first: int, factor: float) -> None:
        """See `Linear.multiply`. `first` begins a part."""
        parts = list[StoredWeight]()
        start = 0
        for part in self.parts:
            parts.append(part.scaled(factor) if start >= first else part)
            start += part.shape[0]
        self.parts = tuple(parts)

    def pack(self) -> bool:
        """Let torch's products of a CPU multiply the codes of rows in bfloat16, if all parts have
        one with exactly their values; return whether they have. Outputs can no longer be reordered
        or multiplied."""
        if self.packed:  # by another engine that shares the weights
            return True
        packed = list[CodesProduct]()
        for part in self.parts:
            product = codes_product(part)
            if product is None:
                return False
            packed.append(product)
        self.packed = tuple(packed)
        self.parts = ()
        self.nbytes = sum(product.nbytes for product in packed)
        return True

    def join(self) -> None:
        """Make parts of one form one part, which kernels multiply at once. Outputs can no longer be
        reordered or multiplied."""
        if len(self.parts) > 1:
            whole = joined(self.parts)
            self.parts = self.parts if whole is None else (whole,)

    @staticmethod
    def _dense(part: StoredWeight, dtype: torch.dtype) -> Tensor:
        out = torch.empty(part.shape, dtype=dtype, device=part.scales[0].device)
        fill_dequantized(out, part)
        return out


def held_bytes(form: Form, tensors: CheckpointTensors, *, indexed: bool = True) -> int:
    """Return the bytes of a held weight: its tensors, but zeros are unpacked to a byte each, scales
    that are powers of two become float32, and groups of inputs int64. indexed: whether inputs may
    have groups of their own."""
    total = 0
    unused = ("weight_shape",)
    if not form.scheme.asymmetric:
        unused += ZEROS
    if not indexed:
        unused += ("g_idx",)
    for name, shape in form.sources.items():
        if name.endswith(unused):
            continue
        dtype = tensors.dtypes[name]
        size = prod(shape) * TORCH[dtype].itemsize
        if name.endswith(ZEROS) and dtype == "I32":
            size *= 8 // form.scheme.bits
        elif name.endswith("scale") and dtype in EXPONENTS:
            size *= 4
        elif name.endswith("g_idx"):
            size = prod(shape) * 8
        total += size
    return total


def can_hold(name: str, linear: Linear | None, parts: Sequence[WeightPart]) -> bool:
    """Whether a linear layer can keep its weight as stored: if that is the checkpoint's, part by
    part. Others read the weights of layers whose format is fixed, but for the head."""
    if linear is None or linear.weight.ndim != 2 or (linear.fixed and name != HEAD):
        return False
    if len(parts) > 1 and any(part.stacked for part in parts):
        return False
    return all(part.fill is copy and len(part.sources) == 1 for part in parts)


def hold_product(linear: Linear, nbytes: int) -> HeldProduct:
    """Make a layer on the meta device multiply by weights that are held as stored; return its
    product, which is empty. nbytes: of these weights."""
    product = HeldProduct(linear, nbytes)
    linear.stored = product
    linear.product = product
    empty_weight(linear)
    return product


def empty_weight(linear: Linear) -> None:
    """Make a layer on the meta device have no weight of its own."""
    empty = torch.empty(0, dtype=linear.weight.dtype, device=linear.weight.device)
    linear.weight = nn.Parameter(empty, requires_grad=False)
