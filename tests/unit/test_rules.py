"""Rules on logits against plain Python, row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import slow_rules
import torch
from torch import Tensor

from strobe.sampling.rules import (
    LogitEdits,
    Penalties,
    RowValues,
    add_bias,
    apply_rules,
    forbid,
    keep_grammar,
    penalize,
    unpack,
    unpack_by_shifts,
)

SEEDS = range(25)
STRENGTHS = (-2.0, -0.7, 0.0, 0.5, 2.0)
REPETITIONS = (0.3, 1.0, 1.3, 5.0)


class World:
    """Random rows of logits and, for each rule, the rows it concerns, in no order."""

    def __init__(self, seed: int):
        self.rng = rng = random.Random(seed)
        self.size = rng.choice([3, 31, 32, 33, 64, 70])
        self.count = rng.randint(1, 6)
        self.logits = [
            [rng.choice([-math.inf, rng.uniform(-9, 9), rng.uniform(-9, 9), 0.0]) for _ in self.ids]
            for _ in range(self.count)
        ]

    @property
    def ids(self) -> range:
        return range(self.size)

    @property
    def tensor(self) -> Tensor:
        return torch.tensor(self.logits)

    def rows(self) -> list[int]:
        """Some of the rows, at least one."""
        return self.rng.sample(range(self.count), self.rng.randint(1, self.count))

    def tokens(self, most: int) -> list[int]:
        return [self.rng.choice(self.ids) for _ in range(self.rng.randint(0, most))]


def check(found: Tensor, wanted: Sequence[Sequence[float]], *, abs_tol: float = 1e-5) -> None:
    assert found.dtype == torch.float32
    assert found.shape == (len(wanted), len(wanted[0]))
    for row, other in zip(found.tolist(), wanted, strict=True):
        for x, y in zip(row, other, strict=True):
            assert x == y or math.isclose(x, y, rel_tol=1e-5, abs_tol=abs_tol), (x, y)


def bias_of(world: World) -> tuple[RowValues, list[list[float]]]:
    """The rule's values, and what it is to make of the world's logits."""
    rows, values, wanted = world.rows(), [], [list(row) for row in world.logits]
    for r in rows:
        bias = {t: world.rng.uniform(-100, 100) for t in set(world.tokens(4))}
        allowed = world.tokens(9) or None if world.rng.random() < 0.6 else None
        wanted[r] = slow_rules.biased(wanted[r], bias, allowed)
        outside = [0.0 if allowed is None or t in allowed else -math.inf for t in world.ids]
        values.append([x + bias.get(t, 0.0) for t, x in enumerate(outside)])
    return RowValues(torch.tensor(rows), torch.tensor(values)), wanted


def penalties_of(
    world: World, logits: Sequence[Sequence[float]], most_drafts: int
) -> tuple[Penalties, list[list[float]]]:
    """Each row with its own history: a prompt, an answer, and the drafts that stand before it."""
    rng, rows, wanted = world.rng, world.rows(), [list(row) for row in logits]
    counts, prompts, drafts, ranks, strengths = [], [], [], [], []
    for r in rows:
        prompt, output = world.tokens(6), world.tokens(8)
        row_drafts = [rng.choice(world.ids) for _ in range(most_drafts)]
        rank = rng.randint(0, most_drafts)
        strength = (rng.choice(STRENGTHS), rng.choice(STRENGTHS), rng.choice(REPETITIONS))
        wanted[r] = slow_rules.penalized(
            wanted[r],
            prompt,
            output + row_drafts[:rank],
            presence=strength[0],
            frequency=strength[1],
            repetition=strength[2],
        )
        counts.append([output.count(token) for token in world.ids])
        prompts.append([token in prompt for token in world.ids])
        drafts.append(row_drafts)
        ranks.append(rank)
        strengths.append(strength)
    penalties = Penalties(
        rows=torch.tensor(rows),
        counts=torch.tensor(counts, dtype=torch.int32),
        prompt=torch.tensor(prompts),
        drafts=torch.tensor(drafts, dtype=torch.int64).view(len(rows), most_drafts),
        rank=torch.tensor(ranks),
        strength=torch.tensor(strengths),
    )
    return penalties, wanted


def bans_of(world: World, logits: Sequence[Sequence[float]]) -> tuple[Tensor, list[list[float]]]:
    banned = [set(world.tokens(5)) for _ in range(world.count)]
    wanted = [slow_rules.without(r, b) for r, b in zip(logits, banned, strict=True)]
    return torch.tensor([[t in b for t in world.ids] for b in banned]), wanted


def words_of(allowed: Sequence[set[int]], size: int) -> Tensor:
    """Sets of token ids as rows of 32-bit words, lowest bit first."""
    count = -(-size // 32)
    unsigned = [
        [sum(1 << (t - 32 * w) for t in ids if t // 32 == w) for w in range(count)]
        for ids in allowed
    ]
    signed = [[x - 2**32 if x >= 2**31 else x for x in row] for row in unsigned]
    return torch.tensor(signed, dtype=torch.int32)


def grammar_of(
    world: World, logits: Sequence[Sequence[float]]
) -> tuple[RowValues, list[list[float]]]:
    rows, allowed, wanted = world.rows(), [], [list(row) for row in logits]
    for r in rows:
        ids = set(world.tokens(12)) | {world.rng.choice(world.ids)}
        wanted[r] = slow_rules.within(wanted[r], ids)
        allowed.append(ids)
    return RowValues(torch.tensor(rows), words_of(allowed, world.size)), wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_bias_is_added_and_what_is_not_allowed_is_out(seed: int):
    world = World(seed)
    bias, wanted = bias_of(world)
    check(add_bias(world.tensor, LogitEdits(bias=bias)), wanted)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("seed", SEEDS)
def test_penalties_count_the_answer_and_the_drafts_before_the_row(seed: int, drafts: int):
    world = World(seed)
    penalties, wanted = penalties_of(world, world.logits, drafts)
    check(penalize(world.tensor, LogitEdits(penalties=penalties)), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_banned_tokens_are_out_and_the_rest_stays(seed: int):
    world = World(seed)
    banned, wanted = bans_of(world, world.logits)
    check(forbid(world.tensor, LogitEdits(banned=banned)), wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_grammar_keeps_what_it_allows(seed: int):
    world = World(seed)
    grammar, wanted = grammar_of(world, world.logits)
    check(keep_grammar(world.tensor, LogitEdits(grammar=grammar)), wanted)


def all_rules(seed: int) -> tuple[World, LogitEdits, list[list[float]]]:
    world = World(seed)
    bias, wanted = bias_of(world)
    penalties, wanted = penalties_of(world, wanted, 3)
    banned, wanted = bans_of(world, wanted)
    grammar, wanted = grammar_of(world, wanted)
    return world, LogitEdits(bias, penalties, banned, grammar), wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_all_rules_apply_in_order_and_leave_the_input_alone(seed: int):
    world, edits, wanted = all_rules(seed)
    logits = world.tensor
    parts = [
        tensor
        for part in edits
        if part is not None
        for tensor in ([part] if isinstance(part, Tensor) else part)
    ]
    before = [part.clone() for part in parts]
    check(apply_rules(logits, edits), wanted, abs_tol=1e-4)
    assert torch.equal(logits, world.tensor)
    assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_half_precision_logits_are_edited_in_single_precision(seed: int):
    world, edits, _ = all_rules(seed)
    half = world.tensor.to(torch.bfloat16)
    found = apply_rules(half, edits)
    assert found.dtype == torch.float32
    assert torch.equal(found, apply_rules(half.float(), edits))
    assert torch.equal(half, world.tensor.to(torch.bfloat16))


def test_rows_that_no_rule_concerns_come_through_to_the_bit():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 1e3
    one = torch.tensor([2])
    strength = torch.tensor([[2.0, 2.0, 3.0]])
    edits = LogitEdits(
        bias=RowValues(one, torch.full((1, 40), 5.0)),
        penalties=Penalties(
            one,
            torch.ones(1, 40, dtype=torch.int32),
            torch.ones(1, 40, dtype=torch.bool),
            torch.zeros(1, 2, dtype=torch.int64),
            torch.tensor([1]),
            strength,
        ),
        banned=torch.zeros(5, 40, dtype=torch.bool),
        grammar=RowValues(one, words_of([{3}], 40)),
    )
    found = apply_rules(logits, edits)
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], logits[others])
    assert found[2].isfinite().tolist() == [token == 3 for token in range(40)]


def test_without_edits_the_logits_are_what_they_were():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    assert apply_rules(logits, None) is logits
    assert torch.equal(apply_rules(logits, LogitEdits()), logits)


def test_bias_comes_before_the_penalties():
    """A token at 1 with a bias of 3 is divided at 4, and one biased below 0 is multiplied."""
    logits = torch.tensor([[1.0, 1.0]])
    row = torch.tensor([0])
    edits = LogitEdits(
        bias=RowValues(row, torch.tensor([[3.0, -3.0]])),
        penalties=Penalties(
            row,
            torch.ones(1, 2, dtype=torch.int32),
            torch.zeros(1, 2, dtype=torch.bool),
            torch.zeros(1, 0, dtype=torch.int64),
            torch.tensor([0]),
            torch.tensor([[0.0, 0.0, 2.0]]),
        ),
    )
    assert apply_rules(logits, edits).tolist() == [[2.0, -4.0]]


def test_where_nothing_is_left_the_grammar_wins_and_all_it_allows_is_equally_likely():
    logits = torch.tensor([[5.0, 1.0, 2.0, 3.0]] * 3)
    banned = torch.tensor([[False, True, True, False], [False, True, False, False], [True] * 4])
    grammar = RowValues(torch.tensor([0, 1, 2]), words_of([{1, 2}, {1, 2}, {3}], 4))
    found = apply_rules(logits, LogitEdits(banned=banned, grammar=grammar))
    out = -math.inf
    assert found.tolist() == [[out, 0, 0, out], [out, out, 2.0, out], [out, out, out, 0]]


def test_a_grammar_that_allows_everything_changes_nothing():
    """-1 in every word, as rows behind an illegal draft have it; V is no multiple of 32."""
    logits = torch.randn(2, 45, generator=torch.Generator().manual_seed(2))
    words = torch.full((2, 2), -1, dtype=torch.int32)
    edits = LogitEdits(grammar=RowValues(torch.tensor([0, 1]), words))
    assert torch.equal(apply_rules(logits, edits), logits)


@pytest.mark.parametrize("unpacked", [unpack, unpack_by_shifts])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 61, 64, 151])
def test_a_bitmask_unpacks_to_its_tokens_on_every_device(unpacked, size: int):
    """Bit 31 of a word is its sign, and bits beyond the vocabulary are nobody's."""
    rng = random.Random(size)
    sets = [set(rng.sample(range(size), rng.randint(0, size))) for _ in range(5)]
    sets += [set(range(size)), set(), {size - 1}, {t for t in range(size) if t % 32 == 31}]
    words = words_of(sets, size)
    words[5] = -1
    found = unpacked(words, size)
    assert found.dtype == torch.bool
    assert found.tolist() == [[token in ids for token in range(size)] for ids in sets]
