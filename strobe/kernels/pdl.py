# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
"""Programmatic dependent launch (Hopper and later): the next kernel's programs are brought up while
the ones before still run, and wait there. A step has hundreds of launches.

A kernel that is launched so must call `pdl_wait` before it writes anything that others use, or
reads what the kernel launched just before it writes; what older kernels wrote is there already, for
that one has waited for them. So at least one program of every launch must come to `pdl_wait`."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton import knobs


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait for the kernel before, and let the one behind come up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the device has dependent launches."""
    if device.type != "cuda" or knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
