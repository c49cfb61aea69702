"""Measure kernels on this GPU and record the fastest for this user, in table.json (GEMMs of few
rows) and experts.json (a layer's experts) of the directory strobe/kernels in the user's cache.

    python scripts/tune_kernels.py --target MODEL --draft DRAFTER [--tensor-parallel-size 2]
    python scripts/tune_kernels.py experts --target MODEL --seconds 150
    python scripts/tune_kernels.py --out strobe/kernels/table.json     (for the package)

Each candidate is first compared with its torch twin, then runs in a captured graph of several
launches over copies of the weight that together exceed L2. cuBLAS, with the row-wise kernels around
it, is a candidate too; from 64 rows on so are quack-kernels, if they are installed, and for 256 and
512 rows (`--rows`) only these two. One row uses the configuration of 16 rows: the same kernel, so
that decoding and verifying give the same bits. Without a GPU, `--dry` compiles the candidates. For
experts see expert_tuning.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import expert_tuning
from candidates import by_quack, first_round, second_round
from model_shapes import gemm_shapes
from tuning import Problem, compile_error, graph_time, start_compiling

from strobe.kernels import gemm_table as tables
from strobe.kernels import quack_gemm
from strobe.kernels import reference_linear as reference
from strobe.kernels.experts_table import BUCKETS
from strobe.kernels.experts_table import PATH as EXPERTS_PATH
from strobe.kernels.gemm import Workspace, launch
from strobe.kernels.gemm_table import LARGE, Gemm, GemmConfig, Weight
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import Argmax, Epilogue, Input, RowNorm
from strobe.tools.bench import published_shapes

SHAPES = (
    "6144x4096",  # Qwen3-8B and its DFlash drafter: query, key and value
    "6144x4096:norm",
    "4096x4096:residual",  # attention's output
    "24576x4096:gated",
    "24576x4096:norm+gated",
    "4096x12288:residual",  # down
    "151936x4096:argmax",  # head: the drafter's, and of greedy requests
    "151936x4096",  # head
    "4096x20480",  # the drafter's fc
    "10240x4096",  # the drafter's keys and values of the context
)
BUFFER = 1_300_000_000  # elements to cut weights from: one copy of the largest, more of others
COLD = 600e6  # bytes of weights that a graph reads before it repeats any: ten times the L2
NUM_REFINED = 3  # best configurations of the first round that get variants in the second
TOLERANCE = {False: (0.015, 0.06), True: (0.1, 1.0)}
"""By fp8: maxima of RMS error / RMS of the twin, and of |difference| / (|value| + RMS). Fp8 is
looser, since x may be quantised by rows, but by groups in the twin."""


class FixedTable:
    """A table with one entry."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
        return self.config


# --- compiling, in processes without a GPU --------------------------------------------------------


def compile_one(gemm: Gemm, bucket: int, config: GemmConfig) -> str | None:
    """Compile a kernel into triton's cache on disk; return the error, if any."""
    if config.quack is not None:  # compiled where it is measured
        return None
    meta = torch.device("meta")
    fp8 = torch.float8_e4m3fn
    weight = torch.empty(gemm.n, gemm.k, dtype=fp8 if gemm.fp8 else gemm.dtype, device=meta)
    rows = gemm.fp8 and not config.groups
    x = torch.empty(bucket, gemm.k, dtype=fp8 if rows else gemm.dtype, device=meta)
    out = torch.empty(bucket, gemm.outputs, dtype=gemm.dtype, device=meta)
    norm = None
    if gemm.norm and config.fused_norm and not rows:
        norm = RowNorm(torch.empty(gemm.k, dtype=gemm.dtype, device=meta), 1e-6)
    operand = Input(x, norm=norm, scale=torch.empty(bucket, device=meta) if rows else None)
    epilogue = Epilogue(
        activation="silu" if gemm.gated else None,
        residual=out if gemm.residual else None,
        argmax=Argmax() if gemm.argmax else None,
        out=out[:, 0].long() if gemm.argmax else out,
    )
    return compile_error(
        launch,
        config,
        gemm,
        Workspace(meta),
        x=operand,
        weight=Weight(weight, torch.empty(gemm.n, device=meta) if gemm.fp8 else None),
        epilogue=epilogue,
    )


# --- measuring ------------------------------------------------------------------------------------


