"""A layer's experts for tune_kernels.py: tiles of the two grouped GEMMs.

Each candidate runs in a captured graph over copies of a layer's weights that together exceed L2,
with even routing, and the whole layer is compared with its torch twin, which is timed as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_shapes import ExpertsShape, experts_shape
from torch import Tensor
from tuning import compile_error, graph_time

from strobe.kernels import experts as kernels
from strobe.kernels import experts_table as tables
from strobe.kernels import reference_experts as reference
from strobe.kernels.experts_table import ExpertsConfig, Tile
from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.linear import LinearView
from strobe.models.quantization.fp8_formats import Fp8Groups
from strobe.models.quantization.kernel_weights import kernel_weight
from strobe.models.quantization.mxfp4 import Mxfp4

NAMES = ("qwen3-coder-30b-a3b", "qwen3.5-35b-a3b", "gemma-4-26b-a4b", "gpt-oss-20b")
COPIES = 3
GROUP = 128
"""Values of FP8 that share a scale."""
PACKED = {"bf16": "", "fp8": "e4m3", "mxfp4": "e2m1"}
TOLERANCE = 0.01
"""Maximum relative error; both round to bfloat16 after each GEMM."""


def tiles(block_m: int, kind: str) -> tuple[Tile, ...]:
    """Return the candidates for a block of so many rows of x."""
    return tuple(Tile(*tile) for tile in _tiles(block_m, kind))


def _tiles(block_m: int, kind: str) -> Iterable[tuple[int, int, int, int]]:
    """Return (block_n, block_k, warps, stages)."""
    if kind == "mxfp4":  # an iteration always has 128 columns
        if block_m == 8:
            return tuple((n, 128, w, s) for n, w in ((32, 2), (64, 4)) for s in (4, 6))
        stages = (3, 4) if block_m <= 32 else (2, 3)
        return tuple((n, 128, w, s) for n, w in ((64, 4), (128, 4), (128, 8)) for s in stages)
    if block_m == 16:
        # Fewer rows of W would use other instructions, which add up in another order: one row
        # would not have the bits that it has among 16.
        few = [(64, 128, 4, s) for s in (3, 4, 5)]
        wide = [(64, 256, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3)]
        short = [(64, 256, 4, 2), (128, 256, 8, 2), (256, 64, 8, 4), (256, 128, 8, 2)]  # few steps
        return (*few, *wide, *short, *((n, 64, 4, s) for n, s in ((64, 6), (128, 4), (128, 6))))
    if block_m == 128:
        return (
            (128, 64, 4, 3),
            (128, 64, 8, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 3),
            (256, 64, 8, 3),
        )
    narrow = [(64, 128, 4, s) for s in (3, 4)] + [(128, 64, 4, s) for s in (3, 4, 5)]
    return (*narrow, (128, 64, 8, 4), (128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4))


def blocks(kind: str, bucket: int, count: int, top_k: int) -> list[tuple[int, bool]]:
    """Return candidates of (block_m, by_pair) for a bucket."""
    if bucket <= 4:
        return [(8 if kind == "mxfp4" else 16, True)]
    average = bucket * top_k / count
    if kind == "mxfp4":
        return [(16 if average <= 8 else 32 if average <= 16 else 64, False)]
    sizes = [16] if average <= 4 else [32, 64] if average <= 32 else [64, 128]
    return [(size, False) for size in sizes]


def compile_one(
    kind: str, shape: ExpertsShape, block_m: int, by_pair: bool, tile: Tile, first: bool
) -> str | None:
    """Compile a grouped GEMM into triton's cache on disk; return the error, if any."""
    _, count, hidden, inner, top_k, name, bias = shape
    meta: Any = {"device": "meta"}
    n, k = (2 * inner, hidden) if first else (hidden, inner)
    weight = kernel_weight(random_weight(kind, (count, n, k), None, torch.device("meta")))
    x = torch.empty(16, k, dtype=torch.bfloat16, **meta)
    ids = torch.empty(16, top_k, dtype=torch.int32, **meta)
    blocks = None if by_pair else torch.empty(4, 3, dtype=torch.int32, **meta)
    routed = kernels.Routed(ids, ids.float(), None if by_pair else ids[0], blocks, 4)
    biases = torch.empty(count, n, dtype=torch.bfloat16, **meta) if bias else None
    return compile_error(
        kernels.grouped,
        x,
        kernels.Projection(weight, biases),
        routed,
        tile=tile,
        block_m=block_m,
        activation=Gate(name, 7.0) if first else None,
    )


