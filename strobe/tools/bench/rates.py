"""Measure the device's rates of reading, copying and multiplying, as medians of repeated calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from strobe.host.free_memory import free_memory
from strobe.tools.bench.floor import Rates

_GPU = (4 << 30, 8192)  # bytes of the buffer, rows of the square GEMM
_CPU = (256 << 20, 1024)
_REPEATS = 15


def measure(device: torch.device, dtype: torch.dtype, *, fp8: bool = False) -> Rates:
    """Measure the device's rates, GEMMs with random values of `dtype` and, for linear layers in
    FP8, of e4m3; free the buffers."""
    size, side = _GPU if device.type == "cuda" else _CPU
    reduction, copy = _bandwidths(device, min(size, free_memory(device) // 4))
    matrix = _matrix_rate(device, dtype, side)
    linear = _matrix_rate(device, torch.float8_e4m3fn, side) if fp8 else matrix
    release(device)
    return Rates(reduction=reduction, copy=copy, matrix=matrix, linear=linear)


def _bandwidths(device: torch.device, size: int) -> tuple[float, float]:
    """Return the bytes/s of a sum over `size` bytes and of a copy of them (read and written)."""
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    moved = source.numel() * source.element_size()
    reduction = median_seconds(source.sum, device)
    copy = median_seconds(lambda: target.copy_(source), device)
    return moved / reduction, 2 * moved / copy


def _matrix_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    noise = torch.Generator(device).manual_seed(0)
    left = torch.randn(side, side, generator=noise, device=device).to(dtype)
    right = torch.randn(side, side, generator=noise, device=device).to(dtype)
    if dtype == torch.float8_e4m3fn:
        scale = torch.ones((), device=device)
        gemm = partial(
            torch._scaled_mm,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            left,
            right.t(),
            scale_a=scale,
            scale_b=scale,
            out_dtype=torch.bfloat16,
        )
    else:
        gemm = partial(torch.mm, left, right, out=torch.empty_like(left))
    return 2 * side**3 / median_seconds(gemm, device)


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one call on the device, after warm-up calls."""
    for _ in range(3):
        call()
    return median(_seconds(call, device) for _ in range(_REPEATS))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    call()
    last.record(stream)
    last.synchronize()
    return first.elapsed_time(last) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on the device; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Return unused cached memory to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