class Bench:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers = {torch.bfloat16: torch.empty(BUFFER, dtype=torch.bfloat16, device=device)}
        self.buffers[torch.bfloat16].normal_(0, 0.02)
        self.workspace = Workspace(device)
        self.has_quack = quack_gemm.load() is not None
        self.prepared: tuple[Gemm, int] | None = None

    def prepare(self, problem: Problem) -> None:
        """Make inputs, copies of the weight, and the twin's result."""
        gemm, rows = problem.gemm, problem.bucket
        if self.prepared == (gemm, rows):
            return
        self.prepared = gemm, rows
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
            return torch.randn(shape, device=self.device, generator=generator).to(gemm.dtype)

        x = normal(rows, gemm.k)
        norm = RowNorm((normal(gemm.k).float() * 0.1 + 1).to(gemm.dtype), 1e-6)
        self.x = Input(x, norm if gemm.norm else None)
        self.epilogue = Epilogue(
            activation="silu" if gemm.gated else None,
            residual=normal(rows, gemm.outputs) if gemm.residual else None,
        )
        self.expected = reference.linear(self.x, self.weights[0], self.epilogue)

    def call(
        self, gemm: Gemm, config: GemmConfig, *, in_place: bool = False
    ) -> Callable[[Weight], Tensor]:
        """Return a call of the GEMM. in_place: write into the residual, as models do, so that it
        changes with every call."""
        gemms = Gemms(self.device, gemm.dtype, table=FixedTable(config))
        gemms.workspace = self.workspace
        self.gemms = gemms
        x = self.x
        if gemm.argmax:
            return lambda weight: gemms.head_argmax(x, weight)
        epilogue = self.epilogue
        if in_place and epilogue.residual is not None:
            stream = epilogue.residual.clone()
            epilogue = epilogue._replace(residual=stream, out=stream)
        return lambda weight: gemms.linear(x, weight, epilogue)

    def check(self, gemm: Gemm, call: Callable[[Weight], Tensor]) -> None:
        result, second = call(self.weights[0]), call(self.weights[0])
        if not torch.equal(result, second):
            raise ArithmeticError("two runs differ")
        want = self.expected.float()
        mean, max_worst = TOLERANCE[gemm.fp8]
        if gemm.argmax:
            chosen_values = want.gather(1, result[:, None])[:, 0]
            rms_error, worst = 0.0, float(((want.amax(1) - chosen_values) / want.amax(1)).max())
        else:
            errors, rms = (result.float() - want).abs(), want.pow(2).mean().sqrt()
            rms_error = float(errors.pow(2).mean().sqrt() / rms)
            worst = float((errors / (want.abs() + rms)).max())
        if not (rms_error < mean and worst < max_worst):
            raise ArithmeticError(f"RMS error {rms_error:.3g}, maximum {worst:.3g}")

    def measure(self, problem: Problem, config: GemmConfig) -> float:
        """Return the microseconds of one call, after checking its result."""
        self.prepare(problem)
        self.check(problem.gemm, self.call(problem.gemm, config))
        if config.quack is not None and self.gemms.quack is None:
            raise RuntimeError("quack-kernels failed, see the log")
        call = self.call(problem.gemm, config, in_place=True)
        launches = max(len(self.weights), round(600 / (problem.size / 4e6)), 2)
        return graph_time(lambda i: call(self.weights[i % len(self.weights)]), launches)


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
                gemm = Gemm(n, k, dtype, fp8=fp8, **flags)
                if bucket not in LARGE or by_quack(gemm, bucket):
                    yield Problem(gemm, bucket)


def tune(args: argparse.Namespace, pool: ProcessPoolExecutor, deadline: float) -> list[Problem]:
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    capability = f"{properties.major}.{properties.minor}"
    out: Path = args.out
    data = json.loads(out.read_text()) if out.is_file() else {}
    bench = Bench(device)
    queue = deque(problems(args))
    done: list[Problem] = []

    def submit(problem: Problem) -> None:
        if not problem.futures:
            if problem.rounds == 0:
                processors = properties.multi_processor_count
                candidates = first_round(problem.gemm, problem.bucket, processors)[: args.first]
                if bench.has_quack:
                    candidates += by_quack(problem.gemm, problem.bucket)
                problem.candidates = candidates
            problem.futures = [
                pool.submit(compile_one, problem.gemm, problem.bucket, config)
                for config in problem.candidates
            ]

    while queue and time.monotonic() < deadline:
        for ahead in range(min(4, len(queue))):
            submit(queue[ahead])
        problem = queue.popleft()
        if problem.rounds == 0:
            problem.cublas = bench.measure(problem, GemmConfig(kernel="cublas"))
        lines: list[str] = []
        for config, future in zip(problem.candidates, problem.futures, strict=True):
            if time.monotonic() > deadline:
                break
            failure = future.result()
            if failure is None:
                try:
                    problem.times[config] = bench.measure(problem, config)
                except Exception as error:  # too much shared memory or wrong results
                    failure = f"{type(error).__name__}: {error}"[:160]
            entry = {"problem": problem.name, "us": problem.times.get(config), "why": failure}
            lines.append(json.dumps(entry | asdict(config)) + "\n")
            if failure and args.verbose:
                print(f"    {config}: {failure}", flush=True)
        if args.log:
            with Path(args.log).open("a") as log:
                log.writelines(lines)
        best, best_us = problem.best()
        left = deadline - time.monotonic()
        print(
            f"{problem.name} round {problem.rounds} {problem.rate(best_us)}"
            f"  cuBLAS {problem.rate(problem.cublas)}"
            f"  {len(problem.times)} tried, {left:4.0f} s left",
            flush=True,
        )
        if problem.times:
            for bucket in (16, 1) if problem.bucket == 16 else (problem.bucket,):
                tables.record(data, properties.name, capability, problem.gemm, bucket, best)
            tables.save(data, out)
        if problem.rounds == 0 and problem.ranked():
            problem.candidates = second_round(problem.gemm, problem.ranked()[:NUM_REFINED])
            problem.futures, problem.rounds = [], 1
            submit(problem)
            queue.insert(min(2, len(queue)), problem)
        else:
            done.append(problem)
    if left := [problem.name for problem in queue if not problem.times]:
        print(f"\n{len(left)} were not measured; raise --seconds:", *left, sep="\n")
    done += [problem for problem in queue if problem.times]
    return done + [single(bench, problem) for problem in done if problem.bucket == 16]


