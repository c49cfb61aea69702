"""Linear layers, which know the format of their weight.

Layers and families create a `Linear` and pass it to ops. Loading sets the format of its weight: the
training dtype, or a format of `strobe.models.quantization`. Legend: N outputs, K inputs, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.kernels.reference_experts import DequantizedExperts
from strobe.models.weight_counts import WeightCounts


class Format(Protocol):
    """How quantized weights are stored."""

    @property
    def bits_per_value(self) -> float:
        """Bits of a value in memory, its share of scales included, without scales of rows."""
        ...

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        """Stored values and scales -> the weight [..., N, K] in float32."""
        ...

    def fill_random(self, values: Tensor, generator: torch.Generator) -> None:
        """Fill stored values at random, without NaN, for measurements of speed."""
        ...

    def fill_scale(self, scale: Tensor) -> None:
        """Fill the scales of random values with one that makes a small weight."""
        ...


class StoredWeight(Protocol):
    """A quantized weight [N, K] as a checkpoint stores it."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """All that its values are multiplied or divided by."""
        ...

    def rows(self, first: int, last: int) -> Tensor:
        """Return the values of rows first to last - 1 in float32."""
        ...

    def copied(self) -> StoredWeight:
        """Return the weight in memory of its own, laid out for products."""
        ...

    def take(self, order: Tensor) -> StoredWeight:
        """Return a weight whose row i is the row order[i] of this one."""
        ...

    def scaled(self, factor: float) -> StoredWeight:
        """Return a weight of this one's values times a factor."""
        ...


class StoredProduct(Protocol):
    """The product with a weight that stays as a checkpoint stores it."""

    @property
    def parts(self) -> Sequence[StoredWeight]:
        """Weights whose outputs follow one another."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in memory."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x Wᵀ + bias [T, N]."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K], dequantized to dtype."""
        ...

    def reorder(self, order: Tensor) -> None:
        """See `Linear.reorder`."""
        ...

    def multiply(self, first: int, factor: float) -> None:
        """See `Linear.multiply`."""
        ...

    def pack(self) -> bool:
        """Let a CPU's own products multiply the weight, if they are exact; return whether they
        are."""
        ...

    def join(self) -> None:
        """Make parts of one form one part."""
        ...


class StoredExperts(DequantizedExperts, Protocol):
    """Weights [E, N, K] of experts that stay as a checkpoint stores them."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    @property
    def stack(self) -> StoredWeight | None:
        """The weights as one [E * N, K]; None before loading."""
        ...

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K], dequantized to dtype."""
        ...


Outputs = int | Mapping[str, int]
SummedSplit = Literal["inputs", "experts"]
"""What several ranks divide among them of a layer whose output is the sum of their outputs."""
Product = Callable[[Tensor], Tensor]
"""x [T, K] -> x Wᵀ + bias, with a weight that only it can read."""


class Linear(nn.Module):
    """x Wᵀ + bias with W [N, K], or for each of E experts with W [E, N, K].

    weight: W in the model's dtype, or its values in `format`, which also has `scale`. parts: number
    of outputs of each of the checkpoint's layers that this layer stacks, in order; empty if it
    stacks none. fixed: loading keeps the weight in this format, whatever weight_dtype says.
    product: the layer as a function, once its weight is packed; then `weight` is empty. stored: the
    product, if it holds the weight as the checkpoint stores it. held_experts: so for experts, whose
    `weight` is then [E, 0, 0]. split: see `SummedSplit`; None if
    ranks divide its outputs, or nothing.
    """

    scale: Tensor | None

    def __init__(
        self,
        inputs: int,
        size: Outputs,
        bias: bool = False,
        experts: int = 0,
        fixed: bool = False,
        split: SummedSplit | None = None,
    ):
        """size: number of outputs, or the `parts`."""
        super().__init__()
        self.parts: Mapping[str, int] = {} if isinstance(size, int) else size
        outputs = size if isinstance(size, int) else sum(size.values())
        self.in_features = inputs
        self.out_features = outputs
        self.experts = experts
        shape = (experts, outputs, inputs) if experts else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[:-1])) if bias else None
        self.register_buffer("scale", None, persistent=False)
        self.format: Format | None = None
        self.product: Product | None = None
        self.stored: StoredProduct | None = None
        self.held_experts: StoredExperts | None = None
        self.fixed = fixed
        self.split: SummedSplit | None = split
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)

    def weight_counts(self) -> WeightCounts:
        """Count the values of the weight, however they are stored, and of the bias."""
        size = self.in_features * self.out_features
        biases = 0 if self.bias is None else self.bias.numel()
        if self.experts:
            return WeightCounts(experts=self.experts * size, small=biases)
        return WeightCounts(linear=size, small=biases)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, dequantized to `dtype` if it is quantized."""
        if self.stored is not None:
            return self.stored.dense(dtype)
        if self.held_experts is not None:
            return self.held_experts.dense(dtype)
        view = LinearView(
            weight=self.weight,
            bias=self.bias,
            scale=self.scale,
            format=self.format,
        )
        return view.dense(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return apply(self, x)

    def reorder(self, order: Tensor) -> None:
        """Reorder outputs in place: output i becomes the former output order[i]."""
        weight = self.weight
        if self.stored is not None:
            weight = None
            self.stored.reorder(order)
        for tensor in (weight, self.bias, self.scale):
            if tensor is not None:  # FP8 is moved as bytes
                rows = tensor.data.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor.data
                rows.copy_(rows[order])

    def multiply(self, first: int, factor: float) -> None:
        """Multiply outputs from `first` on by a factor, in place."""
        weight = self.weight if self.scale is None else self.scale
        if self.stored is not None:
            weight = None
            self.stored.multiply(first, factor)
        for tensor in (weight, self.bias):
            if tensor is not None:
                tensor.data[first:] *= factor


class LinearView(NamedTuple):
    """A linear layer over tensors of other modules; see `Linear`."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    format: Format | None = None
    product: Product | None = None
    stored: StoredProduct | None = None
    held_experts: DequantizedExperts | None = None

    @classmethod
    def concat(cls, linears: Sequence[Linear], first: int) -> LinearView:
        """Concatenate the outputs from `first` on of layers of one format. Weights that are held as
        stored are dequantized."""
        biases = [x.bias[first:] for x in linears if x.bias is not None]
        scales = [x.scale[first:] for x in linears if x.scale is not None]
        return cls(
            weight=torch.cat([_own_weight(x)[first:] for x in linears]),
            bias=torch.cat(biases) if biases else None,
            scale=torch.cat(scales) if scales else None,
            format=linears[0].format,
        )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """See `Linear.dense`."""
        if self.format is None or self.scale is None:
            return self.weight
        return self.format.dequantize(self.weight, self.scale).to(dtype)


AnyLinear = Linear | LinearView


def _own_weight(linear: Linear) -> Tensor:
    """Return the values in the layer's format."""
    return linear.weight if linear.stored is None else linear.stored.dense(linear.weight.dtype)


def apply(linear: AnyLinear, x: Tensor) -> Tensor:
    """x [T, K] -> x Wᵀ + bias [T, N]."""
    if linear.product is not None:
        return linear.product(x)
    return F.linear(x, linear.dense(x.dtype), linear.bias)
