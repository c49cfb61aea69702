"""Time of a block drafter's candidates on a GPU, beside the argmax of the same head.

    python benchmarks/candidates.py [--vocab 151936] [--hidden 4096] [--rows 1 16 512] [--count 16]

Each operation is captured in a graph, after the head's product with all its weights, which are more
than the L2 cache holds; the median of its replays counts. "edges" and "walk" are of 7 drafts each,
for as many spans as the rows have; "convolution" is one of the drafter's, of all rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from statistics import median

import torch

from strobe.kernels.candidates import best_of, edges, walk
from strobe.kernels.convolution import convolve
from strobe.kernels.gemm_table import Weight
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import Input
from strobe.kernels.race_candidates import race_candidates
from strobe.kernels.reference_candidates import EdgeTerms

DRAFTS = 7
RANK = 256
GROUP = 16
DTYPE = torch.bfloat16


def replayed(work: Callable[[], object], replays: int = 30) -> float:
    """Return the median time of a replay, in microseconds."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times: list[float] = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return median(times)


def alone(work: Callable[[], object], count: int = 20) -> float:
    """Return the time of one of `count` runs behind one another, in microseconds."""

    def many() -> None:
        for _ in range(count):
            work()

    return replayed(many) / count


def measure(rows: int, vocab: int, hidden: int, count: int, weight: Weight, gemms: Gemms) -> None:
    device = weight.data.device
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    x = draw(rows, hidden)
    logits = gemms.linear(Input(x), weight)
    values, _ = best_of(logits, count)
    assert torch.equal(values, logits.float().topk(count).values)
    by_argmax = replayed(lambda: gemms.head_argmax(Input(x), weight))
    margins = torch.empty(rows, device=device)
    by_two = replayed(lambda: gemms.head_argmax(Input(x), weight, margins=margins))
    by_best = replayed(lambda: best_of(gemms.linear(Input(x), weight), count))
    product = replayed(lambda: gemms.linear(Input(x), weight))
    by_torch = alone(lambda: logits.topk(count))
    by_itself = alone(lambda: best_of(logits, count))
    params = torch.tensor([0.0, 1.0, -1e30, 0.0], device=device).repeat(rows, 1)
    params[:, 0] = logits.float().amax(1)
    keys = torch.arange(rows, device=device)
    race = alone(lambda: race_candidates(logits, params, keys, keys, count, None))
    print(
        f"{rows:4d} rows: argmax {by_argmax:7.1f}, with margins {by_two:7.1f}, "
        f"best {count} {by_best:7.1f} ({by_best / by_argmax:.3f}); product {product:7.1f}, "
        f"best alone {by_itself:6.1f}, in the race {race:6.1f}, "
        f"torch.topk alone {by_torch:6.1f} µs",
        end="",
    )
    spans = max(rows // DRAFTS, 1)
    left, right = draw(vocab, RANK), draw(vocab, RANK)
    factors = draw(spans, DRAFTS, RANK)
    some = torch.randint(vocab, (spans, DRAFTS, count), device=device)
    unary = draw(spans, DRAFTS, count, dtype=torch.float32)
    anchor = some[:, 0, 0].contiguous()
    noise = anchor, anchor, torch.ones(spans, device=device)
    terms = EdgeTerms(unary=unary, ids=some, anchor=anchor, left=left, right=right, hidden=factors)
    scores = edges(terms)
    edge_time = alone(lambda: edges(terms))
    greedy = alone(lambda: walk(scores, some, None, None))
    sampled = alone(lambda: walk(scores, some, None, noise))
    base = draw(2, hidden)
    kernels = draw(rows, 2, hidden // GROUP)
    places = torch.arange(rows, device=device) % (DRAFTS + 1)
    convolved = alone(lambda: convolve(x, base, kernels, places, x))
    print(
        f"; edges {edge_time:.1f}, walk {greedy:.1f}, sampled {sampled:.1f}, "
        f"convolution {convolved:.1f} µs"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 7, 16, 56, 128, 224, 512])
    parser.add_argument("--count", type=int, default=16)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA device, but there is none.", file=sys.stderr)
        return 1
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    data = torch.empty(arguments.vocab, arguments.hidden, device=device, dtype=DTYPE)
    weight = Weight(data.normal_(generator=generator).mul_(arguments.hidden**-0.5))
    gemms = Gemms(device, DTYPE)
    for rows in arguments.rows:
        measure(rows, arguments.vocab, arguments.hidden, arguments.count, weight, gemms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
