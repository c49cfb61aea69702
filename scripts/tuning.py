"""Parts of tune_kernels.py: compiling without a GPU, and timing on one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from strobe.kernels import experts, gemm

REPLAYS = 6


class Target:
    """A driver that compiles kernels for `target` and loads none."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def start_compiling(arch: int) -> None:
    """Make this process compile for a GPU of compute capability `arch`, such as 90."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the compiler prints the whole kernel it rejects
    torch.set_num_threads(1)
    modules: tuple[ModuleType, ...] = (experts, gemm)
    for module in modules:
        module.supports_pdl = lambda device: arch >= 90
    triton.runtime.driver.set_active(Target(GPUTarget("cuda", arch, 32)))


def compile_error(launch: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Compile a kernel into triton's cache on disk; return the error, if any."""
    try:
        launch(*args, **options, warmup=True)
    except Exception as problem:
        return repr(problem)[:200]
    return None


def graph_time(call: Callable[[int], object], launches: int) -> float:
    """Return the microseconds of one of call(0), call(1), ...: the median of replays of a graph of
    `launches` of them, which the caller has run once."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / launches)
    return statistics.median(times[1:])
