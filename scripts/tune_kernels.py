"""Measure the GEMMs of few rows on this GPU and keep the fastest in strobe/kernels/table.json.

    python scripts/tune_kernels.py --seconds 150

Each candidate runs in a captured graph, several launches back to back over copies of the weight
that together do not fit into L2, and is compared with the twin first. cuBLAS, with the row-wise
kernels around it, is a candidate too. One row takes the configuration of 16 rows: the same kernel,
so that decoding and verifying give the same bits. Without a GPU, `--dry` compiles the candidates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from candidates import first_round, second_round

from strobe.kernels import gemm as kernels
from strobe.kernels import gemm_table as tables
from strobe.kernels import reference_linear as reference
from strobe.kernels.gemm import Workspace, launch
from strobe.kernels.gemm_table import Gemm, GemmConfig
from strobe.kernels.linear import Gemms, Weight

SHAPES = (
    "6144x4096",  # Qwen3-8B and its DFlash drafter: query, key and value
    "6144x4096:norm",
    "4096x4096:residual",  # behind the attention
    "24576x4096:gated",
    "24576x4096:norm+gated",
    "4096x12288:residual",  # down
    "151936x4096:argmax",  # head: the drafter's, and of greedy requests
    "151936x4096",  # head
    "4096x20480",  # the drafter's fc
    "10240x4096",  # the drafter's keys and values of the context
)
BUFFER = 1_300_000_000  # elements from which weights are cut: one of the largest, more of others
COLD = 600e6  # bytes of weights that a graph reads before it reads the same again: ten times the L2
NEIGHBOURS = 3  # so many of the best of the first round have variants in the second
TOLERANCE = {False: (0.015, 0.06), True: (0.1, 1.0)}
"""By fp8: the error's root mean square over the twin's, and the largest |difference| over |value| +
root mean square. Fp8 has room for x quantised by rows, where the twin does it by groups."""


class Fixed:
    """A table with one entry."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
        return self.config


# --- compiling, in processes without a GPU --------------------------------------------------------


class Target:
    """Stands for a driver: kernels are compiled for `target`, none is loaded."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def start(arch: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the compiler prints the whole kernel it rejects
    torch.set_num_threads(1)
    kernels.supports_pdl = lambda device: arch >= 90
    triton.runtime.driver.set_active(Target(GPUTarget("cuda", arch, 32)))


def compile_one(gemm: Gemm, bucket: int, config: GemmConfig) -> str | None:
    """Leaves the kernel in triton's cache on disk; returns what went wrong."""
    meta = torch.device("meta")
    fp8 = torch.float8_e4m3fn
    weight = torch.empty(gemm.n, gemm.k, dtype=fp8 if gemm.fp8 else gemm.dtype, device=meta)
    rows = gemm.fp8 and not config.groups
    x = torch.empty(bucket, gemm.k, dtype=fp8 if rows else gemm.dtype, device=meta)
    out = torch.empty(bucket, gemm.outputs, dtype=gemm.dtype, device=meta)
    inside = gemm.norm and config.fused_norm and not rows
    workspace = Workspace(meta)
    try:
        launch(
            config,
            gemm,
            workspace,
            x,
            Weight(weight, torch.empty(gemm.n, device=meta) if gemm.fp8 else None),
            out[:, 0].long() if gemm.argmax else out,
            norm=(torch.empty(gemm.k, dtype=gemm.dtype, device=meta), 1e-6) if inside else None,
            residual=out if gemm.residual else None,
            x_scale=torch.empty(bucket, device=meta) if rows else None,
            warmup=True,
        )
    except Exception as problem:
        return repr(problem)[:200]
    return None


# --- measuring ------------------------------------------------------------------------------------


@dataclass
class Problem:
    """One GEMM at one bucket of rows, and what was measured of it."""

    gemm: Gemm
    bucket: int
    times: dict[GemmConfig, float] = field(default_factory=dict)
    """Microseconds a launch."""
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
        """cuBLAS wins only by more than the noise."""
        config = min(self.times, key=self.times.__getitem__, default=GemmConfig("cublas"))
        if not self.times or self.cublas < 0.98 * self.times[config]:
            return GemmConfig("cublas"), self.cublas
        return config, self.times[config]


