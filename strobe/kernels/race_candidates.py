# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""The candidates of sampled drafts: each row's tokens with the largest noisy scores.

    _groups_kernel     R x parts programs: each group's largest noisy score
    _select_kernel     R programs: the best groups, and the best tokens among theirs

As `strobe.kernels.candidates.best_of`, of what `strobe.kernels.gumbel_argmax` compares: the noise
of a token is computed once for its group, and again for the groups that are read again. The torch
twin is in `strobe.sampling.candidates`.

Legend: R rows, V rows of the output layer, C candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels.candidates import BLOCK, GROUP, NO_GROUP, NUM_WARPS
from strobe.kernels.gumbel_argmax import (
    LOG2E,
    NO_WORD,
    gumbel,
    key_of,
    read,
    row_word,
    token_of,
    word_of,
)
from strobe.kernels.pdl import pdl_wait, supports_pdl


@triton.jit
def _sums(row, tokens_ptr, params, word, ids, V: tl.constexpr):
    """Return the noisy scores of tokens that the filters keep, -inf for others; the logits of a row
    that draws nothing, whose threshold is NaN. A NaN counts as -inf.

    tokens_ptr: ids of the output layer's rows; None if they are the rows' own numbers."""
    x = read(row, ids, V)
    top = tl.load(params)
    scale = tl.load(params + 1)
    threshold = tl.load(params + 2)
    min_p = tl.load(params + 3)
    tokens = ids
    if tokens_ptr is not None:
        tokens = tl.load(tokens_ptr + ids, ids < V, other=0)
    keep = (x >= threshold) & (tl.exp2((x - top) * (scale * LOG2E)) >= min_p)
    noisy = tl.where(keep, (x - top) * scale + gumbel(tokens, word), float("-inf"))
    plain = tl.where(x == x, x, float("-inf"))
    return tl.where(threshold == threshold, noisy, plain)


@triton.jit
def _groups_kernel(
    logits_ptr, tokens_ptr, params_ptr, key_ptr, position_ptr, largest_ptr, stride,
    V: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    index = tl.program_id(0).to(tl.int64)
    GROUPS: tl.constexpr = BLOCK // GROUP
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    word = row_word(tl.load(key_ptr + index), tl.load(position_ptr + index))
    row = logits_ptr + index * stride
    sums = _sums(row, tokens_ptr, params_ptr + index * 4, word, ids, V)
    tl.store(largest_ptr + index * tl.num_programs(1) * GROUPS + groups, tl.max(sums, 1))


@triton.jit
def _select_kernel(
    logits_ptr, tokens_ptr, params_ptr, key_ptr, position_ptr, largest_ptr, columns_ptr,
    joins_ptr, stride,
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
    word = row_word(tl.load(key_ptr + index), tl.load(position_ptr + index))
    row = logits_ptr + index * stride
    sums = _sums(row, tokens_ptr, params_ptr + index * 4, word, ids, V)
    inner = tl.where(ids < V, word_of(key_of(sums), ids), NO_WORD)
    keys = tl.zeros([PADDED], tl.int32)
    columns = tl.zeros([PADDED], tl.int64)
    for i in tl.static_range(COUNT):
        best = tl.max(tl.max(inner, 1), 0)
        keys = tl.where(place == i, (best >> 32).to(tl.int32), keys)
        columns = tl.where(place == i, token_of(best), columns)
        inner = tl.where(inner == best, NO_WORD, inner)
    joins = key_of(keys.to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True) > float("-inf")
    tl.store(columns_ptr + index * COUNT + place, columns, place < COUNT)
    tl.store(joins_ptr + index * COUNT + place, joins, place < COUNT)


def race_candidates(
    logits: Tensor,
    params: Tensor,
    key: Tensor,
    position: Tensor,
    count: int,
    tokens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """logits [R, V] -> columns [R, C] int64 and [R, C] bool, as
    `strobe.sampling.candidates.race_candidates`. params [R, 4]: see
    `strobe.kernels.gumbel_argmax.gumbel_argmax`."""
    rows, size = logits.shape
    columns = torch.empty(rows, count, dtype=torch.int64, device=logits.device)
    joins = torch.empty(rows, count, dtype=torch.bool, device=logits.device)
    parts = triton.cdiv(size, BLOCK)
    groups = parts * (BLOCK // GROUP)
    largest = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    pdl = supports_pdl(logits.device)
    _groups_kernel[(rows, parts)](
        logits, tokens, params, key, position, largest, logits.stride(0), V=size, GROUP=GROUP,
        BLOCK=BLOCK, PDL=pdl, num_warps=NUM_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    _select_kernel[(rows,)](
        logits, tokens, params, key, position, largest, columns, joins, logits.stride(0), V=size,
        COUNT=count, PADDED=triton.next_power_of_2(count), GROUPS=groups,
        SIZE=triton.next_power_of_2(groups), GROUP=GROUP, PDL=pdl, num_warps=NUM_WARPS,
        launch_pdl=pdl,
    )  # fmt: skip
    return columns, joins
