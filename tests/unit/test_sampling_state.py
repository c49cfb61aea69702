"""SamplingState: admission, modes, tokens of verified spans, and token counts."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from strobe.runner.step_ops.triton_step_ops import TritonStepOps
from strobe.sampling.logprobs import score
from strobe.sampling.processors import LogitRows, process
from strobe.sampling.sampler import RowParams, sample_rows
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.sampling_state import FLOATS, GREEDY, INTS, SamplingMode, SamplingState
from strobe.sampling_params import MAX_NAMED, SamplingParams
from tests.support.full_marks import full_where
from tests.support.random_logit_batches import STRUCTURED, Admitted, World
from tests.support.reference_processors import processed
from tests.support.reference_sampling import distribution, params

CPU = torch.device("cpu")
TORCH = SamplingOps()


def state_of(*params: SamplingParams, size: int = 8, ops: SamplingOps = TORCH) -> SamplingState:
    state = SamplingState(len(params), size, CPU, ops)
    state.admit(
        [Admitted(slot, [1, 2], 2, sampling, seed=slot) for slot, sampling in enumerate(params)]
    )
    return state


def rows_of(slots: list[int], positions: list[int] | int = 0) -> LogitRows:
    """Return rows without drafts."""
    index = torch.arange(len(slots))
    row_positions = [positions] * len(slots) if isinstance(positions, int) else positions
    no_drafts = torch.zeros(len(slots), 0, dtype=torch.int64)
    return LogitRows(torch.tensor(slots), torch.tensor(row_positions), no_drafts, index, index * 0)


# modes

MODES: list[tuple[dict[str, Any], SamplingMode]] = [
    ({"temperature": 0}, GREEDY),
    ({"temperature": 0, "top_p": 0.5}, GREEDY),
    ({}, SamplingMode(sampled=True)),
    ({"top_k": 3}, SamplingMode(sampled=True, filtered=True)),
    ({"temperature": 0, "logit_bias": {1: 2}}, SamplingMode(processed=True)),
    ({"temperature": 0, "allowed_token_ids": [1]}, SamplingMode(processed=True)),
    ({"temperature": 0, "presence_penalty": 1}, SamplingMode(processed=True)),
    ({"temperature": 0, "min_tokens": 1}, SamplingMode(processed=True)),
    ({"temperature": 0, "structured_outputs": STRUCTURED}, SamplingMode(grammar=True)),
    *[
        ({"temperature": 0, "logprobs": count}, SamplingMode(logprobs=size))
        for count, size in ((0, 0), (1, 1), (2, 5), (5, 5), (6, 20), (20, 20), (21, 21), (999, 999))
    ],
]


@pytest.mark.parametrize(("fields", "mode"), MODES, ids=[str(fields) for fields, _ in MODES])
def test_mode_reflects_a_slot(fields: dict[str, Any], mode: SamplingMode):
    state = state_of(SamplingParams(**fields), SamplingParams(temperature=0))
    assert state.mode([0]) == mode
    assert state.mode([1]) == state.mode([2]) == state.mode([]) == GREEDY
    assert state.mode([0, 1, 1]) == mode
    state.admit([Admitted(0, [], 0, SamplingParams(temperature=0))])
    assert state.mode([0]) == GREEDY


def test_mode_of_several_slots_is_their_union():
    state = state_of(*[SamplingParams(**fields) for fields, _ in MODES], size=1000)
    everything = SamplingMode(True, True, True, True, 999)
    assert state.mode(range(len(MODES))) == everything
    assert hash(everything) == hash(SamplingMode(*everything))


def test_kernels_use_one_mode_for_sampled_mixtures():
    state = state_of(
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=3),
        ops=TritonStepOps(),
    )
    assert state.mode([0]) == GREEDY
    for slots in ([1], [2], [0, 1], [0, 1, 2]):
        assert state.mode(slots) == SamplingMode(sampled=True, filtered=True)


def test_num_bytes_matches_the_tables():
    state = SamplingState(7, 100, CPU, TORCH)
    held = [*state.tables, state.floats, state.ints, state.named]
    assert SamplingState.num_bytes(7, 100) == sum(t.nbytes for t in held)


# tokens


def test_slots_sample_by_their_parameters_also_when_reused():
    """The last slot, the spare one, is greedy; a slot's next request inherits nothing."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 8, generator=generator) * 2
    fields = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 2, "min_tokens": 3},
        {"temperature": 2.0, "top_p": 0.6, "min_p": 0.05},
    ]
    state = state_of(*[SamplingParams(**slot_fields) for slot_fields in fields])
    slots = [i % 5 for i in range(80)]
    rows = rows_of(slots, list(range(80)))

    def expected(slot_fields: list[dict[str, Any]], seeds: list[int]) -> Tensor:
        every = [*slot_fields, {"temperature": 0.0}]
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        columns = {
            name: [every[slot].get(name, value) for slot in slots] for name, value in off.items()
        }
        return sample_rows(
            logits,
            params(80, seeds=[[*seeds, 0][slot] for slot in slots], positions=range(80), **columns),
        )

    mode = state.mode(range(5))
    assert torch.equal(state.sample(logits, rows, mode).tokens, expected(fields, [0, 1, 2, 3]))
    state.admit([Admitted(2, [], 0, SamplingParams(), seed=70)])
    fields[2] = {}
    assert torch.equal(
        state.sample(logits, rows, state.mode(range(5))).tokens, expected(fields, [0, 1, 70, 3])
    )


