"""The sampling room as the engine sees it: admissions, modes, tokens of verify spans, counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from logit_worlds import STRUCTURED, Admitted, World
from scipy import stats
from slow_processors import processed
from slow_sampling import distribution, params
from torch import Tensor

from strobe.sampling.logprobs import score
from strobe.sampling.processors import LogitRows, process
from strobe.sampling.sampler import sample_rows
from strobe.sampling.state import GREEDY, SamplingMode, SamplingState
from strobe.sampling_params import SamplingParams

CPU = torch.device("cpu")


def state_of(*asked: SamplingParams, size: int = 8, kernels: bool = False) -> SamplingState:
    state = SamplingState(len(asked), size, CPU, kernels=kernels)
    state.admit([Admitted(slot, [1, 2], 2, given, seed=slot) for slot, given in enumerate(asked)])
    return state


def rows_of(slots: list[int], positions: list[int] | int = 0) -> LogitRows:
    """Rows without drafts."""
    index = torch.arange(len(slots))
    where = [positions] * len(slots) if isinstance(positions, int) else positions
    none = torch.zeros(len(slots), 0, dtype=torch.int64)
    return LogitRows(torch.tensor(slots), torch.tensor(where), none, index, index * 0)


# modes

ASKED: list[tuple[dict[str, Any], SamplingMode]] = [
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
        ({"temperature": 0, "logprobs": asked}, SamplingMode(logprobs=size))
        for asked, size in ((0, 0), (1, 1), (2, 5), (5, 5), (6, 20), (20, 20), (21, 21), (999, 999))
    ],
]


@pytest.mark.parametrize(("asked", "mode"), ASKED, ids=[str(asked) for asked, _ in ASKED])
def test_mode_reflects_a_slot(asked: dict[str, Any], mode: SamplingMode):
    state = state_of(SamplingParams(**asked), SamplingParams(temperature=0))
    assert state.mode([0]) == mode
    assert state.mode([1]) == state.mode([2]) == state.mode([]) == GREEDY
    assert state.mode([0, 1, 1]) == mode
    state.admit([Admitted(0, [], 0, SamplingParams(temperature=0))])
    assert state.mode([0]) == GREEDY


def test_mode_of_several_slots_is_their_union():
    state = state_of(*[SamplingParams(**asked) for asked, _ in ASKED], size=1000)
    everything = SamplingMode(True, True, True, True, 999)
    assert state.mode(range(len(ASKED))) == everything
    assert hash(everything) == hash(SamplingMode(*everything))


def test_kernels_use_one_mode_for_sampled_mixtures():
    state = state_of(
        SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3), kernels=True
    )
    assert state.mode([0]) == GREEDY
    for slots in ([1], [2], [0, 1], [0, 1, 2]):
        assert state.mode(slots) == SamplingMode(sampled=True, filtered=True)


def test_the_tables_take_as_many_bytes_as_they_say():
    state = SamplingState(7, 100, CPU)
    held = [*state.tables, state.floats, state.ints]
    assert SamplingState.num_bytes(7, 100) == sum(t.nbytes for t in held)


# tokens


def test_slots_sample_as_their_parameters_say_and_take_new_ones():
    """The spare slot, the last, is greedy; a slot's next request has nothing of the one before."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 8, generator=generator) * 2
    asked = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 2, "min_tokens": 3},
        {"temperature": 2.0, "top_p": 0.6, "min_p": 0.05},
    ]
    state = state_of(*[SamplingParams(**given) for given in asked])
    slots = [i % 5 for i in range(80)]
    rows = rows_of(slots, list(range(80)))

    def expected(given: list[dict[str, Any]], seeds: list[int]) -> Tensor:
        every = [*given, {"temperature": 0.0}]
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        columns = {
            name: [every[slot].get(name, value) for slot in slots] for name, value in off.items()
        }
        return sample_rows(
            logits,
            params(80, seeds=[[*seeds, 0][slot] for slot in slots], positions=range(80), **columns),
        )

    mode = state.mode(range(5))
    assert torch.equal(state.sample(logits, rows, mode).tokens, expected(asked, [0, 1, 2, 3]))
    state.admit([Admitted(2, [], 0, SamplingParams(), seed=70)])
    asked[2] = {}
    assert torch.equal(
        state.sample(logits, rows, state.mode(range(5))).tokens, expected(asked, [0, 1, 70, 3])
    )


