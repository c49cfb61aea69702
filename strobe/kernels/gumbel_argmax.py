# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""The race of what a row's filters keep, by the noise of `strobe.sampling.noise`, over blocks.

A token's noise is a hash and two logarithms, some 60 instructions, so the vocabulary is spread over
programs, and a block of which nothing is kept costs no more than its reading:

    _race_kernel    R x parts programs: each part's greatest word
    _best_kernel    R programs: the greatest of a row's words, and so its token

A word has a key, which is in the order of the scores, above the complement of its token, so that of
equal scores the first token's is greater. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Tokens that a program works on at a time, and keeps or skips together."""

MANY_ROWS = 128
"""So many rows keep all SMs busy with few parts each."""

BLOCKS_PER_PART = 8
"""With many rows; one with fewer."""

NO_WORD = tl.constexpr(-0x8000000000000000)
"""Below all words."""

NAN_KEY = tl.constexpr(0x7FFFFFFF)
"""Of a NaN in an argmax, above that of every number."""

NO_TOKEN = tl.constexpr(-1)
"""As `strobe.sampling.sampler` has it."""

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
    """An int32 for each float32, in the same order; both zeros have 0. Its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def read(row, ids, V: tl.constexpr):
    """Logits in float32, -inf behind the vocabulary."""
    return tl.load(row + ids, ids < V, other=float("-inf")).to(tl.float32)


@triton.jit
def word_of(key, token):
    return (key.to(tl.int64) << 32) | (LOW_WORD - token.to(tl.int64))


@triton.jit
def token_of(word):
    """A word's token; NO_TOKEN where its key is a NaN's."""
    return tl.where(word >> 32 == NAN_KEY, NO_TOKEN, LOW_WORD - (word & LOW_WORD))


@triton.jit
def _row_word(key, position):
    """uint64: see `strobe.sampling.noise.row_words`."""
    x = key.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * GOLDEN
    x = (x ^ (x >> 30)) * MIX1
    x = (x ^ (x >> 27)) * MIX2
    return x ^ (x >> 31)


@triton.jit
def _gumbel(ids, word):
    """The tokens' noise, float32: see `strobe.sampling.noise.Gumbel`."""
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
    logits_ptr, facts_ptr, key_ptr, position_ptr, words_ptr, stride, blocks,
    V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    facts = facts_ptr + index * 4
    top, scale = tl.load(facts), tl.load(facts + 1)
    edge, min_p = tl.load(facts + 2), tl.load(facts + 3)
    word = _row_word(tl.load(key_ptr + index), tl.load(position_ptr + index))
    best = tl.full([], NO_WORD, tl.int64)
    for block in range(tl.where(edge == edge, blocks, 0)):
        ids = (part * blocks + block) * BLOCK + tl.arange(0, BLOCK)
        x = read(logits_ptr + index * stride, ids, V)
        keep = (x >= edge) & (tl.exp2((x - top) * (scale * LOG2E)) >= min_p)
        if tl.max(keep.to(tl.int32), 0) > 0:
            score = tl.where(keep, (x - top) * scale + _gumbel(ids, word), float("-inf"))
            most = tl.max(score, 0)
            first = tl.min(tl.where(score == most, ids, V), 0)
            best = tl.maximum(best, word_of(key_of(most), first))
    tl.store(words_ptr + index * parts + part, best)


@triton.jit(do_not_specialize=["parts"])
def _best_kernel(words_ptr, out_ptr, parts, SIZE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    best = tl.max(tl.load(words_ptr + index * parts + at, at < parts, other=NO_WORD), 0)
    tl.store(out_ptr + index, token_of(best), best != NO_WORD)


def take_best(words: Tensor, out: Tensor, size: int) -> None:
    """words [R, parts] int64 -> out [R], each row's token; of a row without words it stays. size:
    so many parts at most."""
    rows, parts = words.shape
    _best_kernel[(rows,)](words, out, parts, SIZE=triton.next_power_of_2(size), num_warps=1)


def gumbel_argmax(
    logits: Tensor, facts: Tensor, key: Tensor, position: Tensor, out: Tensor
) -> None:
    """logits [R, V] -> out [R]: the first maximum of (logit - top) * scale + noise over the tokens
    that are kept.

    facts [R, 4] float32: top, the row's greatest logit, scale, the least logit that is kept, above
    -inf, and the least weight, as a share of the greatest. Where the third is NaN, out stays.
    """
    rows, size = logits.shape
    num_blocks = triton.cdiv(size, BLOCK)
    blocks = BLOCKS_PER_PART if rows >= MANY_ROWS else 1
    words = out.new_empty(rows, triton.cdiv(num_blocks, blocks))
    _race_kernel[tuple(words.shape)](
        logits, facts, key, position, words, logits.stride(0), blocks,
        V=size, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    take_best(words, out, num_blocks)
