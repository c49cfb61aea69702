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
from strobe.kernels.coded import CodedWeight, coded_gemm
from strobe.kernels.gemm import Workspace, launch
from strobe.kernels.gemm_table import BUCKETS, LARGE, Gemm, GemmConfig, GemmTable, Weight, bucket_of
from strobe.kernels.operands import PLAIN, Argmax, Epilogue, Input, Scaled
from strobe.kernels.rowwise import quantize_rows, rms_norm, silu_mul
from strobe.kernels.sampling import argmax

logger = logging.getLogger(__name__)


AnyWeight = Weight | CodedWeight
"""Weights in codes have a kernel of their own, in coded.py."""


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

    def linear(self, x: Input, weight: AnyWeight, epilogue: Epilogue = PLAIN) -> Tensor:
        """x [M, K], weight [N, K] -> [M, N]: residual + act(norm(x) Wᵀ + bias), rounded once.

        With an activation, weight is [2I, K], gate rows then up rows, and the result [M, I].
        """
        return self.add(x, weight, epilogue)[0]

    def add(self, x: Input, weight: AnyWeight, epilogue: Epilogue) -> tuple[Tensor, Scaled | None]:
        """Return the same as `linear`, and the result as prepared for the epilogue's next norm:
        pass it to the next GEMM as `scaled`, with the result as rows.

        Preparing it is free here and saves the next GEMM its norm. None if unavailable; the next
        GEMM then normalizes.
        """
        if isinstance(weight, CodedWeight):
            return coded_gemm(_normalized(x), weight, epilogue, self.workspace), None
        config, gemm = self._choose(x, weight, epilogue)
        if config.quack is not None:
            y = self._by_quack(config.quack, x, weight, epilogue)
            if y is not None:
                return y, None
        if config.kernel == "cublas":
            return _unfused(x, weight, epilogue), None
        if self.dtype == torch.float16 and epilogue.next_norm is not None:
            # A row that is not yet divided by its root mean square may overflow.
            epilogue = epilogue._replace(next_norm=None)
        out = epilogue.out
        if out is None:
            out = x.rows.new_empty(x.rows.shape[0], gemm.outputs)
            epilogue = epilogue._replace(out=out)
        return out, self._launch(config, gemm, x=x, weight=weight, epilogue=epilogue)

    def head_argmax(
        self,
        x: Input,
        weight: AnyWeight,
        *,
        margins: Tensor | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """x [R, K], weight [V, K] -> [R] int64: the argmax of norm(x) Wᵀ, without logits in memory.

        Logits are rounded to the model's dtype first; the lowest id wins a tie, and a row with a
        NaN gives -1. margins, largest: filled; see `Argmax`.
        """
        if isinstance(weight, CodedWeight):
            return argmax(self.linear(x, weight), margins, largest)
        epilogue = Epilogue(argmax=Argmax(margins, largest))
        config, gemm = self._choose(x, weight, epilogue)
        if config.kernel == "cublas":
            return argmax(_unfused(x, weight, PLAIN), margins, largest)
        out = x.rows.new_empty(x.rows.shape[0], dtype=torch.int64)
        self._launch(config, gemm, x=x, weight=weight, epilogue=epilogue._replace(out=out))
        return out

    def _choose(self, x: Input, weight: Weight, epilogue: Epilogue) -> tuple[GemmConfig, Gemm]:
        # A GEMM of a scaled x has the configuration of one without norm.
        norm = x.needs_norm
        residual = epilogue.residual is not None
        is_argmax = epilogue.argmax is not None
        rows = x.rows.shape[0]
        fp8 = weight.scale is not None
        bucket = bucket_of(rows) if rows <= self.max_rows else 0
        if rows in LARGE and not (fp8 or is_argmax):
            bucket = rows
        key = weight.data.shape, fp8, norm, epilogue.gated, residual, is_argmax, bucket
        choice = self.chosen.get(key)
        if choice is None:
            n, k = weight.shape
            gemm = Gemm(
                n=n,
                k=k,
                dtype=self.dtype,
                fp8=fp8,
                norm=norm,
                gated=epilogue.gated,
                residual=residual,
                argmax=is_argmax,
            )
            config = GemmConfig(kernel="cublas")
            if bucket:
                config = self.table.choose(gemm, bucket)
            choice = self.chosen[key] = config, gemm
        return choice

    def _launch(
        self, config: GemmConfig, gemm: Gemm, x: Input, weight: Weight, epilogue: Epilogue
    ) -> Scaled | None:
        """Launch the kernel, after one for the norm and one to quantize x where it needs them."""
        by_rows = gemm.fp8 and not config.groups
        if by_rows:
            x = x._replace(scaled=None)
        # In fp16 a row that is not yet divided by its root mean square may overflow.
        overflows = gemm.dtype == torch.float16 and not gemm.fp8
        if x.needs_norm and (by_rows or overflows or not config.fused_norm):
            x = Input(rows=_normalized(x))
        if by_rows:
            rows, scale = quantize_rows(x.rows)
            x = Input(rows=rows, scale=scale)
        return launch(config, gemm, self.workspace, x=x, weight=weight, epilogue=epilogue)

    def _by_quack(
        self, tile: Sequence[int], x: Input, weight: Weight, epilogue: Epilogue
    ) -> Tensor | None:
        """Run the norm and a GEMM of quack-kernels; None if they cannot."""
        gated_sum = epilogue.gated and epilogue.residual is not None
        gelu = epilogue.activation == "gelu_tanh"
        if self.quack is None or gated_sum or gelu or epilogue.bias is not None:
            return None
        if not quack_gemm.takes(x.rows, weight.data, epilogue.residual, epilogue.out):
            return None
        rows = _normalized(x)
        try:
            return self.quack(
                rows,
                weight.data,
                tile,
                residual=epilogue.residual,
                gated=epilogue.gated,
                out=epilogue.out,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of any kind, as with versions that do not go together
            if x.rows.is_cuda and torch.cuda.is_current_stream_capturing():
                raise
            self.quack = None
            logger.warning("quack-kernels failed, so other kernels are used: %s", error)
        return None


def _normalized(x: Input) -> Tensor:
    """Return norm(x), by a kernel of its own."""
    return x.rows if x.norm is None else rms_norm(x.rows, x.norm.weight, x.norm.eps)


def _unfused(x: Input, weight: Weight, epilogue: Epilogue) -> Tensor:
    """Run norm, cuBLAS and the operations after it, one kernel each."""
    rows = _normalized(x)
    bias = epilogue.bias
    residual = epilogue.residual
    out = epilogue.out
    if weight.scale is not None:
        y = _fp8_gemm(rows, weight.data, weight.scale)
        y = y if bias is None else y.add_(bias)
    elif residual is None or epilogue.gated:
        into = None if epilogue.gated else out
        if bias is None:
            y = torch.mm(rows, weight.data.t(), out=into)
        else:
            y = torch.addmm(bias, rows, weight.data.t(), out=into)
    else:
        y = torch.addmm(residual, rows, weight.data.t(), out=out)
        return y if bias is None else y.add_(bias)
    if epilogue.gated:
        y = silu_mul(y, gelu=epilogue.activation == "gelu_tanh")
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
