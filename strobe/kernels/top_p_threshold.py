# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""The smallest logit that a row's top-k and top-p keep, without a sort.

A search over the ordered floats halves the range twice per pass over the row: each pass computes
the count or mass of tokens above three of them. A row of 150,000 tokens in bfloat16 is 304 KB, so
the rows of all SMs stay in the L2 cache, and a pass is bound by arithmetic: 7 to 13 instructions
per token. The initial bounds are tight enough for about 5 passes. Few rows are split among several
programs each, which exchange their sums after every pass; many rows have one program each.

A row, or a program's part of it, is SEGMENTS runs of SEGMENT tokens, which are read in parallel:

    step          0            1                 STEPS - 1
    segment 0     [ WIDTH ]    [ WIDTH ]   ...   [ WIDTH ]
    segment 1     [ WIDTH ]    [ WIDTH ]   ...   [ WIDTH ]

Legend: V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from strobe.kernels.gumbel_argmax import key_of, read

SEGMENTS: tl.constexpr = tl.constexpr(32)
WIDTH: tl.constexpr = tl.constexpr(256)

NOTHING = tl.constexpr(-0x7F800000)
"""The key of -inf, below the keys of all other numbers."""


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the float32 of an int64 key without its SHIFT low bits."""
    key = (key << SHIFT).to(tl.int32)
    return tl.where(key < 0, -key | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def ids_of(step, SEGMENT: tl.constexpr, VECTOR: tl.constexpr):
    """Return the tokens [WIDTH / VECTOR, SEGMENTS, VECTOR] of a step. A thread reads VECTOR tokens
    at once; a warp extends along the first dimension, so its reads are contiguous."""
    first = tl.program_id(1) * (SEGMENTS * SEGMENT)
    lane = tl.arange(0, WIDTH // VECTOR)[:, None, None] * VECTOR
    segment = tl.arange(0, SEGMENTS)[None, :, None] * SEGMENT
    return first + segment + step * WIDTH + lane + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def exchange(scratch, epoch, a, b, c, PARTS: tl.constexpr):
    """Exchange three int32 among a row's programs, and return all of them, [PARTS] each. Waits for
    all programs, which must run at the same time. scratch: [1 + 2 * 3 * PARTS] int32: a counter of
    arrivals, which starts at 0, and buffers of two epochs, since no program is further ahead.
    epoch: the number of calls before this one."""
    index = tl.arange(0, PARTS)
    if PARTS == 1:
        return a + index, b + index, c + index
    buffer = scratch + 1 + (epoch & 1) * (3 * PARTS)
    slot = buffer + tl.program_id(1)
    tl.store(slot, a)
    tl.store(slot + PARTS, b)
    tl.store(slot + 2 * PARTS, c)
    tl.debug_barrier()
    tl.atomic_add(scratch, 1, sem="release")
    while tl.load(scratch, volatile=True) < PARTS * (epoch + 1):
        pass
    tl.atomic_add(scratch, 0, sem="acquire")
    tl.debug_barrier()
    buffer += index
    a = tl.load(buffer, volatile=True)
    b = tl.load(buffer + PARTS, volatile=True)
    return a, b, tl.load(buffer + 2 * PARTS, volatile=True)


@triton.jit
def _total(scratch, epoch, a, b, c, PARTS: tl.constexpr):
    """Return three float32 summed over a row's programs."""
    a, b, c = exchange(
        scratch,
        epoch,
        a.to(tl.int32, bitcast=True),
        b.to(tl.int32, bitcast=True),
        c.to(tl.int32, bitcast=True),
        PARTS,
    )
    a = a.to(tl.float32, bitcast=True)
    b = b.to(tl.float32, bitcast=True)
    return tl.sum(a), tl.sum(b), tl.sum(c.to(tl.float32, bitcast=True))