def single(bench: Bench, problem: Problem) -> Problem:
    """Measure one row with the best configuration for 16."""
    single_row = Problem(problem.gemm, 1)
    single_row.cublas = bench.measure(single_row, GemmConfig(kernel="cublas"))
    best = problem.best()[0]
    if best.kernel == "triton":
        single_row.times[best] = bench.measure(single_row, best)
    return single_row


def report(done: list[Problem]) -> None:
    defaults = asdict(GemmConfig())
    print("\nfastest of each, compared with separate kernels for norm, cuBLAS and gate")
    for problem in sorted(done, key=lambda p: (p.gemm.kind, p.bucket)):
        config, best_us = problem.best()
        fields = {key: value for key, value in asdict(config).items() if value != defaults[key]}
        text = " ".join(f"{key}={value}" for key, value in fields.items())
        library = f"{problem.cublas / best_us:5.2f} x {problem.rate(problem.cublas)}"
        print(f"{problem.name} {problem.rate(best_us)}  {library}  {text}")


def dry(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Compile both rounds of every problem and print failures."""
    for problem in problems(args):
        candidates = first_round(problem.gemm, problem.bucket, 132)[: args.first]
        candidates += second_round(problem.gemm, candidates[:1])
        answers = pool.map(
            compile_one, *zip(*((problem.gemm, problem.bucket, c) for c in candidates), strict=True)
        )
        print(f"{problem.name} {len(candidates)} candidates", flush=True)
        for config, failure in zip(candidates, answers, strict=True):
            print(f"    {failure or 'compiled'}  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("part", nargs="?", choices=["gemms", "experts"], default="gemms")
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after this long")
    parser.add_argument("--shapes", nargs="+", help="NxK:fusion+fusion; for experts like --target")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--kinds", nargs="+", choices=["bf16", "fp8", "fp16", "mxfp4"])
    parser.add_argument("--first", type=int, default=40, help="candidates of the first round")
    parser.add_argument("--bandwidth", type=float, default=4.35, help="TB/s, for experts' floor")
    parser.add_argument("--jobs", type=int, default=15, help="processes that compile")
    parser.add_argument("--target", help="tune for this model's directory or published shapes")
    parser.add_argument("--draft", help="and for this drafter's directory")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, dest="ranks", help="of which to tune one"
    )
    parser.add_argument("--out", help="the table to write, if not the user's")
    parser.add_argument("--log", help="a file for every measurement, as JSON lines")
    parser.add_argument("--verbose", action="store_true", help="print why a candidate fails")
    parser.add_argument("--dry", action="store_true", help="compile for sm_90 only; needs no GPU")
    args = parser.parse_args()
    is_gemms = args.part == "gemms"
    if args.target and args.shapes:
        parser.error("--target and --shapes both name what to tune; leave one out.")
    if args.draft and (not is_gemms or not args.target or args.target in published_shapes.NAMES):
        parser.error("--draft goes with the GEMMs of --target's directory; leave it out.")
    if is_gemms and not args.target and args.ranks > 1:
        parser.error("--tensor-parallel-size needs --target.")
    if args.target:
        ranks = args.ranks
        args.shapes = gemm_shapes(args.target, args.draft, ranks) if is_gemms else [args.target]
    args.shapes = args.shapes or (SHAPES if is_gemms else expert_tuning.NAMES)
    args.kinds = args.kinds or (["bf16", "fp8"] if is_gemms else ["bf16"])
    args.rows = args.rows or ([16, 64, 32, 128] if is_gemms else list(BUCKETS))
    own = tables.own_path(tables.PATH if is_gemms else EXPERTS_PATH)
    args.out = Path(args.out or own or sys.exit("There is no home directory; name a file: --out."))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    major, minor = (9, 0) if args.dry else torch.cuda.get_device_capability()
    arch = major * 10 + minor
    # Spawned, not forked: a process that has a CUDA context must not be forked.
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), start_compiling, (arch,)) as pool:
        if args.dry:
            (dry if is_gemms else expert_tuning.dry)(args, pool)
            return
        done = (tune if is_gemms else expert_tuning.tune)(args, pool, deadline)
        pool.shutdown(wait=False, cancel_futures=True)
    if is_gemms:
        report(done)


if __name__ == "__main__":
    main()
