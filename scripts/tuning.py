"""Parts of tune_kernels.py: compiling without a GPU, timing on one, and choosing the fastest."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from strobe.kernels import experts, gemm
from strobe.kernels.gemm_table import Gemm, GemmConfig

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


@dataclass
class Problem:
    """One GEMM at one bucket of rows, with its measurements."""

    gemm: Gemm
    bucket: int
    times: dict[GemmConfig, float] = field(default_factory=dict)
    """Microseconds per launch."""
    cublas: float = float("nan")
    candidates: list[GemmConfig] = field(default_factory=list)
    futures: list[Future[str | None]] = field(default_factory=list)
    rounds: int = 0

    @property
    def name(self) -> str:
        p = self.gemm
        return f"{p.kind:24} {p.n:6}x{p.k:<5} {p.fusion:10} M={self.bucket:<3}"

    @property
    def size(self) -> int:
        return self.gemm.n * self.gemm.k * self.gemm.item

    def rate(self, microseconds: float) -> str:
        return f"{microseconds:7.1f} us {self.size / microseconds / 1e6:5.2f} TB/s"

    def best(self) -> tuple[GemmConfig, float]:
        """Return the fastest configuration; cuBLAS, and a tile of quack-kernels, only if it wins by
        more than the noise."""
        best, best_us = GemmConfig(kernel="cublas"), self.cublas
        own = self.ranked()
        if own and not best_us < 0.98 * self.times[own[0]]:
            best, best_us = own[0], self.times[own[0]]
        quack = self.ranked(quack=True)
        if quack and self.times[quack[0]] < 0.98 * best_us:
            return replace(best, quack=quack[0].quack), self.times[quack[0]]
        return best, best_us

    def ranked(self, quack: bool = False) -> list[GemmConfig]:
        """Return the configurations of the kernel or of quack-kernels, the fastest first."""
        configs = [config for config in self.times if (config.quack is not None) is quack]
        return sorted(configs, key=self.times.__getitem__)
