# pyright: basic
"""The GEMMs of a model: one kernel each where rows are few, cuBLAS between kernels where many.

Legend: M rows of x, K columns, W [N, K] row-major (gated: [2I, K], gate rows then up rows), V the
vocabulary. The kernel is in gemm.py, what chooses its configuration in table.py.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from strobe.kernels.gemm import Scaled, Workspace, launch
from strobe.kernels.gemm_table import BUCKETS, Gemm, GemmConfig, GemmTable, Weight, bucket_of
from strobe.kernels.rowwise import quantize_rows, rms_norm, silu_mul
from strobe.kernels.sampling import argmax

__all__ = ["Gemms", "Scaled", "Weight"]


class Chooser(Protocol):
    """`Table`, or what a test or the tuner puts in its place."""

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig: ...


class Gemms:
    """The GEMMs of one model on one stream, each computed as the table says.

    Up to `max_rows` rows (at most 128) a GEMM may be triton's; above it is cuBLAS's between
    the row-wise kernels. Run every GEMM once at each bucket of rows before a graph is captured:
    that compiles the kernel and makes room in the workspace.
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

        norm: RMSNorm's weight [K], of any dtype, and epsilon. scaled: what `add` gave along with x,
        for that norm. bias: [N]. gated: weight [2I, K], gate rows then up rows; act(gate, up) =
        silu(gate) * up, or with gelu in its tanh form for silu; the result is [M, I]. out: where to
        put the result, which may be residual itself. x, residual and out may have a row stride.
        """
        # The kernel of a scaled x is that of a GEMM without norm.
        chosen = norm if scaled is None else None
        config, gemm = self._choose(x, weight, chosen, gated=gated, residual=residual is not None)
        if config.kernel == "cublas":
            return self._in_parts(x, weight, norm, residual, gated, out, bias, gelu)
        if out is None:
            out = x.new_empty(x.shape[0], gemm.outputs)
        around = {"bias": bias, "gelu": gelu}
        self._launch(config, gemm, x, weight, norm, residual, out, scaled=scaled, **around)
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
        """residual + x Wᵀ + bias [M, N], and that again as the norm of weight `next_norm` [N] wants
        it.

        The latter costs nothing here and saves the next GEMM its norm: hand it on as `scaled`
        with the result as x. None where that is not to be had: then the next GEMM does it all.
        """
        config, gemm = self._choose(x, weight, None, residual=True)
        if config.kernel == "cublas":
            return self._in_parts(x, weight, None, residual, False, out, bias), None
        if out is None:
            out = x.new_empty(x.shape[0], gemm.outputs)
        # fp16 has no room for a row that is not yet divided by its root mean square.
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
    ) -> Tensor:
        """x [R, K], weight [V, K] -> [R] int64: the id of the largest of norm(x) Wᵀ.

        Logits are rounded to the model's dtype first; the lowest id wins a tie, and a row
        with a NaN gives -1. The logits are never in memory. margins [R] float32: filled
        with how far each one is above the second largest, as `sampler.best_two` has it.
        """
        config, gemm = self._choose(x, weight, norm if scaled is None else None, argmax=True)
        if config.kernel == "cublas":
            return argmax(self._in_parts(x, weight, norm, None, False, None), margins)
        out = x.new_empty(x.shape[0], dtype=torch.int64)
        self._launch(config, gemm, x, weight, norm, None, out, scaled=scaled, margins=margins)
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
        rows, fp8 = x.shape[0], weight.scale is not None
        bucket = bucket_of(rows) if rows <= self.max_rows else 0
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
    ) -> Scaled | None:
        x_scale = None
        rows = gemm.fp8 and not config.groups
        # fp16 has no room for a row that is not yet divided by its root mean square.
        narrow = gemm.dtype == torch.float16 and not gemm.fp8
        if rows:
            scaled = None
        if norm is not None and scaled is None and (rows or narrow or not config.fused_norm):
            x, norm = rms_norm(x, *norm), None
        if rows:
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
        )

    def _in_parts(
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
        """The norm, cuBLAS, and what comes behind, one kernel each."""
        if norm is not None:
            x = rms_norm(x, *norm)
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
        # By rows cuBLAS writes bf16 only.
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
