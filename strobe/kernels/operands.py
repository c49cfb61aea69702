"""The parts of a linear layer's call: its rows, what precedes the product, and what follows it.

Legend: M rows of x, K columns, W [N, K] row-major (gated: [2N, K], gate rows then up rows), y the
result [M, N].
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
"""Of a gated linear layer with outputs [gate | up]: activation(gate) * up."""


class RowNorm(NamedTuple):
    """An RMSNorm of rows: its weight [K], of any dtype, and epsilon."""

    weight: Tensor
    eps: float


class Scaled(NamedTuple):
    """x prepared for a norm by the previous GEMM: `data` [M, K] is x times the norm's weight, to be
    divided by x's root mean square, which follows from `sums` [M, parts] of squares in fp32."""

    data: Tensor
    sums: Tensor


class Input(NamedTuple):
    """The input of a GEMM, which multiplies norm(rows) by W."""

    rows: Tensor
    """x [M, K], of any row stride."""
    norm: RowNorm | None = None
    scaled: Scaled | None = None
    """x as the previous GEMM prepared it for this norm; see `Gemms.add`."""
    scale: Tensor | None = None
    """[M] fp32: rows are float8_e4m3fn, to be multiplied by it. Only the kernel takes them."""

    @property
    def needs_norm(self) -> bool:
        """Whether nothing of the norm is computed yet."""
        return self.norm is not None and self.scaled is None


class Argmax(NamedTuple):
    """The argmax of each row of the product, in place of the product, and what to fill with it."""

    margins: Tensor | None = None
    """[M] fp32: the margin over the second largest logit, as in `sampler.best_two`."""
    largest: Tensor | None = None
    """[M] fp32: the largest logit."""


class Epilogue(NamedTuple):
    """What happens to the product: residual + activation(product + bias), rounded once."""

    bias: Tensor | None = None
    """[N], gated [2N]."""
    activation: Activation | None = None
    """act(gate) * up of a gated W."""
    residual: Tensor | None = None
    """[M, N], of any row stride."""
    next_norm: Tensor | None = None
    """Weight [N] of the norm that reads y, for which to prepare y; see `Gemms.add`."""
    argmax: Argmax | None = None
    out: Tensor | None = None
    """y [M, N] of any row stride, which may be the residual; with argmax [M] int64."""

    @property
    def gated(self) -> bool:
        return self.activation is not None


PLAIN = Epilogue()
"""Nothing but the product."""
