# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""Logits to tokens: the first maximum, and a race behind top-k, top-p and min-p.

`sample_rows` finds each row's maximum and the least logit that its filters keep
(`kernels.top_p_threshold`); then `kernels.gumbel_argmax` has many programs a row. Legend: R rows, V
vocabulary."""

from __future__ import annotations

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

MAX_PARTS = 8
ARGMAX_BLOCK = 8192

LEAST = tl.constexpr(-3.4028234663852886e38)
"""The least finite float32."""

UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""So many low bits of a logit in float32 are 0, and are left out of its key."""


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_p_ptr,
    min_p_ptr,
    top_k_ptr,
    facts_ptr,
    room_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Greedy rows' tokens, and for the others what `race` needs of them."""
    index = tl.program_id(0).to(tl.int64)
    row = logits_ptr + index * stride
    room = room_ptr + index * (1 + 6 * PARTS)
    facts = facts_ptr + index * 4
    temperature = tl.load(temperature_ptr + index)
    lanes = tl.full([WIDTH // VECTOR, SEGMENTS, VECTOR], float("-inf"), tl.float32)
    nans = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    # The first reading comes from memory, so more of it is kept in flight.
    for step in tl.range(SEGMENT // WIDTH, loop_unroll_factor=4):
        x = read(row, ids_of(step, SEGMENT, VECTOR), V)
        lanes = tl.maximum(lanes, x)
        nans += tl.sum(tl.where(x != x, 1.0, 0.0), 2)
    top = tl.max(lanes).to(tl.int32, bitcast=True)
    odd = (tl.sum(nans) > 0).to(tl.int32)
    tops, odds, _ = exchange(room, 0, top, odd, odd, PARTS)
    top, numbers = tl.max(tops.to(tl.float32, bitcast=True)), tl.max(odds) == 0
    if (temperature > 0) & numbers & (tl.abs(top) < float("inf")):
        temperature = tl.maximum(temperature, 1e-30)
        scale = tl.div_rn(LOG2E, temperature)
        top_p = tl.load(top_p_ptr + index)
        min_p = tl.minimum(tl.load(min_p_ptr + index), 1.0)
        k = tl.load(top_k_ptr + index)
        k = tl.where((k > 0) & (k < V), k, V).to(tl.int32)
        edge = tl.full([], float("-inf"), tl.float32)
        if (k < V) | (top_p < 1.0):
            edge = threshold_key(
                row, room, lanes, top, scale, top_p, k, V, SEGMENT, VECTOR, SHIFT, PARTS
            )
        tl.store(facts, top)
        tl.store(facts + 1, tl.div_rn(1.0, temperature))
        tl.store(facts + 2, tl.maximum(edge, LEAST))
        tl.store(facts + 3, min_p)
    else:
        # Greedy rows, and those that have no weights: the first maximum; with a NaN no token.
        first = tl.full([WIDTH // VECTOR, SEGMENTS, VECTOR], V, tl.int32)
        for step in range(SEGMENT // WIDTH):
            ids = ids_of(step, SEGMENT, VECTOR)
            x = read(row, ids, V)
            first = tl.minimum(first, tl.where(x == top, ids, V))
        first = tl.min(first)
        firsts, _, _ = exchange(room, 1, first, first, first, PARTS)
        token = tl.where(numbers, tl.min(firsts), NO_TOKEN)
        tl.store(out_ptr + index, token.to(tl.int64))
        tl.store(facts + 2, float("nan"))


@triton.jit
def _argmax_kernel(logits_ptr, out_ptr, rests_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Each block's first maximum; of several blocks, its word. rests_ptr: for each block, the key
    of its largest logit but that one; or None."""
    index, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = read(logits_ptr + index * stride, at, V)
    keys = tl.where(x == x, key_of(x), NAN_KEY)
    best = tl.max(keys, 0)
    token = tl.min(tl.where(keys == best, at, V), 0).to(tl.int64)
    if rests_ptr is not None:
        rest = tl.max(tl.where(at == token, -NAN_KEY, keys), 0)
        tl.store(rests_ptr + index * blocks + block, rest)
    if (blocks > 1) | (rests_ptr is not None):
        token = word_of(best, token)
    else:
        token = tl.where(best == NAN_KEY, NO_TOKEN, token)
    tl.store(out_ptr + index * blocks + block, token)


@triton.jit
def _margin_kernel(words_ptr, rests_ptr, out_ptr, margins_ptr, parts, SIZE: tl.constexpr):
    """A row's token, and its margin."""
    index, at = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    words = tl.load(words_ptr + index * parts + at, at < parts, other=NO_WORD)
    rests = tl.load(rests_ptr + index * parts + at, at < parts, other=-NAN_KEY)
    best = tl.max(words, 0)
    other_keys = tl.where((words == best) | (at >= parts), -NAN_KEY, (words >> 32).to(tl.int32))
    rest = tl.max(tl.maximum(other_keys, rests), 0)
    top = key_of((best >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    margin = top.to(tl.float32, bitcast=True)
    margin -= key_of(rest.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
    margin = tl.where(margin == margin, margin, 0.0)
    tl.store(margins_ptr + index, tl.minimum(margin, MAX_MARGIN))
    tl.store(out_ptr + index, token_of(best))


def argmax(logits: Tensor, margins: Tensor | None = None) -> Tensor:
    """logits [R, V] -> [R] int64, the first maximum of each row, -1 where there is a NaN.
    margins [R] float32: filled as by `strobe.sampling.sampler.best_two`."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    block = min(ARGMAX_BLOCK, triton.next_power_of_2(size))
    blocks = -(-size // block)
    words, rests = out if blocks == 1 else out.new_empty(rows, blocks), None
    if margins is not None:
        words = out.new_empty(rows, blocks)
        rests = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _argmax_kernel[(rows, blocks)](
        logits, words, rests, logits.stride(0), V=size, BLOCK=block, num_warps=8
    )
    if rests is not None:
        size = triton.next_power_of_2(blocks)
        _margin_kernel[(rows,)](words, rests, out, margins, blocks, SIZE=size, num_warps=1)
    elif blocks > 1:
        take_best(words, out, blocks)
    return out


def parts_of(rows: int, device: torch.device) -> int:
    """Programs a row, a power of two: few rows are spread over the GPU's multiprocessors, all of
    them at once, for they wait for one another."""
    if device.type != "cuda":
        return 1
    max_parts = torch.cuda.get_device_properties(device).multi_processor_count // max(rows, 1)
    return 1 << (min(max(max_parts, 1), MAX_PARTS).bit_length() - 1)


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: Tensor,
    key: Tensor,
    position: Tensor,
) -> Tensor:
    """logits [R, V] -> tokens [R] int64, each row as by `strobe.sampling.sampler.sample_rows`.

    temperature, top_p, min_p [R] float32, temperature 0 is greedy; top_k [R] int64, 0 is off; key,
    position [R] int64. Sums are in float32, in an order that R decides; where their rounding moves
    an edge, a token more or less races. Rows without weights (+inf, or nothing but -inf) give
    their first maximum, and rows with a NaN -1.
    """
    rows, size = logits.shape
    assert all(t.stride(0) == 1 for t in (temperature, top_p, min_p, top_k, key, position))
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    facts = torch.empty(rows, 4, dtype=torch.float32, device=logits.device)
    parts = parts_of(rows, logits.device)
    segment = triton.cdiv(size, parts * SEGMENTS.value * WIDTH.value) * WIDTH.value
    make = torch.zeros if parts > 1 else torch.empty
    room = make(rows, 1 + 6 * parts, dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows, parts)](
        logits,
        temperature,
        top_p,
        min_p,
        top_k,
        facts,
        room,
        out,
        logits.stride(0),
        V=size,
        SEGMENT=segment,
        VECTOR=16 // logits.element_size(),
        SHIFT=UNUSED_BITS[logits.dtype],
        PARTS=parts,
        num_warps=32,
    )
    gumbel_argmax(logits, facts, key, position, out)
    return out