@triton.jit
def _amounts(
    row,
    scratch,
    epoch,
    top,
    scale,
    threshold1,
    threshold2,
    threshold3,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the mass, or the COUNT, of tokens at or above each of three logits."""
    amount1 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    amount2 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    amount3 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    for step in range(SEGMENT // WIDTH):
        x = read(row, ids_of(step, SEGMENT, VECTOR), V)
        # Floats instead of bools or selects: two instructions, a comparison and an FMA.
        weight = 1.0 if COUNT else tl.exp2((x - top) * scale)
        amount1 += tl.sum(tl.where(x >= threshold1, 1.0, 0.0) * weight, 2)
        amount2 += tl.sum(tl.where(x >= threshold2, 1.0, 0.0) * weight, 2)
        amount3 += tl.sum(tl.where(x >= threshold3, 1.0, 0.0) * weight, 2)
    return _total(scratch, epoch, tl.sum(amount1), tl.sum(amount2), tl.sum(amount3), PARTS)


@triton.jit
def _search(
    row,
    scratch,
    epoch,
    top,
    scale,
    low,
    high,
    target,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Find the largest key in [low, high) such that the amount (mass or COUNT) of tokens from it on
    reaches the target, or low.

    Return the key, the amount from it on, the amount from a larger key on, and the next epoch. A
    COUNT ends early at a key with exactly `target` tokens from it on; a mass if at most one token
    can be between the two keys.
    """
    amount = tl.full([], 0.0, tl.float32)
    amount_above = tl.full([], 0.0, tl.float32)
    first_pass = low == low  # the amount of low itself is not known
    searching = first_pass
    while searching:
        key1 = tl.where(first_pass, low, low + ((high - low) >> 2))
        key2 = low + ((high - low) >> 1)
        key3 = low + (((high - low) * 3) >> 2)
        amount1, amount2, amount3 = _amounts(
            row,
            scratch,
            epoch,
            top,
            scale,
            _value(key1, SHIFT),
            _value(key2, SHIFT),
            _value(key3, SHIFT),
            COUNT,
            V,
            SEGMENT,
            VECTOR,
            PARTS,
        )
        epoch += 1
        ok1 = amount1 >= target
        ok2 = amount2 >= target
        ok3 = amount3 >= target
        high = tl.where(ok3, high, tl.where(ok2, key3, tl.where(ok1, key2, key1)))
        amount_above = tl.where(
            ok3, amount_above, tl.where(ok2, amount3, tl.where(ok1, amount2, amount1))
        )
        first = ok1 | first_pass
        low = tl.where(ok3, key3, tl.where(ok2, key2, tl.where(first, key1, low)))
        amount = tl.where(ok3, amount3, tl.where(ok2, amount2, tl.where(first, amount1, amount)))
        if COUNT:
            done = amount == target
        else:
            # Tokens between the keys weigh at least `weight`, which must exceed rounding errors.
            weight = tl.exp2((_value(low, SHIFT) - top) * scale)
            done = (amount - amount_above < 1.5 * weight) & (weight > 1e-5 * amount)
        searching = (high - low > 1) & (done == 0)
        first_pass = first_pass & False
    return low, amount, amount_above, epoch


@triton.jit
def _kth_of_lanes(keys, low, high, k):
    """Return a key in [low, high) with at least k of `keys` from it on, or low: the largest such
    key, or any with exactly k."""
    count = tl.full([], -1, tl.int32)
    while (high - low > 1) & (count != k):
        middle = (low + high) >> 1
        count = tl.sum((keys >= middle).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
    return low


@triton.jit
def threshold_key(
    row,
    scratch,
    lanes,
    top,
    scale,
    top_p,
    k,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the smallest logit that top-k and top-p keep. lanes: each lane's largest logit."""
    bottom = tl.full([], (NOTHING >> SHIFT) + 1, tl.int64)
    high = (key_of(top) >> SHIFT).to(tl.int64) + 1
    low = bottom
    epoch = tl.full([], 1, tl.int32)
    count = tl.full([], 0.0, tl.float32)
    count_above = tl.full([], 0.0, tl.float32)
    if k < V:
        # Each lane's maximum is a token, so the k-th largest maximum is a lower bound.
        low = _kth_of_lanes(key_of(lanes) >> SHIFT, bottom, high, k).to(tl.int32)
        bounds, _1, _2 = exchange(scratch, epoch, low, low, low, PARTS)
        low = tl.max(bounds).to(tl.int64)
        low, count, count_above, epoch = _search(
            row,
            scratch,
            epoch + 1,
            top,
            scale,
            low,
            high,
            k.to(tl.float32),
            True,
            V,
            SEGMENT,
            VECTOR,
            SHIFT,
            PARTS,
        )
    if top_p < 1.0:
        threshold = _value(low, SHIFT)
        above = _value(low + 1, SHIFT)
        mass, mass_above, _ = _amounts(
            row,
            scratch,
            epoch,
            top,
            scale,
            threshold,
            above,
            above,
            False,
            V,
            SEGMENT,
            VECTOR,
            PARTS,
        )
        # The mass of exactly k tokens: count only as many of the ties at the threshold.
        tied = mass_above + (k.to(tl.float32) - count_above) * tl.exp2((threshold - top) * scale)
        mass = tl.where(count > k, tied, mass)
        # Even V tokens below this logit weigh less than 1 - top_p: top_p is reached above it.
        far = top + tl.log2((1.0 - top_p) * mass * (0.5 / V)) / scale
        low = tl.maximum(low, (key_of(far) >> SHIFT).to(tl.int64))
        low = tl.minimum(low, high - 1)
        target = tl.maximum(top_p * mass, 1e-30)
        low, _mass, _above, epoch = _search(
            row,
            scratch,
            epoch + 1,
            top,
            scale,
            low,
            high,
            target,
            False,
            V,
            SEGMENT,
            VECTOR,
            SHIFT,
            PARTS,
        )
    return _value(low, SHIFT)
