"""Draft policies: the number of verified drafts changes the speed and no token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import num_rows
from tests.support.scripted_drafting import RandomRows
from tests.support.simulated_device import HostDrafter, Policy, World

LOAD = BatchLoad(prompt_rows=40)


def candidate(max_drafts: int) -> Candidate:
    return Candidate(Request("r", [1], SamplingParams(), seed=0), max_drafts)


def test_default_policy_verifies_all_drafts():
    assert DraftPolicy().plan([candidate(n) for n in (7, 0, 3)], LOAD) == DraftPlan([7, 0, 3])
    assert DraftPolicy().plan([], LOAD) == DraftPlan([])


def traffic(world: World) -> list[tuple[int, ...]]:
    """Return the answers to random requests of each method, of both together and of none."""
    rng = random.Random(5)
    for i in range(12):
        world.add(
            [rng.randint(1, 2)] * rng.randint(1, 20),
            method=rng.choice(["dflash", "ngram", "dflash+ngram"]),
            num_drafts=rng.choice([0, 2, 5, 5]),
            stop=rng.random() < 0.3,
            max_tokens=rng.choice([1, 7, 15, None]),
            prompt_logprobs=rng.choice([None, None, 2]),
        )
        for _ in range(rng.randint(0, 3) if i > 3 else 0):
            world.step()
    world.drain()
    world.check_answers()
    return [tuple(request.output_ids) for request in world.requests]


def world_with(policy: DraftPolicy | None, depth: int) -> World:
    rng = random.Random(3)
    return World(
        pages=40, depth=depth, num_drafts=5, policy=policy, accept=lambda n: rng.randint(0, n)
    )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_random_limits_in_every_step_change_no_token(seed: int, depth: int):
    rng = random.Random(seed)
    policy = Policy(lambda c: rng.randint(0, c.max_drafts))
    assert traffic(world_with(policy, depth)) == traffic(world_with(None, depth))
    seen = {c.max_drafts for candidates, _ in policy.seen for c in candidates}
    assert {0, 2, 5} <= seen <= {*range(6)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_random_draft_counts_change_no_token(seed: int, depth: int):
    world = world_with(RandomRows(str(seed)), depth)
    assert traffic(world) == traffic(world_with(None, depth))
    assert world.scheduler.stats.draft_counts.num_verified > 0


def test_unverified_device_drafts_are_not_counted():
    class Three(DraftPolicy):
        def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
            return DraftPlan([c.max_drafts for c in candidates], 3)

    world = World(num_drafts=5, policy=Three())
    for i in range(2):
        world.add([i] * 4, max_tokens=7)
    world.step()
    plan = world.launch()
    assert plan.num_verified == 3
    assert num_rows(plan.spans, plan.num_verified) == 2 + 3
    world.collect()
    assert world.scheduler.stats.draft_counts.num_verified == 3
    world.drain()
    world.check_answers()


def test_non_drafting_request_does_not_count_as_skipped():
    world = World(num_drafts=3, policy=Policy(lambda c: 0))
    plain, resting = world.add([1] * 4, num_drafts=0), world.add([2] * 4)
    world.drain()
    assert (plain.draft_counts.skipped_steps, plain.draft_counts.rows) == (0, 0)
    assert resting.draft_counts.skipped_steps == resting.draft_counts.rows == 8 - 1


def test_zero_drafts_make_plain_steps():
    world = world_with(Policy(lambda c: 0), 1)
    traffic(world)
    counts = world.scheduler.stats.draft_counts
    assert (counts.steps, counts.num_verified, counts.num_proposed) == (0, 0, 0)
    assert counts.skipped_steps == counts.rows > 40


def test_policy_is_called_once_per_step_with_load():
    policy = Policy(lambda c: c.max_drafts)
    world = World(max_num_seqs=3, budget=12, num_drafts=3, policy=policy)
    first, second = world.add([1] * 3, max_tokens=20), world.add([2] * 25)
    world.add([3] * 5), world.add([4] * 5)
    world.step()
    assert not policy.seen, "no request decodes in the first step"
    plan = world.launch()
    ((candidates, load),) = policy.seen
    assert candidates == [Candidate(first, 3, True, plan.spans[0].slot)]
    assert load == BatchLoad(prompt_rows=25 - 9 + 5, context_tokens=3)
    assert world.requests_of(plan) == [first, second]


class FirstServed(DraftPolicy):
    """Gives 4 drafts to a step's first requests."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        left, max_drafts = 4, list[int]()
        for candidate in candidates:
            max_drafts.append(min(candidate.max_drafts, left))
            left -= max_drafts[-1]
        return DraftPlan(max_drafts)


@pytest.mark.parametrize("method", ["dflash", "ngram"])
def test_policy_can_divide_rows_among_requests(method: str):
    world = World(num_drafts=3, policy=FirstServed())
    for i in range(3):
        world.add([i] * 4, method=method, max_tokens=12)
    world.step()
    plan = world.launch()
    if method == "dflash":
        assert [span.num_drafts for span in plan.spans] == [3, 1, 0]
    else:
        proposed = [len(HostDrafter().propose(r, 3).tokens) for r in world.requests]
        limits = FirstServed().plan([candidate(n) for n in proposed], LOAD).max_drafts
        assert [span.num_drafts for span in plan.spans] == limits
        assert 0 < sum(limits) < sum(proposed)
    world.collect()
    world.drain()
    world.check_answers()
