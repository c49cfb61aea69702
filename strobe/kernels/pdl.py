# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Programmatic dependent launch (Hopper and later): a kernel's programs start while the previous
kernel still runs, and wait for it. This hides the launches, of which a step has hundreds.

A kernel launched this way must call `pdl_wait` before it writes anything that others use, and
before it reads what the previous kernel writes. Writes of earlier kernels are complete, since the
previous kernel has waited for them; so one program or more of every launch must call it. Memory
that only kernels before the previous one use may be read and written earlier, as a layer's state
is."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton import knobs


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the previous kernel, and let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the device supports dependent launches."""
    if device.type != "cuda" or knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