class Bench:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = {torch.bfloat16: torch.empty(BUFFER, dtype=torch.bfloat16, device=device)}
        self.buffers[torch.bfloat16].normal_(0, 0.02)
        self.workspace = Workspace(device)
        self.made: tuple[Gemm, int] | None = None

    def make(self, problem: Problem) -> None:
        """Inputs, copies of the weight, and what the twin says."""
        gemm, rows = problem.gemm, problem.bucket
        if self.made == (gemm, rows):
            return
        self.made = gemm, rows
        dtype = torch.float8_e4m3fn if gemm.fp8 else gemm.dtype
        if dtype not in self.buffers:
            wide = self.buffers[torch.bfloat16]
            parts = (part * 400 if gemm.fp8 else part for part in wide.split(1 << 27))
            self.buffers[dtype] = torch.cat([part.to(dtype) for part in parts])
        elements = gemm.n * gemm.k
        copies = min(BUFFER // elements, max(1, round(COLD / problem.size)))
        scale = None
        if gemm.fp8:
            scale = torch.rand(gemm.n, device=self.device) / 400 + 1 / 400
        flat = self.buffers[dtype][: copies * elements].view(copies, gemm.n, gemm.k)
        self.weights = [Weight(data, scale) for data in flat]
        generator = torch.Generator(self.device).manual_seed(rows)

        def normal(*shape: int) -> Tensor:
            made = torch.randn(shape, device=self.device, generator=generator)
            return made.to(gemm.dtype)

        self.x = normal(rows, gemm.k)
        norm = ((normal(gemm.k).float() * 0.1 + 1).to(gemm.dtype), 1e-6)
        self.fused: dict[str, object] = {"norm": norm if gemm.norm else None}
        if not gemm.argmax:
            self.fused["residual"] = normal(rows, gemm.outputs) if gemm.residual else None
            self.fused["gated"] = gemm.gated
        self.want = reference.linear(self.x, self.weights[0], **self.fused)  # type: ignore[arg-type]

    def call(
        self, gemm: Gemm, config: GemmConfig, *, in_place: bool = False
    ) -> Callable[[Weight], Tensor]:
        """in_place: into the residual, as a model does; it then changes with every call."""
        gemms = Gemms(self.device, gemm.dtype, table=Fixed(config))
        gemms.workspace = self.workspace
        method = gemms.head_argmax if gemm.argmax else gemms.linear
        fused = dict(self.fused)
        if in_place and gemm.residual:
            fused["residual"] = fused["out"] = self.fused["residual"].clone()  # type: ignore[attr-defined]
        return lambda weight: method(self.x, weight, **fused)  # type: ignore[arg-type]

    def check(self, gemm: Gemm, call: Callable[[Weight], Tensor]) -> None:
        got, again = call(self.weights[0]), call(self.weights[0])
        if not torch.equal(got, again):
            raise ArithmeticError("two runs differ")
        want = self.want.float()
        mean, most = TOLERANCE[gemm.fp8]
        if gemm.argmax:
            won = want.gather(1, got[:, None])[:, 0]
            rough, worst = 0.0, float(((want.amax(1) - won) / want.amax(1)).max())
        else:
            off, rms = (got.float() - want).abs(), want.pow(2).mean().sqrt()
            rough = float(off.pow(2).mean().sqrt() / rms)
            worst = float((off / (want.abs() + rms)).max())
        if not (rough < mean and worst < most):
            raise ArithmeticError(f"off by {rough:.3g}, at most {worst:.3g}")

    def measure(self, problem: Problem, config: GemmConfig) -> float:
        """Microseconds of one call: the median of replays of a graph of many."""
        self.make(problem)
        self.check(problem.gemm, self.call(problem.gemm, config))
        call = self.call(problem.gemm, config, in_place=True)
        launches = max(len(self.weights), round(600 / (problem.size / 4e6)), 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                call(self.weights[i % len(self.weights)])
        times = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / launches)
        return statistics.median(times[1:])


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    bf16 = torch.bfloat16
    kinds = {"bf16": (bf16, False), "fp8": (bf16, True), "fp16": (torch.float16, False)}
    for kind in args.kinds:
        for bucket in args.rows:
            for shape in args.shapes:
                size, _, fusion = shape.partition(":")
                n, k = map(int, size.split("x"))
                flags = {name: True for name in fusion.split("+") if name}
                dtype, fp8 = kinds[kind]
                yield Problem(Gemm(n, k, dtype, fp8=fp8, **flags), bucket)


def tune(args: argparse.Namespace, pool: ProcessPoolExecutor, deadline: float) -> list[Problem]:
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    data = tables.load()
    bench = Bench(device)
    queue = deque(problems(args))
    done: list[Problem] = []

    def submit(problem: Problem) -> None:
        if not problem.futures:
            if problem.rounds == 0:
                found = first_round(problem.gemm, problem.bucket, properties.multi_processor_count)
                problem.candidates = found[: args.first]
            problem.futures = [
                pool.submit(compile_one, problem.gemm, problem.bucket, config)
                for config in problem.candidates
            ]

    while queue and time.monotonic() < deadline:
        for ahead in range(min(4, len(queue))):
            submit(queue[ahead])
        problem = queue.popleft()
        if problem.rounds == 0:
            problem.cublas = bench.measure(problem, GemmConfig("cublas"))
        lines: list[str] = []
        for config, future in zip(problem.candidates, problem.futures, strict=True):
            if time.monotonic() > deadline:
                break
            trouble = future.result()
            if trouble is None:
                try:
                    problem.times[config] = bench.measure(problem, config)
                except Exception as error:  # too much shared memory, wrong numbers: not a candidate
                    trouble = f"{type(error).__name__}: {error}"[:160]
            entry = {"problem": problem.name, "us": problem.times.get(config), "why": trouble}
            lines.append(json.dumps(entry | asdict(config)) + "\n")
            if trouble and args.verbose:
                print(f"    {config}: {trouble}", flush=True)
        if args.log:
            with Path(args.log).open("a") as log:
                log.writelines(lines)
        best, taken = problem.best()
        left = deadline - time.monotonic()
        print(
            f"{problem.name} round {problem.rounds} {problem.rate(taken)}"
            f"  cuBLAS {problem.rate(problem.cublas)}"
            f"  {len(problem.times)} tried, {left:4.0f} s left",
            flush=True,
        )
        if problem.times:
            for bucket in (16, 1) if problem.bucket == 16 else (problem.bucket,):
                tables.record(data, properties.name, capability, problem.gemm, bucket, best)
            tables.save(data, Path(args.out))
        if problem.rounds == 0 and problem.times:
            ranked = sorted(problem.times, key=problem.times.__getitem__)[:NEIGHBOURS]
            problem.candidates = second_round(problem.gemm, ranked)
            problem.futures, problem.rounds = [], 1
            submit(problem)
            queue.insert(min(2, len(queue)), problem)
        else:
            done.append(problem)
    done += [problem for problem in queue if problem.times]
    return done + [single(bench, problem) for problem in done if problem.bucket == 16]


def single(bench: Bench, problem: Problem) -> Problem:
    """One row with what is best for 16."""
    one = Problem(problem.gemm, 1)
    one.cublas = bench.measure(one, GemmConfig("cublas"))
    best = problem.best()[0]
    if best.kernel == "triton":
        one.times[best] = bench.measure(one, best)
    return one


def report(done: list[Problem]) -> None:
    defaults = asdict(GemmConfig())
    print("\nfastest of each, against the norm, cuBLAS and the gate as kernels of their own")
    for problem in sorted(done, key=lambda p: (p.gemm.kind, p.bucket)):
        config, taken = problem.best()
        fields = {key: value for key, value in asdict(config).items() if value != defaults[key]}
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        library = f"{problem.cublas / taken:5.2f} x {problem.rate(problem.cublas)}"
        print(f"{problem.name} {problem.rate(taken)}  {library}  {text}")


def dry(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Compile both rounds of every problem and say what fails."""
    for problem in problems(args):
        found = first_round(problem.gemm, problem.bucket, 132)[: args.first]
        found += second_round(problem.gemm, found[:1])
        answers = pool.map(
            compile_one, *zip(*((problem.gemm, problem.bucket, c) for c in found), strict=True)
        )
        print(f"{problem.name} {len(found)} candidates", flush=True)
        for config, trouble in zip(found, answers, strict=True):
            print(f"    {trouble or 'compiled'}  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after this long")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="NxK:fusion+fusion")
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 32, 128])
    parser.add_argument(
        "--kinds", nargs="+", choices=["bf16", "fp8", "fp16"], default=["bf16", "fp8"]
    )
    parser.add_argument("--first", type=int, default=40, help="candidates of the first round")
    parser.add_argument("--jobs", type=int, default=15, help="processes that compile")
    parser.add_argument("--out", default=str(tables.PATH))
    parser.add_argument("--log", help="a file for every measurement, as JSON lines")
    parser.add_argument("--verbose", action="store_true", help="say why a candidate is out")
    parser.add_argument("--dry", action="store_true", help="compile for sm_90 only; needs no GPU")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    major, minor = (9, 0) if args.dry else torch.cuda.get_device_capability()
    # Spawned, not forked: a process that has a CUDA context must not be forked.
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), start, (major * 10 + minor,)) as pool:
        if args.dry:
            dry(args, pool)
            return
        done = tune(args, pool, deadline)
        pool.shutdown(wait=False, cancel_futures=True)
    report(done)


if __name__ == "__main__":
    main()
