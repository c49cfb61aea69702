"""Microseconds of a recurrent layer's convolution, gates, delta rule and norm, by sequences and
rows.

    python benchmarks/recurrent.py [--sequences 1,8,32] [--rows 1,16] [--values 16,32,64]
        [--warps 2,4,8] [--dtype bfloat16] [--parts]

Shapes of Qwen3.5-9B: 16 key heads and 32 value heads of size 128. Launches over the states of 24
layers are captured and replayed for each number of values and warps per program. Of a block, up to
6 rows were accepted. With single rows, the layers stand for successive steps, of which one in a few
writes the states. "bytes" is the time to read and write the states once at 4.3 TB/s. --parts also
times the layer with one of its three launches replaced by a no-op.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch

import strobe.kernels.recurrent as kernels
from strobe.kernels.kept_rows import SINGLE_ROWS
from strobe.kernels.reference_recurrent import DeltaInput, DeltaSpans
from strobe.kv.states import StateSpec, StateStore

LAYERS = 24
PARTS = "_convolve_kernel", "_delta_kernel", "_finish_kernel"


class Nothing:
    """A no-op in place of a kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


def measure(count: int, rows: int, dtype: torch.dtype) -> float:
    """Return the microseconds of a layer."""
    device = torch.device("cuda")
    spec = StateSpec(LAYERS, 32, 16, 128, 128, 4)
    store = StateStore(spec, count, rows, dtype, device)
    random = partial(torch.randn, device=device)
    for held in store.tensors:
        held.copy_(random(held.shape))
    store.gates.abs_().neg_()
    sizes = [spec.channels, spec.heads * spec.value_dim, 2 * spec.heads]
    projected = random(count * rows, sum(sizes), dtype=dtype).split(sizes, 1)
    shapes = (spec.channels, spec.kernel), (spec.heads,), (spec.heads,), (spec.value_dim,)
    x = DeltaInput(*projected, *(random(shape, dtype=dtype) for shape in shapes), 1e-6)
    filled = partial(torch.full, (count,), device=device)
    first = torch.arange(0, count * rows, rows, device=device)
    slots = torch.arange(count, device=device)
    steps = [1 + layer % SINGLE_ROWS for layer in range(LAYERS)]
    accepted = [filled(step if rows == 1 else min(rows, 6)) for step in steps]

    def run() -> None:
        for layer in range(LAYERS):
            held = [part[layer] for part in store.tensors]
            spans = DeltaSpans(
                slots=slots,
                first_rows=first,
                sizes=filled(rows),
                accepted=accepted[layer],
                starts_fresh=filled(False),
            )
            kernels.mix(x, spans, held, rows, spec)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(6):
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / (5 * LAYERS))
    return best


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--sequences", type=numbers, default=[1, 8, 32])
    parser.add_argument("--rows", type=numbers, default=[1, 16])
    parser.add_argument("--values", type=numbers, default=[16, 32, 64])
    parser.add_argument("--warps", type=numbers, default=[2, 4, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args(argv)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}")
    for count, rows in itertools.product(options.sequences, options.rows):
        nbytes = 2 * 4 * 32 * 128 * 128 * count
        results = list[str]()
        for values, warps in itertools.product(options.values, options.warps):
            kernels.tile = lambda *_, chosen=(values, warps): chosen
            us = measure(count, rows, getattr(torch, options.dtype))
            results.append(f"{us:.1f} ({values} values, {warps} warps)")
        print(
            f"{count} x {rows} rows: bytes {nbytes / 4.3e6:.1f}; {', '.join(results)}", flush=True
        )
        for name in PARTS if options.parts else ():
            kernel = getattr(kernels, name)
            setattr(kernels, name, Nothing())
            us = measure(count, rows, getattr(torch, options.dtype))
            setattr(kernels, name, kernel)
            print(f"    without {name}: {us:.1f}", flush=True)


if __name__ == "__main__":
    main()
