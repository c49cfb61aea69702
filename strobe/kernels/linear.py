# pyright: basic
"""A model's linear layers: one fused kernel for few rows, cuBLAS between row-wise kernels for many.

Legend: M rows of x, K columns, W [N, K] row-major (gated: [2I, K], gate rows then up rows), V the
vocabulary. The kernel is in gemm.py, its configurations in gemm_table.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from strobe.kernels import quack_gemm
from strobe.kernels.gemm import Scaled, Workspace, launch
from strobe.kernels.gemm_table import BUCKETS, LARGE, Gemm, GemmConfig, GemmTable, Weight, bucket_of
from strobe.kernels.rowwise import quantize_rows, rms_norm, silu_mul
from strobe.kernels.sampling import argmax

__all__ = ["Gemms", "Scaled", "Weight"]

logger = logging.getLogger(__name__)


class Chooser(Protocol):
    """Chooses configurations: a `GemmTable`, or a substitute in tests and in the tuner."""

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig: ...


class Gemms:
    """The GEMMs of one model on one stream, each with the table's configuration.

    GEMMs of up to `max_rows` rows (at most 128) may run in Triton; larger ones run in cuBLAS
    between row-wise kernels. Some run in quack-kernels, if these are installed. Run every GEMM once
    per bucket of rows before capturing a graph, which compiles the kernel and grows the workspace.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        table: Chooser | None = None,
        max_rows: int = 128,
    ) -> None:
        assert max_rows <= BUCKETS[-1]
        self.dtype = dtype
        self.table = GemmTable.of(device) if table is None else table
        self.max_rows = max_rows
        self.workspace = Workspace(device)
        self.quack = quack_gemm.load() if device.type == "cuda" else None
        self.chosen: dict[tuple[object, ...], tuple[GemmConfig, Gemm]] = {}

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        *,
        norm: tuple[Tensor, float] | None = None,
        scaled: Scaled | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gated: bool = False,
        gelu: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """x [M, K], weight [N, K] -> [M, N]: residual + act(norm(x) Wᵀ + bias), rounded once.

        norm: RMSNorm's weight [K], of any dtype, and epsilon. scaled: x prepared for this norm, as
        returned by `add`. bias: [N]. gated: weight is [2I, K], gate rows then up rows, and
        act(gate, up) = silu(gate) * up, or gelu (tanh) instead of silu; the result is [M, I]. out:
        the tensor to write, which may be residual. x, residual and out may have a row stride.
        """
        # A GEMM of a scaled x has the configuration of one without norm.
        fused_norm = norm if scaled is None else None
        has_residual = residual is not None
        config, gemm = self._choose(x, weight, fused_norm, gated=gated, residual=has_residual)
        if config.quack is not None and bias is None and not gelu:
            y = self._by_quack(config.quack, x, weight, norm, residual, gated, out)
            if y is not None:
                return y
        if config.kernel == "cublas":
            return self._unfused(x, weight, norm, residual, gated, out, bias, gelu)
        if out is None:
            out = x.new_empty(x.shape[0], gemm.outputs)
        self._launch(
            config,
            gemm,
            x,
            weight,
            norm=norm,
            residual=residual,
            out=out,
            scaled=scaled,
            bias=bias,
            gelu=gelu,
        )
        return out

    def add(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor,
        *,
        next_norm: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Scaled | None]:
        """Return residual + x Wᵀ + bias [M, N], and the same prepared for the norm of weight
        `next_norm` [N]: pass it to the next GEMM as `scaled`, with the sum as x.

        Preparing it is free here and saves the next GEMM its norm. None if unavailable; the next
        GEMM then normalizes.
        """
        config, gemm = self._choose(x, weight, None, residual=True)
        if config.quack is not None and bias is None:
            y = self._by_quack(config.quack, x, weight, None, residual, False, out)
            if y is not None:
                return y, None
        if config.kernel == "cublas":
            return self._unfused(x, weight, None, residual, False, out, bias), None
        if out is None:
            out = x.new_empty(x.shape[0], gemm.outputs)
        # In fp16 a row that is not yet divided by its root mean square may overflow.
        fused_norm = None if self.dtype == torch.float16 else next_norm
        return out, self._launch(
            config, gemm, x, weight, None, residual, out, next_norm=fused_norm, bias=bias
        )

    def head_argmax(
        self,
        x: Tensor,
        weight: Weight,
        *,
        norm: tuple[Tensor, float] | None = None,
        scaled: Scaled | None = None,
        margins: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """x [R, K], weight [V, K] -> [R] int64: the argmax of norm(x) Wᵀ, without logits in memory.

        Logits are rounded to the model's dtype first; the lowest id wins a tie, and a row with a
        NaN gives -1. margins [R] float32: filled with the margins over the second largest logit, as
        in `sampler.best_two`. largest [R] float32: filled with the largest logits.
        """
        config, gemm = self._choose(x, weight, norm if scaled is None else None, argmax=True)
        if config.kernel == "cublas":
            return argmax(self._unfused(x, weight, norm, None, False, None), margins, largest)
        out = x.new_empty(x.shape[0], dtype=torch.int64)
        self._launch(
            config,
            gemm,
            x,
            weight,
            norm=norm,
            residual=None,
            out=out,
            scaled=scaled,
            margins=margins,
            largest=largest,
        )
        return out

    def _choose(
        self,
        x: Tensor,
        weight: Weight,
        norm: tuple[Tensor, float] | None,
        *,
        gated: bool = False,
        residual: bool = False,
        argmax: bool = False,
    ) -> tuple[GemmConfig, Gemm]:
        rows = x.shape[0]
        fp8 = weight.scale is not None
        bucket = bucket_of(rows) if rows <= self.max_rows else 0
        if rows in LARGE and not (fp8 or argmax):
            bucket = rows
        key = weight.data.shape, fp8, norm is not None, gated, residual, argmax, bucket
        choice = self.chosen.get(key)
        if choice is None:
            n, k = weight.data.shape
            gemm = Gemm(n, k, self.dtype, fp8, norm is not None, gated, residual, argmax)
            config = self.table.choose(gemm, bucket) if bucket else GemmConfig("cublas")
            choice = self.chosen[key] = config, gemm
        return choice

    def _launch(
        self,
        config: GemmConfig,
        gemm: Gemm,
        x: Tensor,
        weight: Weight,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        out: Tensor,
        *,
        scaled: Scaled | None = None,
        next_norm: Tensor | None = None,
        bias: Tensor | None = None,
        gelu: bool = False,
        margins: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> Scaled | None:
        x_scale = None
        by_rows = gemm.fp8 and not config.groups
        # In fp16 a row that is not yet divided by its root mean square may overflow.
        overflows = gemm.dtype == torch.float16 and not gemm.fp8
        if by_rows:
            scaled = None
        if norm is not None and scaled is None and (by_rows or overflows or not config.fused_norm):
            gain, eps = norm
            x = rms_norm(x, gain, eps)
            norm = None
        if by_rows:
            x, x_scale = quantize_rows(x)
        return launch(
            config,
            gemm,
            self.workspace,
            x,
            weight,
            out,
            norm=norm,
            scaled=scaled,
            residual=residual,
            next_norm=next_norm,
            x_scale=x_scale,
            bias=bias,
            gelu=gelu,
            margins=margins,
            largest=largest,
        )

    def _by_quack(
        self,
        tile: Sequence[int],
        x: Tensor,
        weight: Weight,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        gated: bool,
        out: Tensor | None,
    ) -> Tensor | None:
        """Run the norm and a GEMM of quack-kernels; None if they cannot."""
        gated_sum = gated and residual is not None
        if self.quack is None or gated_sum:
            return None
        if not quack_gemm.takes(x, weight.data, residual, out):
            return None
        if norm is not None:
            gain, eps = norm
            x = rms_norm(x, gain, eps)
        try:
            return self.quack(x, weight.data, tile, residual=residual, gated=gated, out=out)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind, as with versions that do not go together
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise
            self.quack = None
            logger.warning("quack-kernels failed, so other kernels are used: %s", error)
        return None

    def _unfused(
        self,
        x: Tensor,
        weight: Weight,
        norm: tuple[Tensor, float] | None,
        residual: Tensor | None,
        gated: bool,
        out: Tensor | None,
        bias: Tensor | None = None,
        gelu: bool = False,
    ) -> Tensor:
        """Run norm, cuBLAS and the operations after it, one kernel each."""
        if norm is not None:
            gain, eps = norm
            x = rms_norm(x, gain, eps)
        if weight.scale is not None:
            y = _fp8_gemm(x, weight.data, weight.scale)
            y = y if bias is None else y.add_(bias)
        elif residual is None or gated:
            into = None if gated else out
            if bias is None:
                y = torch.mm(x, weight.data.t(), out=into)
            else:
                y = torch.addmm(bias, x, weight.data.t(), out=into)
        else:
            y = torch.addmm(residual, x, weight.data.t(), out=out)
            return y if bias is None else y.add_(bias)
        if gated:
            y = silu_mul(y, gelu=gelu)
        if residual is not None:
            return torch.add(residual, y, out=out)
        return y if out is None or out is y else out.copy_(y)


def _fp8_gemm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    rows, x_scale = quantize_rows(x)
    if x.is_cuda and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0:
        # With scales by row, cuBLAS writes bf16 only.
        y = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rows,
            weight.t(),
            scale_a=x_scale[:, None],
            scale_b=scale[None, :],
            out_dtype=torch.bfloat16,
        )
        return y.to(x.dtype)
    y = rows.float() @ weight.float().t() * x_scale[:, None] * scale
    return y.to(x.dtype)
