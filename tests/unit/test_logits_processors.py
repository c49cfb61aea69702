"""Logits processors against plain Python, row by row."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe.sampling.processors import LogitRows, process, unpack, unpack_by_shifts
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.sampling_state import SamplingState
from strobe.sampling_params import SamplingParams
from tests.support.random_logit_batches import (
    STRUCTURED,
    Admitted,
    World,
    check,
    normalized,
    words_of,
)

SEEDS = range(40)


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("seed", SEEDS)
def test_processors_apply_in_order_and_keep_inputs(seed: int, drafts: int):
    world = World(seed, max_drafts=drafts)
    state, rows, masks, logits = world.state(), world.rows, world.masks, torch.tensor(world.logits)
    before = [x.clone() for x in (*state.tables, *rows, masks, logits)]
    check(process(logits, state.tables, rows, masks, processed=True), world.expected())
    after = (*state.tables, *rows, masks, logits)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_half_precision_logits_are_processed_in_single_precision(seed: int):
    world = World(seed)
    tables, half = world.state().tables, torch.tensor(world.logits).to(torch.bfloat16)
    output = process(half, tables, world.rows, world.masks, processed=True)
    assert output.dtype == torch.float32
    expected = process(half.float(), tables, world.rows, world.masks, processed=True)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_unaffected_rows_are_bitwise_unchanged(seed: int):
    """Alone, and next to processed rows."""
    world = World(seed, size=40)
    plain = [i for i, (s, _) in enumerate(world.places) if world.spans[s] % 3 == 0]
    logits = torch.randn(len(world.places), 40, generator=torch.Generator().manual_seed(seed)) * 1e3
    output = process(logits, world.state().tables, world.rows, world.masks, processed=True)
    assert torch.equal(output[plain], logits[plain])


def admit(
    *slot_fields: dict[str, Any], size: int = 4, tokens: tuple[int, ...] = (), prompt: int = 0
):
    state = SamplingState(len(slot_fields), size, torch.device("cpu"), SamplingOps())
    state.admit(
        [
            Admitted(slot, tokens, prompt, SamplingParams(**fields), stop_ids=frozenset([0, 3]))
            for slot, fields in enumerate(slot_fields)
        ]
    )
    return state


def rows_of(slots: list[int], position: int = 0) -> LogitRows:
    """Return rows without drafts."""
    index = torch.arange(len(slots))
    none = torch.zeros(len(slots), 0, dtype=torch.int64)
    positions = torch.full_like(index, position)
    return LogitRows(torch.tensor(slots), positions, none, index, torch.zeros_like(index))


def apply(state: SamplingState, logits: Tensor, masks: Tensor | None = None, position: int = 0):
    rows = rows_of(list(range(len(logits))), position)
    return process(logits, state.tables, rows, masks, processed=True)


def test_bias_precedes_penalties():
    """Token 0 becomes 4 before it is divided; token 1 falls below 0 and is multiplied."""
    state = admit({"logit_bias": {0: 3.0, 1: -3.0}, "repetition_penalty": 2.0}, tokens=(0, 1))
    assert apply(state, torch.ones(1, 4)).tolist() == [[2.0, -4.0, 1.0, 1.0]]


def test_end_tokens_are_banned_before_min_tokens():
    state = admit({"min_tokens": 2}, {}, tokens=(1, 1, 1), prompt=3)
    logits, out = torch.tensor([[5.0, 1.0, 2.0, 3.0]] * 2), -math.inf
    for position, first in ((3, [out, 1, 2, out]), (4, [out, 1, 2, out]), (5, [5, 1, 2, 3])):
        output = apply(state, logits, position=position)
        assert output.tolist() == [first, [5, 1, 2, 3]]


def test_grammar_wins_over_total_ban():
    logits, out = torch.tensor([[5.0, 1.0, 2.0, 3.0]] * 3), -math.inf
    structured = {"structured_outputs": STRUCTURED}
    state = admit(
        {"allowed_token_ids": [0, 3], **structured},
        {"allowed_token_ids": [0, 2, 3], **structured},
        {"min_tokens": 1, **structured},
    )
    masks = words_of([{1, 2}, {1, 2}, {3}], 4)
    expected = [[out, 0, 0, out], [out, out, 2.0, out], [out, out, out, 0]]
    assert normalized(apply(state, logits, masks)) == expected
    for temperature in (0.0, 1.0, 100.0):
        for mode in ({}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
            again = admit(
                *[
                    {"allowed_token_ids": ids, "temperature": temperature, **mode, **structured}
                    for ids in ([0, 3], [0, 2, 3])
                ]
            )
            rows = rows_of([0] * 200 + [1] * 200)._replace(positions=torch.arange(400))
            everything = torch.tensor([[5.0, 1.0, 2.0, 3.0]]).repeat(400, 1)
            both = words_of([{1, 2}], 4).repeat(400, 1)
            tokens = again.sample(everything, rows, again.mode([0, 1]), both).tokens
            seen = torch.bincount(tokens[:200], minlength=4).tolist()
            assert seen[0] == seen[3] == 0
            assert seen[1] == 200 if temperature == 0 else 60 < seen[1] < 140
            assert tokens[200:].tolist() == [2] * 200


def test_permissive_grammar_changes_nothing():
    """Rows after an illegal draft have -1 in every word; V is not a multiple of 32."""
    logits = torch.randn(2, 45, generator=torch.Generator().manual_seed(2))
    state = admit(*[{"structured_outputs": STRUCTURED}] * 2, size=45)
    assert torch.equal(apply(state, logits, torch.full((2, 2), -1, dtype=torch.int32)), logits)


def test_masks_of_slots_without_a_grammar_are_not_read():
    logits = torch.tensor([[1.0, 2.0, -math.inf, 3.0]] * 2)
    state = admit({}, {"logit_bias": {0: 1.0}})
    output = apply(state, logits, torch.zeros(2, 1, dtype=torch.int32))
    assert output.tolist() == [[1.0, 2.0, -math.inf, 3.0], [2.0, 2.0, -math.inf, 3.0]]


@pytest.mark.parametrize("unpacked", [unpack, unpack_by_shifts])
@pytest.mark.parametrize("size", [1, 31, 32, 33, 61, 64, 151])
def test_bitmask_unpacks_to_its_tokens(unpacked, size: int):
    """Bit 31 of a word is its sign, and bits past the vocabulary are ignored."""
    rng = random.Random(size)
    sets = [set(rng.sample(range(size), rng.randint(0, size))) for _ in range(5)]
    sets += [set(range(size)), set(), {size - 1}, {t for t in range(size) if t % 32 == 31}]
    words = words_of(sets, size)
    words[5] = -1
    mask = unpacked(words, size)
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[token in ids for token in range(size)] for ids in sets]
