# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""The candidates of block drafters: each row's best tokens, and the walk through them.

    _groups_kernel     R x parts programs: each group's largest logit
    _select_kernel     R programs: the best groups, and the best tokens among theirs
    _edges_kernel      S x K programs: scores of a slot's candidates after each one before
    _walk_kernel       S programs: the path, one slot after another

A row's C best tokens lie in the C groups with the largest maxima, the first of equal ones, so only
these are read again. A word is a key in the order of the logits in the high half, and the
complement of a group or token in the low half, so that the first one wins ties. The torch
twins are in `strobe.kernels.reference_candidates` and `strobe.sampling.walk`.

Legend: R rows, V vocabulary, S spans, K drafts per span, C candidates, r rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.gumbel_argmax import NO_WORD, gumbel, key_of, read, row_word, token_of, word_of
from strobe.kernels.pdl import pdl_wait, supports_pdl
from strobe.kernels.reference_candidates import EdgeTerms
from strobe.kernels.rowwise import INTERPRETED

GROUP = 128
"""Tokens per group."""

BLOCK = 2048
"""Tokens per program."""

NO_GROUP = tl.constexpr(0xFFFFFF)
"""Of tokens beyond every vocabulary, whose ids still fit in 32 bits."""

NUM_WARPS = 8


@triton.jit
def _words(x, ids, V: tl.constexpr):
    """Return the words of logits; a NaN is below all numbers."""
    return tl.where(ids < V, word_of(key_of(tl.where(x == x, x, float("-inf"))), ids), NO_WORD)


