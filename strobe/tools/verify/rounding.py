"""The rounding of a model: the differences of one row's log probabilities between computations in
different shapes, without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from strobe.engine.build import ResolvedConfig
from strobe.engine.engine import Engine
from strobe.tools.verify.runs import Rows, Run, score_by_blocks, score_by_prefill

FACTOR = 3.0
"""A bound is this many times the largest difference that was measured."""
FLOORS = {torch.float32: 64.0, torch.float16: 2.0, torch.bfloat16: 1.0}
"""Lower limit of a bound, in units in the last place of a row's spread of logits."""
LIMITS = {torch.float32: 512.0, torch.float16: 16.0, torch.bfloat16: 4.0}
"""Differences of more units in the last place are no rounding. Float32 has more, since its sums
round as well, while shorter types are summed in float32."""
_ANSWERS = 6
_BLOCKS = 8


@dataclass(frozen=True)
class Rounding:
    """Differences of log probabilities between shapes.

    by_shape: the largest by shape, each against single rows in a batch. rows: rows that were
    compared; largest: of all; bound: what a divergence may be explained with; limit: what this
    dtype's rounding cannot exceed.
    """

    rows: int
    by_shape: dict[str, float]
    largest: float
    bound: float
    limit: float

    @property
    def is_plausible(self) -> bool:
        return self.largest <= self.limit


def difference(a: Rows, b: Rows) -> NDArray[np.float64]:
    """Return for each of n rows the largest difference between the log probabilities of tokens that
    both list, or between such differences of two tokens: by so much a margin may change."""
    count = min(len(a), len(b))
    a = a[:count]
    b = b[:count]
    same = a.tokens[:, :, None] == b.tokens[:, None, :]
    delta = np.where(same, a.values[:, :, None] - b.values[:, None, :], np.nan)
    flat = delta.reshape(count, -1)
    high = np.fmax.reduce(flat, axis=1, initial=0.0)
    low = np.fmin.reduce(flat, axis=1, initial=0.0)
    return high - low


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that are equal."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def comparable_rows(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading rows with the same tokens before them."""
    return min(common_length(a, b) + 1, len(a), len(b))


def limit_of(resolved: ResolvedConfig, spread: float, dtype: torch.dtype | None = None) -> float:
    """Return the largest difference that rounding may make, for logits that spread so far. dtype:
    another engine's."""
    dtype = resolved.dtype if dtype is None else dtype
    units = LIMITS[dtype] * torch.finfo(dtype).eps
    if resolved.config.kv_cache_dtype == "fp8":
        units = max(units, 2 * torch.finfo(torch.float8_e4m3fn).eps)
    if resolved.target.decoder.experts is not None:
        units *= 4  # a router's choice may change
    return units * spread


def floor_of(resolved: ResolvedConfig, spread: float) -> float:
    """Return the smallest bound for logits that spread so far."""
    return FLOORS[resolved.dtype] * torch.finfo(resolved.dtype).eps * spread


def measure_rounding(engine: Engine, plain: Run, spread: float) -> Rounding:
    """Compare rows of the plain run with the same rows alone, in blocks and in whole sequences.
    spread: between a row's largest and mean logit, typically."""
    batch = [a for a in plain.answers["batch"] if a.tokens and a.error is None]
    alone = [a for name in plain.answers if name.startswith("alone") for a in plain.answers[name]]
    by_prompt = {answer.case.prompt: answer for answer in batch}
    differences: dict[str, list[NDArray[np.float64]]] = {"one row": [], "block": [], "prefill": []}
    for answer in alone:
        twin = by_prompt[answer.case.prompt]
        rows = comparable_rows(answer.tokens, twin.tokens)
        differences["one row"].append(difference(answer.rows[:rows], twin.rows[:rows]))
    chosen = batch[:_ANSWERS]
    for answer, rows in zip(chosen, score_by_prefill(engine, chosen), strict=True):
        differences["prefill"].append(difference(answer.rows, rows))
    for answer in chosen[:2]:
        places = sorted({len(answer.tokens) * i // _BLOCKS for i in range(_BLOCKS)})
        for place, rows in zip(places, score_by_blocks(engine, answer, places), strict=True):
            differences["block"].append(difference(answer.rows[place : place + 1], rows))
    merged = {shape: np.concatenate(parts) for shape, parts in differences.items() if parts}
    largest = max(float(values.max(initial=0.0)) for values in merged.values())
    limit = limit_of(engine.resolved, spread)
    bound = max(FACTOR * largest, floor_of(engine.resolved, spread))
    return Rounding(
        rows=sum(len(values) for values in merged.values()),
        by_shape={shape: float(values.max(initial=0.0)) for shape, values in merged.items()},
        largest=largest,
        bound=min(bound, limit),
        limit=limit,
    )


def peer_rounding(run: Run, own: Rounding, limit: float) -> Rounding:
    """Return the rounding of another engine: the difference of its answers alone and at once, but
    no less than this engine's own."""
    differences = [np.zeros(1)]
    for one, two in zip(run.answers["alone"], run.answers.get("batch", []), strict=False):
        rows = comparable_rows(one.tokens, two.tokens)
        differences.append(difference(one.rows[:rows], two.rows[:rows]))
    largest = max(float(values.max(initial=0.0)) for values in differences)
    return Rounding(
        rows=sum(len(values) for values in differences),
        by_shape={"batch": largest},
        largest=largest,
        bound=min(max(own.bound, FACTOR * largest), limit),
        limit=limit,
    )
