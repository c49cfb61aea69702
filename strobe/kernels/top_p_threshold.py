# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
"""The least logit that a row's top-k and top-p keep, without a sort.

It is found by bisection over the floats in their order, each reading of the row taking count or
mass above three of them. A row of 150,000 tokens in bfloat16 is 304 KB, so that the rows of all SMs
stay in the L2 cache, and a reading is bound by arithmetic: 7 to 13 instructions a token. The first
bounds are tight enough for about 5 readings. Few rows are divided among several programs each,
which exchange what they counted behind every reading; with many, a program has a row.

A row, or a program's part of one, lies before it as SEGMENTS runs of SEGMENT tokens, read side by
side:

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
"""The key of -inf, below that of every other number."""


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 of an int64 key without its SHIFT low bits."""
    key = (key << SHIFT).to(tl.int32)
    return tl.where(key < 0, -key | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def ids_of(step, SEGMENT: tl.constexpr, VECTOR: tl.constexpr):
    """The tokens [WIDTH / VECTOR, SEGMENTS, VECTOR] of a step: a thread reads VECTOR at once, a
    warp lies along the first dimension and so reads what is next to each other."""
    first = tl.program_id(1) * (SEGMENTS * SEGMENT)
    lane = tl.arange(0, WIDTH // VECTOR)[:, None, None] * VECTOR
    segment = tl.arange(0, SEGMENTS)[None, :, None] * SEGMENT
    return first + segment + step * WIDTH + lane + tl.arange(0, VECTOR)[None, None, :]


@triton.jit
def exchange(room, turn, one, two, three, PARTS: tl.constexpr):
    """Three int32 of each of a row's programs, [PARTS] each. Waits for all of them: they must run
    at the same time. room: [1 + 2 * 3 * PARTS] int32, a count of arrivals that starts at 0, and
    the numbers of two turns, for nobody is further ahead. turn: counts calls from 0."""
    index = tl.arange(0, PARTS)
    if PARTS == 1:
        return one + index, two + index, three + index
    numbers = room + 1 + (turn & 1) * (3 * PARTS)
    own = numbers + tl.program_id(1)
    tl.store(own, one)
    tl.store(own + PARTS, two)
    tl.store(own + 2 * PARTS, three)
    tl.debug_barrier()
    tl.atomic_add(room, 1, sem="release")
    while tl.load(room, volatile=True) < PARTS * (turn + 1):
        pass
    tl.atomic_add(room, 0, sem="acquire")
    tl.debug_barrier()
    numbers += index
    one, two = tl.load(numbers, volatile=True), tl.load(numbers + PARTS, volatile=True)
    return one, two, tl.load(numbers + 2 * PARTS, volatile=True)


@triton.jit
def _total(room, turn, one, two, three, PARTS: tl.constexpr):
    """Three float32 added up over a row's programs."""
    one, two, three = exchange(
        room,
        turn,
        one.to(tl.int32, bitcast=True),
        two.to(tl.int32, bitcast=True),
        three.to(tl.int32, bitcast=True),
        PARTS,
    )
    one, two = one.to(tl.float32, bitcast=True), two.to(tl.float32, bitcast=True)
    return tl.sum(one), tl.sum(two), tl.sum(three.to(tl.float32, bitcast=True))


@triton.jit
def _amounts(
    row,
    room,
    turn,
    top,
    scale,
    least1,
    least2,
    least3,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The mass of the tokens with logits of at least each of three values, or their count."""
    amount1 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    amount2 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    amount3 = tl.full([WIDTH // VECTOR, SEGMENTS], 0.0, tl.float32)
    for step in range(SEGMENT // WIDTH):
        x = read(row, ids_of(step, SEGMENT, VECTOR), V)
        # Ones in float, not bools or selections: two instructions, a comparison and an FMA.
        weight = 1.0 if COUNT else tl.exp2((x - top) * scale)
        amount1 += tl.sum(tl.where(x >= least1, 1.0, 0.0) * weight, 2)
        amount2 += tl.sum(tl.where(x >= least2, 1.0, 0.0) * weight, 2)
        amount3 += tl.sum(tl.where(x >= least3, 1.0, 0.0) * weight, 2)
    return _total(room, turn, tl.sum(amount1), tl.sum(amount2), tl.sum(amount3), PARTS)


@triton.jit
def _search(
    row,
    room,
    turn,
    top,
    scale,
    low,
    high,
    goal,
    COUNT: tl.constexpr,
    V: tl.constexpr,
    SEGMENT: tl.constexpr,
    VECTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The greatest key in [low, high) whose tokens from it on amount to the goal, or low.

    -> (key, the amount from it on, the amount from a greater key on, the next turn). By count it
    ends early at a key with just `goal` tokens from it on; by mass, where one token at most can lie
    between the two keys.
    """
    some = tl.full([], 0.0, tl.float32)
    less = tl.full([], 0.0, tl.float32)
    fresh = low == low  # the amount of low itself is not known
    going = fresh
    while going:
        key1 = tl.where(fresh, low, low + ((high - low) >> 2))
        key2 = low + ((high - low) >> 1)
        key3 = low + (((high - low) * 3) >> 2)
        amount1, amount2, amount3 = _amounts(
            row,
            room,
            turn,
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
        turn += 1
        ok1, ok2, ok3 = amount1 >= goal, amount2 >= goal, amount3 >= goal
        high = tl.where(ok3, high, tl.where(ok2, key3, tl.where(ok1, key2, key1)))
        less = tl.where(ok3, less, tl.where(ok2, amount3, tl.where(ok1, amount2, amount1)))
        first = ok1 | fresh
        low = tl.where(ok3, key3, tl.where(ok2, key2, tl.where(first, key1, low)))
        some = tl.where(ok3, amount3, tl.where(ok2, amount2, tl.where(first, amount1, some)))
        if COUNT:
            done = some == goal
        else:
            # Each token between weighs at least `weight`, which must stand out of the rounding.
            weight = tl.exp2((_value(low, SHIFT) - top) * scale)
            done = (some - less < 1.5 * weight) & (weight > 1e-5 * some)
        going = (high - low > 1) & (done == 0)
        fresh = fresh & False
    return low, some, less, turn


@triton.jit
def _kth_of_lanes(keys, low, high, k):
    """A key in [low, high) with at least k of `keys` from it on, or low; the greatest, or one with
    exactly k."""
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
    room,
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
    """The least logit that top-k and top-p keep. lanes: the greatest logit each lane has seen."""
    bottom = tl.full([], (NOTHING >> SHIFT) + 1, tl.int64)
    high = (key_of(top) >> SHIFT).to(tl.int64) + 1
    low = bottom
    turn = tl.full([], 1, tl.int32)
    count = tl.full([], 0.0, tl.float32)
    count_above = tl.full([], 0.0, tl.float32)
    if k < V:
        # Each lane has a token of at least its maximum, so the k-th of these is a bound.
        low = _kth_of_lanes(key_of(lanes) >> SHIFT, bottom, high, k).to(tl.int32)
        bounds, _1, _2 = exchange(room, turn, low, low, low, PARTS)
        low = tl.max(bounds).to(tl.int64)
        low, count, count_above, turn = _search(
            row,
            room,
            turn + 1,
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
        edge, above = _value(low, SHIFT), _value(low + 1, SHIFT)
        mass, mass_above, _ = _amounts(
            row, room, turn, top, scale, edge, above, above, False, V, SEGMENT, VECTOR, PARTS
        )
        # The mass of exactly k tokens: of those that tie at the edge, as many as still fit.
        tied = mass_above + (k.to(tl.float32) - count_above) * tl.exp2((edge - top) * scale)
        mass = tl.where(count > k, tied, mass)
        # V tokens that share less than 1 - top_p of the mass are not needed to reach top_p.
        far = top + tl.log2((1.0 - top_p) * mass * (0.5 / V)) / scale
        low = tl.maximum(low, (key_of(far) >> SHIFT).to(tl.int64))
        low = tl.minimum(low, high - 1)
        goal = tl.maximum(top_p * mass, 1e-30)
        low, _mass, _above, turn = _search(
            row,
            room,
            turn + 1,
            top,
            scale,
            low,
            high,
            goal,
            False,
            V,
            SEGMENT,
            VECTOR,
            SHIFT,
            PARTS,
        )
    return _value(low, SHIFT)
