# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
"""What kernels in Gluon wait for: a program's other threads, and the kernel launched before."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7 and 3.6


@gluon.jit
def wait(PDL: gl.constexpr):
    """See `strobe.kernels.pdl.pdl_wait`."""
    if PDL:
        _instruction("griddepcontrol.wait; // $0")
        _instruction("griddepcontrol.launch_dependents; // $0")


@gluon.jit
def _instruction(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, is_pure=False, pack=1)