def test_seeds_and_siblings_sample_apart():
    logits = torch.zeros(40, 1000)
    tokens = []
    for seed, sibling in ((1, 0), (1, 1), (2, 0), (1, 0)):
        state = SamplingState(1, 1000, CPU)
        state.admit([Admitted(0, [], 0, SamplingParams(), seed=seed, sibling=sibling)])
        tokens.append(state.sample(logits, rows_of([0] * 40, [*range(40)]), state.mode([0])).tokens)
    assert torch.equal(tokens[0], tokens[3])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[i] == tokens[j]).sum() <= 2


def test_scores_come_from_raw_logits():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    state = state_of(*[SamplingParams(logit_bias={4: 50.0}, logprobs=3, temperature=t)
                       for t in (0.0, 1.0, 0.5)])  # fmt: skip
    found = state.sample(logits, rows_of([0, 1, 2]), state.mode([0, 1, 2]))
    assert found.tokens.tolist() == [4] * 3
    assert found.scores is not None
    wanted = score(logits, found.tokens, 5)
    assert all(torch.equal(a, b) for a, b in zip(found.scores, wanted, strict=True))


def test_captured_sampling_never_syncs():
    """On the meta device there are no values to ask for."""
    meta = torch.device("meta")
    state = SamplingState(3, 50, meta)
    rows = LogitRows(
        *[torch.zeros(6, dtype=torch.int64, device=meta) for _ in range(2)],
        torch.zeros(2, 2, dtype=torch.int64, device=meta),
        *[torch.zeros(6, dtype=torch.int64, device=meta) for _ in range(2)],
    )
    logits = torch.zeros(6, 50, dtype=torch.bfloat16, device=meta)
    masks = torch.zeros(6, 2, dtype=torch.int32, device=meta)
    mode = SamplingMode(True, True, True, True, 5)
    found = state.sample(logits, rows, mode, masks)
    assert found.tokens.shape == (6,)
    assert found.scores is not None
    assert found.scores.top_ids.shape == (6, 5)
    two = torch.zeros(2, dtype=torch.int64, device=meta)
    state.count_tokens(two, torch.zeros(2, 3, dtype=torch.int64, device=meta), two, two)


# counts


@pytest.mark.parametrize("seed", range(20))
def test_counting_kept_tokens_equals_readmission(seed: int):
    """Spans that gave no logits and those that fill up a shape count nothing to anyone."""
    world = World(seed)
    state, later, width = world.state(), [*world.admitted], len(world.drafts[0]) + 1
    spans = [*world.spans, world.slots, world.slots]
    tokens = torch.tensor([[world.rng.randrange(world.size) for _ in range(width)] for _ in spans])
    accepted = [world.rng.randrange(width) for _ in spans]
    active = [world.rng.random() < 0.7 for _ in world.spans] + [True, False]
    state.count_tokens(
        torch.tensor(spans), tokens, torch.tensor(accepted), torch.tensor(active).to(torch.int64)
    )
    for slot, row, kept, counts in zip(
        world.spans, tokens.tolist(), accepted, active, strict=False
    ):
        if counts:
            a = later[slot]
            later[slot] = a._replace(tokens=[*a.tokens, *row[: kept + 1]])
    world.admitted = later
    wanted = world.state().tables
    processed = (wanted.kinds & 1 > 0).nonzero()[:, 0]
    assert torch.equal(state.tables.counts[processed], wanted.counts[processed])
    logits = torch.tensor(world.logits)
    rows = world.rows
    found = process(logits, state.tables, rows, None, processed=True)
    assert torch.equal(found, process(logits, wanted, rows, None, processed=True))


