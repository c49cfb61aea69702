"""The part of a report that benchmarks share: the measured rates, a step's parts and its floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from strobe.engine.backend_choice import WeightFormat
from strobe.engine.build import ResolvedConfig
from strobe.models.quantization.methods import experts_format
from strobe.models.quantization.packed import FORMATS, head_format
from strobe.models.quantization.rounding import BYTES_PER_VALUE
from strobe.models.quantization.sizes import mean_width
from strobe.models.weight_loading import check_draft_tensors, check_target_tensors
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.tools.bench.floor import Rates, Shapes, Widths
from strobe.tools.bench.rates import measure
from strobe.tools.bench.timeline import Split
from strobe.tools.report import Figures, Report, Section, circumstances, fine


def shapes_of(resolved: ResolvedConfig) -> Shapes:
    """Return the models, rows and value sizes of a verify step with these settings."""
    config = resolved.config
    dtype = resolved.dtype
    linear = _linear_width(resolved.backends.weights, dtype)
    head = dtype.itemsize
    if (packed := resolved.backends.weights.packed) is not None:
        head = head_format(FORMATS[packed], dtype).value_bytes
    kv = 1 if config.kv_cache_dtype == "fp8" else dtype.itemsize
    draft = resolved.draft if resolved.method == DRAFTER_METHOD else None
    rows = 1 + (resolved.limits.num_drafts if resolved.method != "none" else 0)
    stored = resolved.target.quantization
    experts = None
    if stored is not None:
        held = experts_format(stored, resolved.target.decoder)
        experts = None if held is None else held.bits_per_value / 8
    opener = resolved.split.opener(config.load_format)
    if stored is not None and stored.held:
        target = check_target_tensors(Path(config.target), resolved.target, opener)
        linear = mean_width(target.layers, dtype) or linear
        experts = mean_width(target.layers, dtype, experts=True)
        if target.lm_head is not None:
            head = mean_width(target.lm_head, dtype) or head
    draft_width = None
    output_width = None
    if draft is not None:
        weights = resolved.backends.draft_weights
        draft_width = _linear_width(weights, dtype)
        shares_head = not weights.fp8 and weights.packed is None
        output_width = head if shares_head else None
        if draft.quantization is not None and draft.quantization.held:
            module = check_draft_tensors(Path(config.draft or ""), draft, opener)
            draft_width = mean_width(module.layers, dtype) or draft_width
    widths = Widths(
        linear=linear,
        head=head,
        rest=dtype.itemsize,
        kv=kv,
        experts=experts,
        draft=draft_width,
        draft_output=output_width,
    )
    return Shapes(target=resolved.target, draft=draft, rows=rows, widths=widths)


def _linear_width(weights: WeightFormat, dtype: torch.dtype) -> float:
    """Return the bytes of a value of linear layers that are held in a format."""
    if weights.packed is not None:
        return FORMATS[weights.packed].value_bytes
    if weights.rounded is not None:
        return BYTES_PER_VALUE[weights.rounded]
    return 1 if weights.fp8 else dtype.itemsize


def begin(
    name: str, command: str, ways: dict[str, ResolvedConfig], say: Callable[[str], None]
) -> tuple[Figures, Rates]:
    """Measure the device's rates; return the file's first entries (date, command, device, settings
    and these rates), and the rates."""
    resolved = next(iter(ways.values()))
    say("measuring bandwidth and matrix rate")
    rates = measure(resolved.device, resolved.dtype, fp8=resolved.config.weight_dtype == "fp8")
    figures: Figures = {
        "benchmark": name,
        **circumstances(command, resolved),
        "config": {way: asdict(setup.config) for way, setup in ways.items()},
        "limits": {way: asdict(setup.limits) for way, setup in ways.items()},
        "shapes": {
            part: asdict(config)
            for part in ("target", "draft")
            for setup in ways.values()
            if (config := getattr(setup, part)) is not None
        },
        "rates": {
            "reduction_bytes_per_s": rates.reduction,
            "copy_bytes_per_s": rates.copy,
            "matrix_operations_per_s": rates.matrix,
            "linear_operations_per_s": rates.linear,
        },
    }
    return figures, rates


def split_figures(split: Split | None) -> Figures:
    """Return the milliseconds of a step's parts, all None if no step was timed."""
    names = ("draft_ms", "verify_ms", "rest_ms", "median_ms")
    if split is None:
        return dict.fromkeys(names)
    values = split.draft, split.verify, split.rest, split.median
    return {name: round(ms, 4) for name, ms in zip(names, values, strict=True)}


def floor_figures(shapes: Shapes, rates: Rates, requests: int, context: float) -> Figures:
    """Return the work and the floor of one step, by part."""
    figures: Figures = {}
    for part in ("drafting", "verify"):
        work = getattr(shapes, part)(requests, context)
        figures[part] = {
            "bytes": round(work.bytes),
            "operations": round(work.operations),
            "ms": round(1e3 * rates.seconds(work), 4),
            "bound": rates.bound(work),
        }
    return figures | {"ms": round(1e3 * shapes.seconds(rates, requests, context), 4)}


def report(figures: Figures, sections: Sequence[Section], *, warning: str = "") -> Report:
    """Return the report of a benchmark: command, machine, measured rates if any, and tables."""
    machine = f"{figures['device']}, {figures['dtype']}, torch {figures['versions']['torch']}"
    if "rates" in figures:
        machine += f"; {_rates_text(figures['rates'])}"
    return Report(
        title=f"`strobe bench {figures['benchmark']}`, {figures['date'][:10]}",
        command=figures["command"],
        head=[f"{machine}."],
        sections=sections,
        warning=warning,
    )


def _rates_text(rates: Figures) -> str:
    reads = rates["reduction_bytes_per_s"] / 1e9
    copies = rates["copy_bytes_per_s"] / 1e9
    matrix = rates["matrix_operations_per_s"] / 1e12
    linear = rates["linear_operations_per_s"] / 1e12
    fp8 = f" ({fine(linear)} in FP8)" if linear != matrix else ""
    return (
        f"reads {reads:,.0f} GB/s, copies {copies:,.0f} GB/s, multiplies {fine(matrix)} "
        f"TFLOP/s{fp8}. Floor: the time to read a step's bytes at {max(reads, copies):,.0f} GB/s "
        "or to compute its operations at that rate, whichever is longer"
    )
