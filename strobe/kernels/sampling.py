# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""Sample tokens from logits: argmax, or Gumbel argmax after top-k, top-p and min-p.

`sample_rows` finds each row's maximum and the smallest logit that its filters keep
(`kernels.top_p_threshold`); then `kernels.gumbel_argmax` samples with many programs per row.
Legend: R rows, V vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gumbel_argmax import (
    LOG2E,
    NAN_KEY,
    NO_TOKEN,
    NO_WORD,
    gumbel_argmax,
    key_of,
    read,
    take_best,
    token_of,
    word_of,
)
from strobe.kernels.top_p_threshold import SEGMENTS, WIDTH, exchange, ids_of, threshold_key
from strobe.kernels.workspace import MAX_MARGIN

if TYPE_CHECKING:
    from strobe.sampling.sampler import RowParams

MAX_PARTS = 8
ARGMAX_BLOCK = 8192

MIN_FLOAT = tl.constexpr(-3.4028234663852886e38)
"""The smallest finite float32."""

UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are 0 when a logit is converted to float32; keys leave them out."""


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    params_ptr,
    scratch_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Write the tokens of greedy rows, and the parameters of `gumbel_argmax` for the others."""
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * stride
    scratch = scratch_ptr + index * (1 + 6 * PARTS)
    params = params_ptr + index * 4
    temperature = tl.load(temperature_ptr + index)
    lanes = tl.full([WIDTH // VECTOR, SEGMENTS, VECTOR], float("-inf"), tl.float32)
    nans = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    # The first pass reads from memory, so keep more loads in flight.
    for step in tl.range(SEGMENT // WIDTH, loop_unroll_factor=4):
        x = read(row, ids_of(step, SEGMENT, VECTOR), V)
        lanes = tl.maximum(lanes, x)
        nans += tl.sum(tl.where(x != x, 1.0, 0.0), 2)
    top = tl.max(lanes).to(tl.int32, bitcast=True)
    has_nan = (tl.sum(nans) > 0).to(tl.int32)
    tops, nan_flags, _ = exchange(scratch, 0, top, has_nan, has_nan, PARTS)
    top = tl.max(tops.to(tl.float32, bitcast=True))
    no_nan = tl.max(nan_flags) == 0
    if (temperature > 0) & no_nan & (tl.abs(top) < float("inf")):
        temperature = tl.maximum(temperature, 1e-30)
        scale = tl.div_rn(LOG2E, temperature)
        top_p = tl.load(top_p_ptr + index)
        min_p = tl.minimum(tl.load(min_p_ptr + index), 1.0)
        k = tl.load(top_k_ptr + index)
        k = tl.where((k > 0) & (k < V), k, V).to(tl.int32)
        threshold = tl.full([], float("-inf"), tl.float32)
        if (k < V) | (top_p < 1.0):
            threshold = threshold_key(
                row, scratch, lanes, top, scale, top_p, k, V, SEGMENT, VECTOR, SHIFT, PARTS
            )
        tl.store(params, top)
        tl.store(params + 1, tl.div_rn(1.0, temperature))
        tl.store(params + 2, tl.maximum(threshold, MIN_FLOAT))
        tl.store(params + 3, min_p)
    else:
        # Greedy rows and rows without probabilities: the first argmax, or NO_TOKEN for a NaN.
        first = tl.full([WIDTH // VECTOR, SEGMENTS, VECTOR], V, tl.int32)
        for step in range(SEGMENT // WIDTH):
            ids = ids_of(step, SEGMENT, VECTOR)
            x = read(row, ids, V)
            first = tl.minimum(first, tl.where(x == top, ids, V))
        first = tl.min(first)
        firsts, _, _ = exchange(scratch, 1, first, first, first, PARTS)
        token = tl.where(no_nan, tl.min(firsts), NO_TOKEN)
        tl.store(out_ptr + index, token.to(tl.int64))
        tl.store(params + 2, float("nan"))


@triton.jit
def _argmax_kernel(
    logits_ptr, out_ptr, second_keys_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr
):
    """Write each block's first argmax, as a word if there are several blocks or second keys.
    second_keys_ptr: also write the key of each block's second largest logit; or None."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = read(logits_ptr + index * stride, at, V)
    keys = tl.where(x == x, key_of(x), NAN_KEY)
    best = tl.max(keys, 0)
    token = tl.min(tl.where(keys == best, at, V), 0).to(tl.int64)
    if second_keys_ptr is not None:
        second_key = tl.max(tl.where(at == token, -NAN_KEY, keys), 0)
        tl.store(second_keys_ptr + index * blocks + block, second_key)
    if (blocks > 1) | (second_keys_ptr is not None):
        token = word_of(best, token)
    else:
        token = tl.where(best == NAN_KEY, NO_TOKEN, token)
    tl.store(out_ptr + index * blocks + block, token)


@triton.jit
def _margin_kernel(
    words_ptr, second_keys_ptr, out_ptr, margins_ptr, largest_ptr, parts, SIZE: tl.constexpr
):
    """Write each row's token and margin, and its largest logit unless largest_ptr is None."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    words = tl.load(words_ptr + index * parts + at, at < parts, other=NO_WORD)
    second_keys = tl.load(second_keys_ptr + index * parts + at, at < parts, other=-NAN_KEY)
    best = tl.max(words, 0)
    other_keys = tl.where((words == best) | (at >= parts), -NAN_KEY, (words >> 32).to(tl.int32))
    second_key = tl.max(tl.maximum(other_keys, second_keys), 0)
    top = key_of((best >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    margin = top.to(tl.float32, bitcast=True)
    if largest_ptr is not None:
        tl.store(largest_ptr + index, margin)
    margin -= key_of(second_key.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
    margin = tl.where(margin == margin, margin, 0.0)
    tl.store(margins_ptr + index, tl.minimum(margin, MAX_MARGIN))
    tl.store(out_ptr + index, token_of(best))


def argmax(logits: Tensor, margins: Tensor | None = None, largest: Tensor | None = None) -> Tensor:
    """logits [R, V] -> [R] int64, each row's first argmax, -1 for rows with a NaN.
    margins [R] float32: filled as by `strobe.sampling.sampler.best_two`. largest [R] float32, with
    margins: filled with the largest logits."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(ARGMAX_BLOCK, triton.next_power_of_2(size))
    blocks = -(-size // block)
    words = out if blocks == 1 else out.new_empty(rows, blocks)
    second_keys = None
    if margins is not None:
        words = out.new_empty(rows, blocks)
        second_keys = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _argmax_kernel[(rows, blocks)](
        logits, words, second_keys, logits.stride(0), V=size, BLOCK=block, num_warps=4
    )
    if second_keys is not None:
        size = triton.next_power_of_2(blocks)
        _margin_kernel[(rows,)](
            words, second_keys, out, margins, largest, blocks, SIZE=size, num_warps=1
        )
    elif blocks > 1:
        take_best(words, out, blocks)
    return out


def parts_of(rows: int, device: torch.device) -> int:
    """Return the number of programs per row, a power of two. Few rows use several, but all programs
    must run at the same time, since a row's programs wait for each other."""
    if device.type != "cuda":
        return 1
    max_parts = torch.cuda.get_device_properties(device).multi_processor_count // max(rows, 1)
    return 1 << (min(max(max_parts, 1), MAX_PARTS).bit_length() - 1)


def sample_rows(logits: Tensor, row_params: RowParams, *, filtered: bool = True) -> Tensor:
    """logits [R, V] -> tokens [R] int64, as `strobe.sampling.sampler.sample_rows`. filtered: has
    no effect; the kernel takes any mixture of rows.

    Sums are in float32, in an order that depends on R; their rounding may move the threshold by a
    token. Rows without probabilities (with +inf, or all -inf) count as greedy; rows with a NaN give
    -1.
    """
    params, out = race_params(logits, row_params)
    gumbel_argmax(logits, params, key=row_params.key, position=row_params.position, out=out)
    return out


def race_params(logits: Tensor, row_params: RowParams) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> parameters [R, 4] of `gumbel_argmax`, and [R] int64 with the tokens of rows
    that draw nothing."""
    rows, size = logits.shape
    assert all(column.stride(0) == 1 for column in row_params)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    params = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    parts = parts_of(rows, logits.device)
    segment = triton.cdiv(size, parts * SEGMENTS.value * WIDTH.value) * WIDTH.value
    allocate = torch.zeros if parts > 1 else torch.empty
    scratch = allocate(rows, 1 + 6 * parts, dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows, parts)](
        logits,
        row_params.temperature,
        row_params.top_p,
        row_params.min_p,
        row_params.top_k,
        params,
        scratch,
        out,
        logits.stride(0),
        V=size,
        SEGMENT=segment,
        VECTOR=16 // logits.element_size(),
        SHIFT=UNUSED_BITS[logits.dtype],
        PARTS=parts,
        num_warps=32,
    )
    return params, out