def test_seeds_and_siblings_sample_apart():
    logits = torch.zeros(40, 1000)
    tokens = []
    for seed, sibling in ((1, 0), (1, 1), (2, 0), (1, 0)):
        state = SamplingState(1, 1000, CPU, TORCH)
        state.admit([Admitted(0, [], 0, SamplingParams(), seed=seed, sibling=sibling)])
        tokens.append(state.sample(logits, rows_of([0] * 40, [*range(40)]), state.mode([0])).tokens)
    assert torch.equal(tokens[0], tokens[3])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[i] == tokens[j]).sum() <= 2


def test_scores_come_from_raw_logits():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    state = state_of(*[SamplingParams(logit_bias={4: 50.0}, logprobs=3, temperature=t)
                       for t in (0.0, 1.0, 0.5)])  # fmt: skip
    sampled = state.sample(logits, rows_of([0, 1, 2]), state.mode([0, 1, 2]))
    assert sampled.tokens.tolist() == [4] * 3
    assert sampled.scores is not None
    expected = score(logits, sampled.tokens, 5, state.named[:3])
    assert all(torch.equal(a, b) for a, b in zip(sampled.scores, expected, strict=True))


def test_captured_sampling_never_syncs():
    """On the meta device there are no values to wait for."""
    meta = torch.device("meta")
    state = SamplingState(3, 50, meta, TORCH)
    rows = LogitRows(
        *[torch.zeros(6, dtype=torch.int64, device=meta) for _ in range(2)],
        torch.zeros(2, 2, dtype=torch.int64, device=meta),
        *[torch.zeros(6, dtype=torch.int64, device=meta) for _ in range(2)],
    )
    logits = torch.zeros(6, 50, dtype=torch.bfloat16, device=meta)
    masks = torch.zeros(6, 2, dtype=torch.int32, device=meta)
    mode = SamplingMode(True, True, True, True, 5)
    sampled = state.sample(logits, rows, mode, masks)
    assert sampled.tokens.shape == (6,)
    assert sampled.scores is not None
    assert sampled.scores.top_ids.shape == (6, MAX_NAMED + 5)
    two = torch.zeros(2, dtype=torch.int64, device=meta)
    state.count_tokens(two, torch.zeros(2, 3, dtype=torch.int64, device=meta), two, two)


# counts


@pytest.mark.parametrize("seed", range(20))
def test_counting_accepted_tokens_equals_readmission(seed: int):
    """Spans without logits and padding spans count nothing."""
    world = World(seed)
    state, later, width = world.state(), [*world.admitted], len(world.drafts[0]) + 1
    spans = [*world.spans, world.slots, world.slots]
    tokens = torch.tensor([[world.rng.randrange(world.size) for _ in range(width)] for _ in spans])
    accepted = [world.rng.randrange(width) for _ in spans]
    active = [world.rng.random() < 0.7 for _ in world.spans] + [True, False]
    state.count_tokens(
        torch.tensor(spans), tokens, torch.tensor(accepted), torch.tensor(active).to(torch.int64)
    )
    for slot, row, num_accepted, counts in zip(
        world.spans, tokens.tolist(), accepted, active, strict=False
    ):
        if counts:
            a = later[slot]
            later[slot] = a._replace(tokens=[*a.tokens, *row[: num_accepted + 1]])
    world.admitted = later
    expected = world.state().tables
    processed = (expected.kinds & 1 > 0).nonzero()[:, 0]
    assert torch.equal(state.tables.counts[processed], expected.counts[processed])
    logits = torch.tensor(world.logits)
    rows = world.rows
    logits_out = process(logits, state.tables, rows, None, processed=True)
    assert torch.equal(logits_out, process(logits, expected, rows, None, processed=True))


# speculation: sampled tokens equal plain decoding's, and drafts agree as often as two races do

DRAWS = 8_000
FIRST = [0.3, 1.4, -0.2, 1.1, 0.4]
"""The target's logits for the first token."""
SECOND = [
    [0.0, 2.0, 1.0, -1.0, 0.0],
    [1.5, 0.2, 0.1, 1.0, -2.0],
    [0.0, 0.0, 0.0, 3.0, 1.0],
    [2.0, 2.0, 0.5, 0.0, 1.0],
    [0.1, 0.2, 0.3, 0.4, 0.5],
]
"""The target's logits for the second token, by the first."""
NEVER = -math.inf
DRAFTERS = {
    "near": [0.5, 1.0, 0.1, 1.3, 0.2],
    "equal": FIRST,
    "flat": [0.0] * 5,
    "certain and wrong": [0.0, 0.0, 60.0, 0.0, 0.0],
    "of a reduced vocabulary": [0.3, NEVER, 0.8, 1.1, NEVER],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 0.8, "top_p": 0.7},
    "min-p": {"temperature": 1.0, "min_p": 0.35},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    "penalties": {"temperature": 0.9, "presence_penalty": 0.4, "frequency_penalty": 0.9,
                  "repetition_penalty": 1.3},
    "bias": {"temperature": 1.0, "logit_bias": {1: 0.5, 2: -0.3, 4: 1.0}},
    "bans": {"temperature": 1.0, "allowed_token_ids": [1, 4]},
}  # fmt: skip
HISTORY, PROMPT = [0, 3, 1, 1, 2], 2


