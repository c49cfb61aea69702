"""Microseconds of a layer's attention over the paged cache, by kernel configuration.

    python benchmarks/attention.py [--kv-heads 8] [--group 4] [--head-dim 128] [--requests 1,8,32]
        [--rows 1,4,8,16] [--context 256,1024,4096] [--programs 1,2,4] [--json FILE]

Launches over the caches of as many layers as exceed L2 are captured and replayed. For each case the
engine's configuration is printed next to the fastest ones, and the time to read the bytes.
programs: the target number of programs per multiprocessor, which decides the number of pieces.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.kernels.attention import (
    PIECE_KEYS,
    PROGRAMS_PER_SM,
    AttentionConfig,
    AttentionWorkspace,
    config_of,
    paged_attention,
)

PAGE = 16
BYTES = 512 << 20  # total of the caches, read one after another
MAX_BYTES = 8 << 30  # of one cache; larger cases are skipped


class Heads(NamedTuple):
    kv: int
    group: int
    dim: int


class Case(NamedTuple):
    requests: int
    rows: int
    context: int


def layers_of(
    case: Case, heads: Heads, device: torch.device
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the layers' caches and the arguments of attention."""
    columns = -(-(case.context + case.rows) // PAGE)
    slots = case.requests * columns * PAGE
    nbytes = slots * 2 * heads.kv * heads.dim * 2
    count = max(1, min(36, -(-BYTES // nbytes)))
    shape = slots, 2, heads.kv, heads.dim
    kv = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]
    pages = torch.randperm(case.requests * columns, device=device).view(-1, columns)
    table = pages * PAGE - torch.arange(columns, device=device) * PAGE
    indices = partial(torch.arange, device=device)
    args = {
        "starts": torch.full((case.requests,), case.context, device=device),
        "sizes": torch.full((case.requests,), case.rows, device=device),
        "row_starts": indices(0, case.requests * case.rows, case.rows),
        "tables": table.contiguous(),
        "table_rows": indices(case.requests),
        "page_size": PAGE,
        "mask": LayerMask(),
        "longest": case.rows,
    }
    return kv, args


def microseconds(launches: Sequence[Any]) -> float:
    """Return the microseconds of one launch, replayed from a graph."""
    for launch in launches:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    repeats, best = max(1, 40 // len(launches)), float("inf")
    for _ in range(4):
        begin, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, 1e3 * begin.elapsed_time(end) / (repeats * len(launches)))
    return best


def configs(pairs: int) -> Iterator[AttentionConfig]:
    block = next((size for size in (16, 32, 64) if pairs <= size), 128)
    for keys, stages, warps in itertools.product((32, 64, 128), (2, 3, 4), (4, 8)):
        if keys * stages <= 384 and (warps == 4 or block == 128) and PIECE_KEYS % keys == 0:
            yield AttentionConfig(block, keys, warps, stages, False)


def compile_one(heads: Heads, rows: int, config: AttentionConfig) -> None:
    """Compile both kernels, with and without divided contexts, into triton's cache."""
    device = torch.device("cuda")
    kv, args = layers_of(Case(1, rows, 512), heads, device)
    q = torch.randn(rows, heads.kv * heads.group, heads.dim, device=device, dtype=torch.bfloat16)
    for programs in (1, 132):
        workspace = AttentionWorkspace(device, heads.dim, programs)
        try:
            paged_attention(q, kv[0], config=config, workspace=workspace, **args)
        except Exception as error:
            print(f"{config}: {type(error).__name__}", file=sys.stderr)
    torch.cuda.synchronize()


def measure(
    heads: Heads, case: Case, factors: Sequence[int], device: torch.device
) -> dict[str, Any]:
    kv, args = layers_of(case, heads, device)
    units = torch.cuda.get_device_properties(device).multi_processor_count
    shape = case.requests * case.rows, heads.kv * heads.group, heads.dim
    q = torch.randn(shape, device=device, dtype=torch.bfloat16)
    pairs = case.rows * heads.group
    dtypes_and_programs = torch.bfloat16, torch.bfloat16, PROGRAMS_PER_SM * units
    own = config_of(heads.dim, pairs, case.requests, heads.kv, *dtypes_and_programs)
    times: list[tuple[float, int, AttentionConfig]] = []
    for factor in factors:
        workspace = AttentionWorkspace(device, heads.dim, factor * units)
        for config in {*configs(pairs), own}:
            run = partial(paged_attention, q, workspace=workspace, config=config, **args)
            try:
                us = microseconds([partial(run, cache) for cache in kv])
            except triton_errors():
                continue
            times.append((us, factor, config))
    own_us = [us for us, factor, config in times if (factor, config) == (PROGRAMS_PER_SM, own)]
    times.sort()
    nbytes = 2 * 2 * heads.kv * heads.dim * case.requests * (case.context + case.rows)
    return {
        **case._asdict(),
        "bytes_us": round(nbytes / 4.3e6, 1),
        "own_us": round(own_us[0], 1) if own_us else None,
        "own": list(own),
        "tried": [[round(us, 1), factor, *config] for us, factor, config in times],
    }


def triton_errors() -> tuple[type[Exception], ...]:
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--requests", type=numbers, default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--rows", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--context", type=numbers, default=[256, 1024, 4096])
    parser.add_argument("--programs", type=numbers, default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    heads = Heads(options.kv_heads, options.group, options.head_dim)
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        blocks = {(rows, c) for rows in options.rows for c in configs(rows * heads.group)}
        pool.starmap(compile_one, [(heads, *block) for block in sorted(blocks)], chunksize=1)
    device = torch.device("cuda")
    results: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}; {heads}")
    for case in itertools.starmap(
        Case, itertools.product(options.requests, options.rows, options.context)
    ):
        per_slot = 4 * heads.kv * heads.dim
        if case.requests * case.context * per_slot > MAX_BYTES:
            continue
        result = measure(heads, case, options.programs, device)
        results.append(result)
        head = (
            f"{case.requests:4} x {case.rows:2} rows, {case.context:5}: bytes {result['bytes_us']}"
        )
        best = "; ".join(f"{us} {tuple(rest)}" for us, *rest in result["tried"][:3])
        print(f"{head}, own {result['own_us']} {tuple(result['own'])}; best {best}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