def random_weight(
    kind: str, shape: tuple[int, int, int], bias: Tensor | None, device: torch.device
) -> LinearView:
    """Return weights of experts whose products are about as large as their inputs."""
    count, n, k = shape
    if kind == "bf16":
        weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return LinearView(weight.normal_(0, k**-0.5), bias)
    is_fp8 = kind == "fp8"
    columns = k if is_fp8 else -(-k // 64) * 32
    values = torch.empty(count, n, columns, dtype=torch.uint8, device=device)
    values.random_(0, 256).bitwise_and_(0xF7)  # no NaN
    if is_fp8:
        scale = torch.empty(count, -(-k // GROUP), n, device=device).fill_(0.01 * k**-0.5)
        return LinearView(values, bias, scale, Fp8Groups(GROUP))
    words = torch.empty(count, -(-k // 128), n, dtype=torch.int32, device=device)
    words.view(torch.uint8).random_(120 + 62, 123 + 62)
    return LinearView(values, bias, words, Mxfp4(k))


class Layer:
    """A layer's weights, a few times over, and its inputs."""

    def __init__(self, kind: str, shape: ExpertsShape):
        _, count, hidden, inner, self.top_k, name, bias = shape
        noise = torch.Generator("cuda").manual_seed(1)

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            values = torch.empty(sizes, dtype=torch.bfloat16, device="cuda")
            return values.normal_(0, scale, generator=noise)

        def layer(n: int, k: int) -> LinearView:
            biases = normal(count, n, scale=0.1) if bias else None
            return random_weight(kind, (count, n, k), biases, torch.device("cuda"))

        self.linears = [(layer(2 * inner, hidden), layer(hidden, inner)) for _ in range(COPIES)]
        self.layers = [
            [kernels.Projection(kernel_weight(x), x.bias) for x in pair] for pair in self.linears
        ]
        self.normal, self.count, self.hidden = normal, count, hidden
        self.gate, self.routing = Gate(name, 7.0), Routing(self.top_k)

    def inputs(self, rows: int) -> None:
        self.x, self.extra = self.normal(rows, self.hidden), self.normal(rows, self.hidden)
        self.logits = [self.normal(rows, self.count) for _ in range(COPIES)]
        self.sizes = torch.tensor([rows], device="cuda")

    def run(self, i: int, config: ExpertsConfig) -> Tensor:
        gate_up, down = self.layers[i]
        layer = kernels.KernelExperts(self.routing, gate_up, down, self.gate)
        return kernels.experts(
            self.x, self.logits[i], layer, self.extra, sizes=self.sizes, config=config
        )

    def twin(self, i: int) -> Tensor:
        weights, ids = reference.route(self.logits[i], self.routing)
        return reference.experts(self.x, weights, ids, *self.linears[i], self.gate, self.extra)

    def touched(self) -> float:
        """Return the bytes of the experts that a layer's rows choose, on average."""
        ids = [logits.float().topk(self.top_k).indices for logits in self.logits]
        number = sum(chosen.unique().numel() for chosen in ids) / COPIES
        tensors = (x for linear in self.linears[0] for x in (linear.weight, linear.scale))
        return number * sum(x[0].nbytes for x in tensors if x is not None)


def measure(call: Callable[[int], Any], repeats: int = 4) -> float:
    """Return the microseconds of one call."""
    call(0)
    return graph_time(lambda i: call(i % COPIES), COPIES * repeats)


def fastest(
    layer: Layer, routed: list[Any], block_m: int, candidates: list[Tile], *, first: bool
) -> Tile:
    """Time the tiles of the first or the second GEMM; return the fastest."""

    def inner(i: int) -> Tensor:
        return kernels.grouped(
            layer.x,
            layer.layers[i][0],
            routed[i],
            tile=candidates[0],
            block_m=block_m,
            activation=layer.gate,
        )

    inputs = [layer.x if first else inner(i) for i in range(COPIES)]
    times: dict[Tile, float] = {}
    for tile in candidates:

        def call(i: int, tile: Tile = tile) -> Tensor:
            return kernels.grouped(
                inputs[i],
                layer.layers[i][0 if first else 1],
                routed[i],
                tile=tile,
                block_m=block_m,
                activation=layer.gate if first else None,
            )

        try:
            times[tile] = measure(call)
        except Exception as error:  # too much shared memory
            print(f"    {tile}: {type(error).__name__} {str(error)[:100]}", flush=True)
    ranked = sorted(times, key=times.__getitem__)
    text = ", ".join(f"{tile} {times[tile]:.1f}" for tile in ranked[:4])
    print(f"    {'gate_up' if first else 'down'} {block_m}: {text}", flush=True)
    return ranked[0]


def check(layer: Layer, config: ExpertsConfig) -> float:
    """Return the relative error; raise ArithmeticError if it is too large or two runs differ."""
    first, second = (layer.run(0, config) for _ in range(2))
    twin = layer.twin(0).float()
    error = float((first.float() - twin).norm() / twin.norm())
    if not torch.equal(first, second):
        raise ArithmeticError("two runs differ")
    if not error < TOLERANCE:
        raise ArithmeticError(f"error {error:.3g}")
    return error


Problem = tuple[str, ExpertsShape, int, int, bool]
"""A kind of weights, a shape, a bucket of rows, and a candidate of `blocks`."""


def problems(args: argparse.Namespace) -> list[Problem]:
    return [
        (kind, shape, bucket, block, pair)
        for kind in args.kinds
        for shape in [experts_shape(name, args.ranks) for name in args.shapes]
        for bucket in args.rows
        for block, pair in blocks(kind, bucket, shape.count, shape.top_k)
    ]


def compile_all(problems: list[Problem], pool: ProcessPoolExecutor) -> dict[Any, Any]:
    """Return the errors, as futures, by the arguments of `compile_one`."""
    keys = dict.fromkeys(
        (kind, shape, block, pair, tile, first)
        for kind, shape, _, block, pair in problems
        for tile in tiles(block, kind)
        for first in (True, False)
    )
    return {key: pool.submit(compile_one, *key) for key in keys}


def dry(args: argparse.Namespace, pool: ProcessPoolExecutor) -> None:
    """Compile every candidate and print failures."""
    for key, future in compile_all(problems(args), pool).items():
        print(f"{future.result() or 'compiled'}  {key}", flush=True)


def tune(args: argparse.Namespace, pool: ProcessPoolExecutor, deadline: float) -> None:
    out: Path = args.out
    data = json.loads(out.read_text()) if out.is_file() else {}
    candidates = problems(args)
    futures = compile_all(candidates, pool)
    best: dict[tuple[str, ExpertsShape, int], float] = {}
    layers: dict[tuple[str, ExpertsShape], Layer] = {}
    for kind, shape, bucket, block_m, by_pair in candidates:
        if time.monotonic() > deadline:
            break
        if (kind, shape) not in layers:
            layers.clear()
            torch.cuda.empty_cache()
            layers[kind, shape] = Layer(kind, shape)
        layer = layers[kind, shape]
        layer.inputs(bucket)

        def route(
            i: int, layer: Layer = layer, block_m: int = block_m, by_pair: bool = by_pair
        ) -> Any:
            logits = layer.logits[i]
            return kernels.route(logits, layer.routing, layer.sizes, block_m, by_pair=by_pair)

        routed = [route(i) for i in range(COPIES)]
        chosen: list[Tile] = []
        for first in (True, False):
            key = kind, shape, block_m, by_pair
            every = tiles(block_m, kind)
            working = [tile for tile in every if futures[*key, tile, first].result() is None]
            chosen.append(fastest(layer, routed, block_m, working, first=first))
        gate_up, down = chosen
        config = ExpertsConfig(block_m=block_m, by_pair=by_pair, gate_up=gate_up, down=down)
        error = check(layer, config)
        whole = measure(partial(layer.run, config=config))
        twin = f", torch {measure(layer.twin):6.1f}" if kind == "bf16" else ""
        floor = layer.touched() / args.bandwidth / 1e6
        print(
            f"{kind} {shape.name} {bucket:4} rows: {whole:6.1f} us{twin}, routing and sorting "
            f"{measure(route):4.1f}, floor {floor:5.1f}, error {error:.4f}  {config}",
            flush=True,
        )
        if whole < best.get((kind, shape, bucket), float("inf")):
            best[kind, shape, bucket] = whole
            size = f"{shape.count}x{2 * shape.inner}x{shape.hidden}"
            name = tables.kind_of(torch.bfloat16, PACKED[kind])
            tables.record(data, name, size, bucket, config)
            tables.save(data, out)
