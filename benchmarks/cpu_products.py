"""Times the products with packed weights on a CPU, in turn: GB/s of weights read, next to the speed
at which this machine reads memory.

    python benchmarks/cpu_products.py [--shapes 576x576,49152x576] [--rows 1,8,32] [--rounds 7]

Each product has as many copies of its weight as fill --megabytes, so that no cache holds them. The
load is printed: trust ratios.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

import torch

from strobe.models.quantization.packed import FORMATS, Packed


def seconds(products: list[Packed], x: torch.Tensor) -> float:
    """Return the seconds of a product in a pass over its copies."""
    start = time.perf_counter()
    for product in products:
        product(x)
    return (time.perf_counter() - start) / len(products)


def read_speed(megabytes: int, rounds: int) -> float:
    """Return the GB/s at which a sum reads memory."""
    values = torch.ones(megabytes * 2**18)
    rates = list[float]()
    for _ in range(rounds + 1):
        start = time.perf_counter()
        values.sum()
        rates.append(values.nbytes / 1e9 / (time.perf_counter() - start))
    return median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="576x576,1536x576,576x1536,49152x576,4096x4096")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--dtype", default="float32", help="of the rows")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    names = options.formats.split(",")
    rows = [int(count) for count in options.rows.split(",")]
    dtype = getattr(torch, options.dtype)
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, load "
        f"{os.getloadavg()[0]:.2f}; memory {read_speed(options.megabytes, options.rounds):.1f} GB/s"
    )
    print(f"| weight | format | {' | '.join(f'{count} rows' for count in rows)} |")
    print(f"|---|---|{'---|' * len(rows)}")
    for shape in options.shapes.split(","):
        outputs, inputs = (int(size) for size in shape.split("x"))
        weight = torch.randn(outputs, inputs) / inputs**0.5
        products = dict[str, list[Packed]]()
        for name in names:
            size = FORMATS[name].value_bytes * weight.numel()
            copies = max(1, int(options.megabytes * 1e6 / size))
            products[name] = [FORMATS[name](weight, None) for _ in range(copies)]
        cells = {(name, count): list[float]() for name in names for count in rows}
        for number in range(options.rounds + 1):
            for name, count in cells:
                passed = seconds(products[name], torch.randn(count, inputs).to(dtype))
                if number:
                    cells[name, count].append(passed)
        for name in names:
            size = FORMATS[name].value_bytes * weight.numel()
            figures = [
                f"{1e6 * median(cells[name, count]):.0f} µs, "
                f"{size / 1e9 / median(cells[name, count]):.1f} GB/s"
                for count in rows
            ]
            print(f"| {shape} | {name} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
