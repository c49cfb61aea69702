"""FP8 weights in memory: e4m3 values with a scale per row, or per group of a row's values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.models.quantization.held import fill_bytes

STORED = "F8_E4M3"
"""The dtype of values, by safetensors' names."""


class _E4m3:
    """What formats of e4m3 values share."""

    def fill_random(self, values: Tensor, generator: torch.Generator) -> None:
        """See `Format.fill_random`."""
        fill_bytes(values.view(torch.uint8), generator)

    def fill_scale(self, scale: Tensor) -> None:
        """See `Format.fill_scale`."""
        scale.fill_(2.0**-13)


class Fp8Rows(_E4m3):
    """e4m3 values with one float32 scale per row [..., N]; see `fp8_rows`. Experts' are bytes."""

    bits_per_value = 8.0

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        return values.view(torch.float8_e4m3fn).float() * scale[..., None]


FP8_ROWS = Fp8Rows()


@dataclass(frozen=True)
class Fp8Groups(_E4m3):
    """Bytes of e4m3 [..., N, K], and scales [..., K / group, N] float32 of `group` values of a row
    each."""

    group: int

    @property
    def bits_per_value(self) -> float:
        """See `Format.bits_per_value`."""
        return 8 + 32 / self.group

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        by_value = scale.transpose(-2, -1).repeat_interleave(self.group, -1)
        return values.view(torch.float8_e4m3fn).float() * by_value[..., : values.shape[-1]]


def fill_bytes_of(out: Tensor, values: Tensor) -> None:
    """Copy values in e4m3 to bytes."""
    out.copy_(values.view(torch.uint8))


def fill_scales(out: Tensor, scales: Tensor, *, rows: int) -> None:
    """scales [..., N / rows, G] -> out [..., G, N]."""
    by_row = scales.to(out.device).repeat_interleave(rows, -2)[..., : out.shape[-1], :]
    out.copy_(by_row.transpose(-2, -1))
