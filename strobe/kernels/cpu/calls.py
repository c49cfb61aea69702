"""The functions of `operations.c` as calls with tensors. All tensors are contiguous and in float32,
or int64 where they count. Legend: T rows, H hidden size, D head size.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.kernels.cpu.library import load_library


class NormFactors(NamedTuple):
    """An RMSNorm of n values as C computes it: x / sqrt(|x|^2 + floor^2) * gain. gain [n], or of
    several norms."""

    gain: Tensor
    floor: float


class BatchStruct(ctypes.Structure):
    """`Batch` in C."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("positions", "starts", "sizes")),
        *((name, ctypes.c_void_p) for name in ("row_starts", "slots")),
        *((name, ctypes.c_int64) for name in ("rows", "spans", "page_size", "columns", "limit")),
        ("most_rows", ctypes.c_int64),
    ]


class LayerStruct(ctypes.Structure):
    """`Layer` in C."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gains", "cos", "sin", "store")),
        *((name, ctypes.c_int64) for name in ("q_heads", "kv_heads", "width", "window")),
        *((name, ctypes.c_int64) for name in ("causal", "own_values", "value_norm")),
        *((name, ctypes.c_float) for name in ("floor", "value_floor")),
    ]


def is_plain(x: Tensor) -> bool:
    """Whether the functions can read a tensor."""
    return x.dtype == torch.float32 and x.is_contiguous()


class CpuCalls:
    """The loaded library. Raises CompilerMissing."""

    def __init__(self) -> None:
        self.library = load_library()
        self._norm = self.library.strobe_norm
        self._add_norm = self.library.strobe_add_norm
        self._norm_add = self.library.strobe_norm_add
        self._gate = self.library.strobe_gate
        self._convolve = self.library.strobe_convolve
        self._store_context = self.library.strobe_store_context
        self.attention = self.library.strobe_attention

    def has_width(self, width: int) -> bool:
        """Whether `attention` has code for heads of this size."""
        return bool(self.library.strobe_has_width(width))

    def norm(self, x: Tensor, factors: NormFactors) -> Tensor:
        """x [T, H] -> norm(x) [T, H]."""
        rows, size = x.shape
        y = torch.empty_like(x)
        self._norm(y.data_ptr(), x.data_ptr(), factors.gain.data_ptr(), factors.floor, rows, size)
        return y

    def add_norm(self, y: Tensor, x: Tensor, factors: NormFactors) -> Tensor:
        """y += x, both [T, H] -> norm(y)."""
        rows, size = y.shape
        normed = torch.empty_like(y)
        self._add_norm(
            y.data_ptr(),
            x.data_ptr(),
            normed.data_ptr(),
            factors.gain.data_ptr(),
            factors.floor,
            rows,
            size,
        )
        return normed

    def norm_add(self, y: Tensor, x: Tensor, factors: NormFactors, scale: float) -> None:
        """y = (x + norm(y)) * scale, all [T, H]."""
        rows, size = y.shape
        self._norm_add(
            y.data_ptr(), x.data_ptr(), factors.gain.data_ptr(), factors.floor, scale, rows, size
        )

    def gate(self, x: Tensor, *, gelu: bool) -> Tensor:
        """x [T, 2 I], gates and then ups -> activation(gate) * up [T, I]."""
        rows, size = x.shape
        y = x.new_empty(rows, size // 2)
        self._gate(y.data_ptr(), x.data_ptr(), rows, size // 2, gelu)
        return y

    def convolve(
        self, x: Tensor, base: Tensor, dynamic: Tensor, offsets: Tensor, onto: Tensor | None
    ) -> Tensor:
        """x [T, H], base [taps, H], dynamic [T, taps, H / G], whose rows need not follow one
        another -> [T, H]; see `strobe.kernels.reference_convolution.convolve`."""
        rows, size = x.shape
        taps = base.shape[0]
        y = torch.empty_like(x)
        self._convolve(
            y.data_ptr(),
            x.data_ptr(),
            base.data_ptr(),
            dynamic.data_ptr(),
            dynamic.stride(0),
            offsets.data_ptr(),
            None if onto is None else onto.data_ptr(),
            rows,
            size,
            taps,
            size // dynamic.shape[2],
        )
        return y

    def store_context(
        self,
        kv: Tensor,
        *,
        factors: NormFactors,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        store: Tensor,
    ) -> None:
        """Norm and rotate the keys in kv [T, L * 2 * Hkv * D], which is overwritten, and write it
        to slots [T] of store [L, slots, 2, Hkv, D]. gain [L, D]."""
        layers, num_slots, _, heads, width = store.shape
        self._store_context(
            store.data_ptr(),
            num_slots * 2 * heads * width,
            kv.data_ptr(),
            factors.gain.data_ptr(),
            factors.floor,
            cos.data_ptr(),
            sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            positions.shape[0],
            layers,
            heads,
            width,
        )