def admitted(**fields: Any) -> SamplingState:
    state = SamplingState(DRAWS, 5, CPU, TORCH)
    sampling = SamplingParams(**fields)
    state.admit([Admitted(i, HISTORY, PROMPT, sampling, seed=i) for i in range(DRAWS)])
    return state


def processed_probs(logits: list[float], output: list[int], **fields: Any) -> list[float]:
    changed = processed(
        logits, SamplingParams(**fields), HISTORY[:PROMPT], [*HISTORY[PROMPT:], *output]
    )
    filters = {k: v for k, v in fields.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    return distribution(changed, **filters)


def check_distribution(tokens: Tensor, probs: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(probs)).tolist()
    possible = [i for i, p in enumerate(probs) if p > 0]
    assert sum(counts[i] for i in possible) == len(tokens), "a token that was filtered out appears"
    if len(possible) > 1:
        expected = [probs[i] * len(tokens) for i in possible]
        assert stats.chisquare([counts[i] for i in possible], expected).pvalue > 0.001


def agreement(p: list[float], q: list[float]) -> float:
    """Return the probability that races by p and q with the same noise have the same winner
    (Moulton and Jiang, arXiv 1809.04052)."""
    pairs = list(zip(p, q, strict=True))
    both = [(a, b) for a, b in pairs if a > 0 and b > 0]
    return sum(1 / sum(max(x / a, y / b) for x, y in pairs) for a, b in both)


@cache
def plain_draws(name: str) -> tuple[SamplingState, Tensor, Tensor]:
    """Return a state with a setting in every slot, and the two tokens that plain decoding samples
    there, each [DRAWS]."""
    state, slots = admitted(**SETTINGS[name]), list(range(DRAWS))
    mode, position = state.mode(slots), len(HISTORY)
    tokens = state.sample(
        torch.tensor(FIRST).repeat(DRAWS, 1), rows_of(slots, position), mode
    ).tokens
    counted = admitted(**SETTINGS[name])
    counted.count_tokens(
        torch.arange(DRAWS),
        tokens[:, None],
        torch.zeros(DRAWS, dtype=torch.int64),
        torch.ones(DRAWS, dtype=torch.bool),
    )
    after = counted.sample(torch.tensor(SECOND)[tokens], rows_of(slots, position + 1), mode).tokens
    return state, tokens, after


@full_where(
    lambda name, drafter: (list(SETTINGS).index(name) + list(DRAFTERS).index(drafter)) % 2 == 1
)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_drafts_change_no_token_and_agree_as_expected(name: str, drafter: str):
    fields, draft = SETTINGS[name], DRAFTERS[drafter]
    state, plain, after = plain_draws(name)
    slots, position = list(range(DRAWS)), len(HISTORY)
    mode = state.mode(slots)
    # The drafter races with its own unprocessed logits and the target's noise.
    drafting = mode._replace(processed=False)
    drafts = state.sample(
        torch.tensor(draft).repeat(DRAWS, 1), rows_of(slots, position), drafting
    ).tokens
    both = torch.stack([torch.tensor(FIRST).repeat(DRAWS, 1), torch.tensor(SECOND)[drafts]], 1)
    span = torch.arange(DRAWS).repeat_interleave(2)
    rank = torch.tensor([0, 1]).repeat(DRAWS)
    rows = LogitRows(span, position + rank, drafts[:, None], span, rank)
    tokens = state.sample(both.view(-1, 5), rows, mode).tokens.view(-1, 2)
    assert torch.equal(tokens[:, 0], plain)
    agree = drafts == plain
    assert torch.equal(tokens[agree, 1], after[agree])
    first = processed_probs(FIRST, [], **fields)
    check_distribution(plain, first)
    joint = [p * q for a, p in enumerate(first) for q in processed_probs(SECOND[a], [a], **fields)]
    check_distribution(plain * 5 + after, joint)
    filters = {k: v for k, v in fields.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    share = agreement(first, distribution(draft, **filters))
    if drafter == "equal" and not mode.processed:
        assert agree.all()
    else:
        assert stats.binomtest(int(agree.sum()), DRAWS, min(share, 1.0)).pvalue > 0.001


def test_columns_of_slots_are_those_of_rows():
    assert sorted([*FLOATS, *INTS, "position"]) == sorted(RowParams._fields)