# speculation: tokens are those of plain decoding, and drafts agree as often as two races do

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


def admitted(**how: Any) -> SamplingState:
    state = SamplingState(DRAWS, 5, CPU)
    asked = SamplingParams(**how)
    state.admit([Admitted(i, HISTORY, PROMPT, asked, seed=i) for i in range(DRAWS)])
    return state


def processed_probs(logits: list[float], made: list[int], **how: Any) -> list[float]:
    changed = processed(logits, SamplingParams(**how), HISTORY[:PROMPT], [*HISTORY[PROMPT:], *made])
    filters = {k: v for k, v in how.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    return distribution(changed, **filters)


def check_distribution(tokens: Tensor, wanted: list[float]) -> None:
    counts = torch.bincount(tokens, minlength=len(wanted)).tolist()
    possible = [i for i, p in enumerate(wanted) if p > 0]
    assert sum(counts[i] for i in possible) == len(tokens), "a token that was filtered out appears"
    if len(possible) > 1:
        expected = [wanted[i] * len(tokens) for i in possible]
        assert stats.chisquare([counts[i] for i in possible], expected).pvalue > 0.001


def agreement(p: list[float], q: list[float]) -> float:
    """How often races by p and q with the same noise have one winner (Moulton and Jiang, arXiv
    1809.04052)."""
    pairs = list(zip(p, q, strict=True))
    both = [(a, b) for a, b in pairs if a > 0 and b > 0]
    return sum(1 / sum(max(x / a, y / b) for x, y in pairs) for a, b in both)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_drafts_keep_tokens_and_agree_at_expected_rate(name: str, drafter: str):
    how, draft = SETTINGS[name], DRAFTERS[drafter]
    state, slots = admitted(**how), list(range(DRAWS))
    mode, position = state.mode(slots), len(HISTORY)
    plain = state.sample(torch.tensor(FIRST).repeat(DRAWS, 1), rows_of(slots, position), mode)
    counted = admitted(**how)
    counted.count_tokens(
        torch.arange(DRAWS),
        plain.tokens[:, None],
        torch.zeros(DRAWS, dtype=torch.int64),
        torch.ones(DRAWS, dtype=torch.bool),
    )
    after = counted.sample(
        torch.tensor(SECOND)[plain.tokens], rows_of(slots, position + 1), mode
    ).tokens
    # The drafter races by its own logits, which no processor changes, with the target's noise.
    drafting = mode._replace(processed=False)
    drafts = state.sample(
        torch.tensor(draft).repeat(DRAWS, 1), rows_of(slots, position), drafting
    ).tokens
    both = torch.stack([torch.tensor(FIRST).repeat(DRAWS, 1), torch.tensor(SECOND)[drafts]], 1)
    span = torch.arange(DRAWS).repeat_interleave(2)
    rank = torch.tensor([0, 1]).repeat(DRAWS)
    rows = LogitRows(span, position + rank, drafts[:, None], span, rank)
    tokens = state.sample(both.view(-1, 5), rows, mode).tokens.view(-1, 2)
    assert torch.equal(tokens[:, 0], plain.tokens)
    kept = drafts == plain.tokens
    assert torch.equal(tokens[kept, 1], after[kept])
    first = processed_probs(FIRST, [], **how)
    check_distribution(plain.tokens, first)
    joint = [p * q for a, p in enumerate(first) for q in processed_probs(SECOND[a], [a], **how)]
    check_distribution(plain.tokens * 5 + after, joint)
    filters = {k: v for k, v in how.items() if k in ("temperature", "top_k", "top_p", "min_p")}
    share = agreement(first, distribution(draft, **filters))
    if drafter == "equal" and not mode.processed:
        assert kept.all()
    else:
        assert stats.binomtest(int(kept.sum()), DRAWS, min(share, 1.0)).pvalue > 0.001
