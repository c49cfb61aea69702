# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""Argmax of noisy scores over the tokens that a row's filters keep, with `strobe.sampling.noise`.

A token's noise takes a hash and two logarithms, some 60 instructions, so many programs share a row,
and a block without kept tokens costs only its loads:

    _race_kernel    R x parts programs: each part's largest word
    _best_kernel    R programs: the largest of a row's words, which holds its token

A word is a key in the order of the scores in the high half, and the complement of the token in the
low half, so that the first token wins ties. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Tokens per iteration of a program, skipped together if the filters keep none."""

MANY_ROWS = 128
"""From here on, rows keep all SMs busy with few parts each."""

BLOCKS_PER_PART = 8
"""Blocks per part from MANY_ROWS on; 1 below."""

NO_WORD = tl.constexpr(-0x8000000000000000)
"""Below all words."""

NAN_KEY = tl.constexpr(0x7FFFFFFF)
"""The key of a NaN in an argmax, above the keys of all numbers."""

NO_TOKEN = tl.constexpr(-1)
"""See `strobe.sampling.sampler.NO_TOKEN`."""

LOW_WORD = tl.constexpr(0xFFFFFFFF)
LOG2E = tl.constexpr(1.4426950408889634)

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
ROUND1 = tl.constexpr(0xED5AD4BB)
ROUND2 = tl.constexpr(0xAC4C1B51)
ROUND3 = tl.constexpr(0x31848BAB)
UNIT = tl.constexpr(2.0**-32 * (1 - 2.0**-23))


@triton.jit
def key_of(x):
    """Map float32 to int32 in the same order; both zeros map to 0. On bits it is its own
    inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def read(row, ids, V: tl.constexpr):
    """Load logits in float32, -inf past the end of the vocabulary."""
    return tl.load(row + ids, ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def word_of(key, token):
    return (key.to(tl.int64) << 32) | (LOW_WORD - token.to(tl.int64))


@triton.jit
def token_of(word):
    """Return a word's token, NO_TOKEN if its key is NAN_KEY."""
    return tl.where(word >> 32 == NAN_KEY, NO_TOKEN, LOW_WORD - (word & LOW_WORD))


@triton.jit
def row_word(key, position):
    """Return `strobe.sampling.noise.row_words` as uint64."""
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * GOLDEN
    x = (x ^ (x >> 30)) * MIX1
    x = (x ^ (x >> 27)) * MIX2
    return x ^ (x >> 31)


@triton.jit
def gumbel(ids, word):
    """Return the tokens' noise in float32, as `strobe.sampling.noise.Gumbel`."""
    x = ids.to(tl.uint32) ^ (word & LOW_WORD).to(tl.uint32)
    x = (x ^ (x >> 17)) * tl.full([], ROUND1, tl.uint32)
    x ^= (word >> 32).to(tl.uint32)
    x = (x ^ (x >> 11)) * tl.full([], ROUND2, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full([], ROUND3, tl.uint32)
    v = ((x ^ (x >> 14)).to(tl.float32) + 0.5) * UNIT
    u = 1.0 - v
    return -tl.log((v - (1.0 - u)) - tl.log(u))


@triton.jit(do_not_specialize=["blocks"])
def _race_kernel(
    logits_ptr, params_ptr, key_ptr, position_ptr, words_ptr, stride, blocks,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    params = params_ptr + index * 4
    top = tl.load(params)
    scale = tl.load(params + 1)
    threshold = tl.load(params + 2)
    min_p = tl.load(params + 3)
    word = row_word(tl.load(key_ptr + index), tl.load(position_ptr + index))
    best = tl.full([], NO_WORD, tl.int64)
    for block in range(tl.where(threshold == threshold, blocks, 0)):
        ids = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        x = read(logits_ptr + index * stride, ids, V)
        keep = (x >= threshold) & (tl.exp2((x - top) * (scale * LOG2E)) >= min_p)
        if tl.max(keep.to(tl.int32), 0) > 0:
            score = tl.where(keep, (x - top) * scale + gumbel(ids, word), float("-inf"))
            max_score = tl.max(score, 0)
            first = tl.min(tl.where(score == max_score, ids, V), 0)
            best = tl.maximum(best, word_of(key_of(max_score), first))
    tl.store(words_ptr + index * parts + part, best)


@triton.jit(do_not_specialize=["parts"])
def _best_kernel(words_ptr, out_ptr, parts, SIZE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    best = tl.max(tl.load(words_ptr + index * parts + at, at < parts, other=NO_WORD), 0)
    tl.store(out_ptr + index, token_of(best), best != NO_WORD)


def take_best(words: Tensor, out: Tensor, size: int) -> None:
    """words [R, parts] int64 -> out [R], each row's token; rows without words keep theirs. size: an
    upper bound of parts."""
    rows, parts = words.shape
    _best_kernel[(rows,)](words, out, parts, SIZE=triton.next_power_of_2(size), num_warps=1)


def gumbel_argmax(
    logits: Tensor, params: Tensor, key: Tensor, position: Tensor, out: Tensor
) -> None:
    """logits [R, V] -> out [R]: the first argmax of (logit - top) * scale + noise over the tokens
    that the filters keep.

    params [R, 4] float32: top, the row's largest logit; scale; threshold, the smallest logit to
    keep, finite; and min_p, the smallest weight to keep relative to the largest. Rows whose
    threshold is NaN keep their token in `out`.
    """
    rows, size = logits.shape
    num_blocks = triton.cdiv(size, BLOCK)
    blocks = BLOCKS_PER_PART if rows >= MANY_ROWS else 1
    words = out.new_empty(rows, triton.cdiv(num_blocks, blocks))
    _race_kernel[tuple(words.shape)](
        logits,
        params,
        key,
        position,
        words,
        logits.stride(0),
        blocks,
        V=size,
        BLOCK=BLOCK,
        num_warps=8,
    )
    take_best(words, out, num_blocks)