@triton.jit
def _groups_kernel(
    logits_ptr, largest_ptr, stride,
    V: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = BLOCK // GROUP
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = read(logits_ptr + index * stride, ids, V)
    largest = tl.max(tl.where(x == x, x, float("-inf")), 1)
    tl.store(largest_ptr + index * tl.num_programs(1) * GROUPS + groups, largest)


@triton.jit
def _select_kernel(
    logits_ptr, largest_ptr, values_ptr, ids_ptr, stride,
    V: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, SIZE)
    largest = tl.load(largest_ptr + index * GROUPS + groups, groups < GROUPS, other=0.0)
    words = tl.where(groups < GROUPS, word_of(key_of(largest), groups), NO_WORD)
    place = tl.arange(0, PADDED)
    chosen = tl.full([PADDED], NO_GROUP, tl.int32)
    for i in tl.static_range(COUNT):
        best = tl.max(words, 0)
        found = (place == i) & (best != NO_WORD)
        chosen = tl.where(found, token_of(best).to(tl.int32), chosen)
        words = tl.where(words == best, NO_WORD, words)
    ids = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    row = logits_ptr + index * stride
    inner = _words(read(row, ids, V), ids, V)
    keys = tl.zeros([PADDED], tl.int32)
    tokens = tl.zeros([PADDED], tl.int64)
    for i in tl.static_range(COUNT):
        best = tl.max(tl.max(inner, 1), 0)
        keys = tl.where(place == i, (best >> 32).to(tl.int32), keys)
        tokens = tl.where(place == i, token_of(best), tokens)
        inner = tl.where(inner == best, NO_WORD, inner)
    values = key_of(keys.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
    tl.store(values_ptr + index * COUNT + place, values, place < COUNT)
    tl.store(ids_ptr + index * COUNT + place, tokens, place < COUNT)


def best_of(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> the `count` largest [R, C] float32 in descending order, and their tokens
    [R, C] int64; the lowest first if equal. A NaN counts as -inf."""
    rows, size = logits.shape
    values = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    parts = triton.cdiv(size, BLOCK)
    groups = parts * (BLOCK // GROUP)
    largest = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    pdl = supports_pdl(logits.device)
    _groups_kernel[(rows, parts)](
        logits, largest, logits.stride(0), V=size, GROUP=GROUP, BLOCK=BLOCK, PDL=pdl,
        num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    _select_kernel[(rows,)](
        logits, largest, values, ids, logits.stride(0), V=size, COUNT=count,
        PADDED=triton.next_power_of_2(count), GROUPS=groups, SIZE=triton.next_power_of_2(groups),
        GROUP=GROUP, PDL=pdl, num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return values, ids


@triton.jit
def _edges_kernel(
    unary_ptr, ids_ptr, rows_ptr, anchor_ptr, left_ptr, right_ptr, hidden_ptr, edges_ptr, scale,
    K: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden_ptr: factors [S, K, r] of the edges; or None."""
    pdl_wait(PDL)
    span = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    cell = span * K + slot
    place = tl.arange(0, PADDED)
    real = place < C
    rank = tl.arange(0, WIDTH)
    inside = rank < RANK
    if slot == 0:
        before = tl.load(anchor_ptr + span) + tl.zeros([PADDED], tl.int64)
    else:
        before = tl.load(ids_ptr + (cell - 1) * C + place, real, 0)
    after = tl.load(rows_ptr + cell * C + place, real, 0)
    both = real[:, None] & inside[None, :]
    left = tl.load(left_ptr + before[:, None] * RANK + rank[None, :], both, 0.0)
    right = tl.load(right_ptr + after[:, None] * RANK + rank[None, :], both, 0.0)
    if hidden_ptr is not None:
        hidden = tl.load(hidden_ptr + cell * RANK + rank, inside, 0.0)
        product = left.to(tl.float32) * hidden.to(tl.float32)[None, :]
        left = product.to(right_ptr.dtype.element_ty)
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    edges = tl.dot(left, tl.trans(right), input_precision="ieee") * scale
    unary = tl.load(unary_ptr + cell * C + place, real, 0.0)
    spots = edges_ptr + (cell * C + place[:, None]) * C + place[None, :]
    tl.store(spots, edges + unary[None, :], real[:, None] & real[None, :])


def edges(terms: EdgeTerms) -> Tensor:
    """See `reference_candidates.edges`."""
    ids = terms.ids
    spans, slots, count = ids.shape
    rank = terms.left.shape[1]
    out = torch.empty(spans, slots, count, count, dtype=torch.float32, device=ids.device)
    pdl = supports_pdl(ids.device)
    _edges_kernel[(spans, slots)](
        terms.unary, ids, ids if terms.rows is None else terms.rows, terms.anchor, terms.left,
        terms.right, terms.hidden, out, terms.scale, K=slots, C=count,
        PADDED=max(triton.next_power_of_2(count), 16), RANK=rank,
        WIDTH=max(triton.next_power_of_2(rank), 16), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out


@triton.jit
def _walk_kernel(
    edges_ptr, ids_ptr, keys_ptr, positions_ptr, temperature_ptr, tokens_ptr, margins_ptr,
    K: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """keys_ptr: of the noise; None for the largest scores. margins_ptr may be None."""
    pdl_wait(PDL)
    span = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    real = place < C
    previous = tl.zeros([], tl.int32)
    if keys_ptr is not None:
        temperature = tl.load(temperature_ptr + span)
        key = tl.load(keys_ptr + span)
        position = tl.load(positions_ptr + span)
    for slot in tl.range(K):
        cell = span * K + slot
        ids = tl.load(ids_ptr + cell * C + place, real, 0)
        row = edges_ptr + (cell * C + previous) * C
        score = tl.load(row + place, real, other=float("-inf"))
        score = tl.where(score == score, score, float("-inf"))
        race = score
        if keys_ptr is not None:
            noise = gumbel(ids, row_word(key, position + slot))
            relative = (score - tl.max(score, 0)) * tl.div_rn(1.0, tl.maximum(temperature, 1e-30))
            noisy = tl.where(score == float("-inf"), float("-inf"), relative + noise)
            race = tl.where(temperature > 0, noisy, score)
        best = tl.max(race, 0)
        previous = tl.min(tl.where((race == best) & real, place, PADDED - 1), 0)
        tl.store(tokens_ptr + cell, tl.sum(tl.where(place == previous, ids, 0), 0))
        if margins_ptr is not None:
            chosen = tl.max(tl.where(place == previous, score, float("-inf")), 0)
            second = tl.max(tl.where(place == previous, float("-inf"), score), 0)
            tl.store(margins_ptr + cell, chosen - second)


def walk(
    edges: Tensor,
    ids: Tensor,
    margins: Tensor | None,
    noise: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """See `strobe.sampling.walk`; noise is its `WalkNoise`."""
    spans, slots, count = ids.shape
    tokens = torch.empty(spans, slots, dtype=torch.int64, device=ids.device)
    keys, positions, temperatures = noise or (None, None, None)
    pdl = supports_pdl(ids.device)
    _walk_kernel[(spans,)](
        edges, ids, keys, positions, temperatures, tokens, margins, K=slots, C=count,
        PADDED=triton.next_power_of_2(count), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return tokens
