"""The scheduler against a simulated device of a few dictionaries: no torch, no model."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strobe.engine import scheduler
from strobe.engine.running_request import RunningRequest
from strobe.kv.pages import max_held
from strobe.request import Request, SchedulingOptions, Status, TokenLogprob
from strobe.speculation.draft_policy import BatchLoad, DraftPolicy
from strobe.step import TAIL, Plan, Span, StepResult, TokenEvent
from tests.support.bookkeeping_checks import check_scheduler
from tests.support.simulated_device import STOP, Policy, World, running, sequence, truth

ROOT = Path(__file__).parents[2]


Fault = Callable[[Span], bool]
FAULTS: dict[str, Callable[[int], Fault]] = {
    "always": lambda position: lambda span: True,
    "drafts": lambda position: lambda span: span.num_drafts > 0,
    "decoding": lambda position: lambda span: span.start > position,
    "a position": lambda position: lambda span: span.start <= position < span.start + span.num_rows,
}


def test_bookkeeping_modules_load_no_torch():
    names = [
        "request",
        "step",
        "config",
        "kv.pages",
        "kv.lease",
        "kv.host_tier",
        "engine.result_processor",
        "engine.scheduler",
        "speculation.draft_policy",
        "speculation.ngram",
    ]
    code = "import sys\n" + "".join(f"import strobe.{name}\n" for name in names)
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_requests_are_admitted_first_come_first_served():
    world = World(max_num_seqs=2)
    first, second, third = world.add(5), world.add(30), world.add(1)
    plan = world.launch()
    assert world.requests_of(plan) == [first, second]
    assert third.status is Status.WAITING
    world.collect()
    world.drain()
    world.check_answers()


def test_small_request_does_not_overtake_large_one():
    world = World(pages=10, max_num_seqs=4)
    world.add(20)
    large, small = world.add([2] * 30), world.add(1)
    world.step()
    assert large.status is Status.WAITING
    assert small.status is Status.WAITING
    world.drain()
    world.check_answers()


def test_prompt_chunks_run_with_decodes_within_budget():
    world = World(max_num_seqs=2, budget=12, num_drafts=3)
    short, long = world.add(2, max_tokens=30), world.add(30)
    spans = [step_spans(world) for _ in range(4)]
    assert spans[0] == [(short, 2, 0, 1), (long, 10, 0, 0)]
    assert spans[1] == [(short, 1, 3, 4), (long, 8, 0, 0)]
    assert spans[2] == [(short, 1, 3, 4), (long, 8, 0, 0)]
    assert spans[3] == [(short, 1, 3, 4), (long, 4, 0, 1)]
    world.drain()
    world.check_answers()


def step_spans(world: World) -> list[tuple[Request, int, int, int]]:
    spans = world.spans(world.launch())
    world.collect()
    return [(request, s.num_context_rows, s.num_drafts, s.num_logits) for request, s in spans]


def test_only_last_chunk_has_logits():
    world = World(max_num_seqs=1, budget=4, num_drafts=3)
    world.add(9)
    rows = [step_spans(world)[0][1:] for _ in range(3)]
    assert rows == [(4, 0, 0), (4, 0, 0), (1, 0, 1)]


def test_drafting_requests_reserve_the_whole_block():
    world = World(page_size=1, num_drafts=3, policy=Policy(lambda c: min(c.max_drafts, 1)))
    drafting, plain = world.add(2), world.add(2, num_drafts=0)
    world.step()
    world.launch()
    open_positions = {r.request: r.lease.open for r in world.scheduler.running}
    assert open_positions == {drafting: 4, plain: 1}
    world.collect()


def test_longer_drafter_block_is_reserved_completely():
    world = World(page_size=1, num_drafts=2, block=8)
    world.add(2)
    world.step()
    plan = world.launch()
    assert plan.spans[0].num_drafts == 2
    assert world.scheduler.running[0].lease.open == 8
    world.drain()
    world.check_answers()


def test_verified_drafts_respect_request_and_policy():
    policy = Policy(lambda c: max(c.max_drafts - 1, 0))
    world = World(num_drafts=3, policy=policy)
    world.add(2), world.add(2, num_drafts=2), world.add(2, num_drafts=0)
    world.step()
    assert [row[2:] for row in step_spans(world)] == [(2, 3), (1, 2), (0, 1)]
    ((candidates, load),) = policy.seen
    assert [(c.request.id, c.max_drafts) for c in candidates] == [
        ("r0", 3),
        ("r1", 2),
        ("r2", 0),
    ]
    assert load == BatchLoad(prompt_rows=0, context_tokens=6)


def test_newest_request_is_preempted_and_resumes():
    world = World(pages=10, max_num_seqs=2, prefix_caching=False)
    old, new = world.add(10, max_tokens=25), world.add(10, max_tokens=25)
    while not new.num_preemptions:
        world.step()
        assert not old.num_preemptions
    assert new.status is Status.WAITING
    assert running(world) == [old]
    output = list(new.output_ids)
    assert output
    assert world.scheduler.stats.preemptions == 1
    world.drain()
    assert new.output_ids[: len(output)] == output
    world.check_answers()


def test_priorities_order_requests():
    world = World(max_num_seqs=1)
    world.add(4, max_tokens=2)
    world.step()
    priorities = [SchedulingOptions(priority) for priority in (1, -1, 0, 1)]
    late, soon, equal, last = [
        world.add(4, max_tokens=2, scheduling=options) for options in priorities
    ]
    assert list(world.scheduler.waiting) == [soon, equal, late, last]
    world.drain()
    world.check_answers()


def test_lowest_priority_is_preempted_and_requeued_first():
    world = World(pages=10, max_num_seqs=3, prefix_caching=False)
    usual, urgent = (
        world.add(10, max_tokens=25),
        world.add(10, max_tokens=25, scheduling=SchedulingOptions(-1)),
    )
    waits = world.add(10, max_tokens=25)
    while not usual.num_preemptions:
        world.step()
        assert not urgent.num_preemptions
    assert running(world) == [urgent]
    assert list(world.scheduler.waiting) == [usual, waits]
    world.drain()
    world.check_answers()


def test_prefix_is_shared_only_within_a_salt():
    world = World(page_size=4)
    for salt in ("", "a", "a", "b", ""):
        world.add(9, scheduling=SchedulingOptions(cache_salt=salt))
        world.drain()
    assert [request.num_cached for request in world.requests] == [0, 0, 8, 0, 8]
    world.check_answers()


def test_preempted_request_precedes_new_ones():
    world = World(pages=10, max_num_seqs=2)
    world.add(10, max_tokens=25)
    new, late = world.add(10, max_tokens=25), world.add(10, max_tokens=3)
    while not new.num_preemptions:
        world.step()
    assert list(world.scheduler.waiting) == [new, late]
    world.drain()
    world.check_answers()


def test_no_request_is_admitted_when_reservation_fails():
    world = World(pages=12, max_num_seqs=4, prefix_caching=False)
    for _ in range(3):
        world.add(8, max_tokens=25)
    while not world.scheduler.stats.preemptions:
        before = world.scheduler.stats.preemptions
        world.add(1, max_tokens=2)
        plan = world.launch()
        if world.scheduler.stats.preemptions > before:
            assert not plan.admitted
        world.collect()
    world.drain()
    world.check_answers()


def test_admission_leaves_room_for_prompt_and_block():
    world = World(pages=10, page_size=4, max_num_seqs=2, num_drafts=3, prefix_caching=False)
    world.add(16)
    world.step()
    refused = world.add(19)
    world.step()
    assert refused.status is Status.WAITING
    world.drain()
    world.check_answers()


def test_longest_request_fits_the_smallest_pool():
    world = World(pages=10, page_size=4, max_model_len=40, max_num_seqs=2)
    first = world.add(39, max_tokens=None)
    second = world.add(20, max_tokens=None)
    world.drain()
    assert first.finish_reason == second.finish_reason == "length"
    assert len(first.tokens) == len(second.tokens) == 40
    world.check_answers()


def test_late_result_of_stopped_request_is_dropped():
    world = World(depth=2, num_drafts=3)
    request = world.add(4, max_tokens=4)
    world.launch()
    world.launch()
    world.collect()
    world.launch()
    events = world.collect()
    assert events[0].finish_reason == "length"
    assert request.num_output == 4
    assert world.in_flight, "a step is still in flight"
    assert world.pool.available < world.pool.capacity
    assert len(world.scheduler.running) == 0
    assert world.scheduler.has_work
    assert world.launch().spans == ()
    assert world.collect() == []
    assert request.num_output == 4
    assert world.pool.available == world.pool.capacity
    assert not world.scheduler.has_work


def test_slot_in_flight_is_not_reused():
    world = World(depth=2, max_num_seqs=1)
    first, second = world.add(4, max_tokens=1), world.add(4)
    world.launch()
    world.launch()
    world.collect()
    assert first.status is Status.FINISHED
    assert world.launch().spans == ()
    world.collect()
    assert world.requests_of(world.launch()) == [second]
    world.drain()
    world.check_answers()


def test_preempted_request_in_flight_keeps_pages_until_collected():
    world = World(pages=10, max_num_seqs=2, depth=2, prefix_caching=False)
    world.add(10, max_tokens=25)
    new = world.add(10, max_tokens=25)
    while not new.num_preemptions:
        output = list(new.output_ids)
        world.step()
    assert new.output_ids == output
    world.drain()
    assert new.num_preemptions
    world.check_answers()


def test_others_wait_for_pages_of_preempted_request_in_flight():
    """Its pages return soon: preempting one more request would waste work."""
    world = World(pages=12, page_size=2, max_model_len=24, max_num_seqs=4, depth=2, num_drafts=1)
    for _ in range(4):
        world.add(4, max_tokens=20)
    waited = 0
    while world.scheduler.has_work or world.in_flight:
        before = world.scheduler.stats.preemptions
        plan = world.launch()
        lost = world.scheduler.stats.preemptions - before
        assert lost <= 1
        waited += bool(lost) and len(plan.spans) < len(world.scheduler.running)
        if world.in_flight and (not plan.spans or len(world.in_flight) == 2):
            world.collect()
    assert world.scheduler.stats.preemptions
    assert waited, "no request ever had to wait"
    world.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
def test_finish_ends_waiting_running_and_flying_requests_once(depth: int):
    world = World(max_num_seqs=2, depth=depth)
    flying, going, waiting = world.add(4), world.add(4), world.add(4)
    world.launch()
    for request in (flying, waiting):
        world.scheduler.finish(request, "abort")
        assert request.status is Status.FINISHED
        assert request.finish_reason == "abort"
    (event,) = world.collect()
    assert event._replace(start=None) == TokenEvent(going.key, 0, [truth(going, 4)], logprobs=[])
    assert flying.output_ids == []
    world.step()
    world.scheduler.finish(going, "stop")
    world.scheduler.finish(going, "abort")
    assert going.finish_reason == "stop"
    world.drain()
    assert going.finish_reason == "stop"


def test_finish_of_preempted_request_in_flight_releases_once():
    world = World(pages=10, max_num_seqs=2, depth=2)
    world.add(10, max_tokens=25)
    new = world.add(10, max_tokens=25)
    while not new.num_preemptions:
        world.step()
    world.scheduler.finish(new, "abort")
    assert new not in world.scheduler.waiting
    world.drain()
    world.check_answers()


def test_max_tokens_truncates_accepted_drafts():
    world = World(num_drafts=3)
    request = world.add(4, max_tokens=3)
    world.step()
    (event,) = world.step()
    assert event.tokens == [truth(request, 5), truth(request, 6)]
    assert event.finish_reason == "length"
    world.check_answers()


def test_context_end_finishes_answer_without_max_tokens():
    world = World(max_model_len=11, num_drafts=3)
    request = world.add(4, max_tokens=None)
    world.drain()
    assert len(request.tokens) == 11
    assert request.finish_reason == "length"
    world.check_answers()


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_repetition_ends_answer_at_the_same_token_with_any_drafts(num_drafts: int, min_tokens: int):
    world = World(num_drafts=num_drafts, max_model_len=60, pages=80)
    detection = {"max_pattern_size": 3, "min_count": 2}
    limits = {"max_tokens": 40, "min_tokens": min_tokens}
    requests = [world.add(4, repetition_detection=detection, **limits) for _ in range(8)]
    world.drain()
    assert {r.finish_reason for r in requests} == {"repetition"}
    assert len({r.num_output for r in requests}) > 1
    world.check_answers()


def test_end_token_precedes_a_repetition():
    world = World(num_drafts=3, max_model_len=60, pages=80)
    detection = {"max_pattern_size": 3, "min_count": 2}
    limits = {"max_tokens": 40, "stop_token_ids": [STOP]}
    requests = [
        world.add(4, stop=True, repetition_detection=detection, **limits) for _ in range(12)
    ]
    world.drain()
    assert {r.finish_reason: r.stop_reason for r in requests} == {"stop": STOP, "repetition": None}
    world.check_answers()


def stop_positions(request: Request, limit: int) -> list[int]:
    return [p for p in range(request.num_prompt, limit) if truth(request, p) == STOP]


def test_stop_id_ends_answer_inside_accepted_drafts():
    world = World(num_drafts=3, max_model_len=40)
    requests = [world.add(4, max_tokens=30, stop=True) for _ in range(6)]
    world.drain()
    assert {r.finish_reason for r in requests} == {"stop"}
    for request in requests:
        assert request.num_output == stop_positions(request, 40)[0] - 3
        assert request.output_ids[-1] == STOP
    world.check_answers()


def test_stop_ids_do_not_count_within_min_tokens():
    world = World(num_drafts=3, max_model_len=40)
    early = world.add(4, max_tokens=30, stop=True)
    first = stop_positions(early, 40)[0] - 3
    for min_tokens in (first - 1, first, first + 1):
        request = world.add(4, max_tokens=30, stop=True, min_tokens=min_tokens)
        request.seed = early.seed
    world.drain()
    lengths = [request.num_output for request in world.requests[1:]]
    assert lengths[0] == first
    assert lengths[1] == lengths[2] > first
    world.check_answers()


def test_stop_reason_names_only_requested_ids():
    world = World()
    requested = world.add(4, max_tokens=30, stop=True, stop_token_ids=[STOP])
    own = world.add(4, max_tokens=30, stop=True)
    world.drain()
    assert (requested.finish_reason, requested.stop_reason) == ("stop", STOP)
    assert (own.finish_reason, own.stop_reason) == ("stop", None)


def test_host_proposer_waits_for_result():
    world = World(depth=2, num_drafts=3)
    host = world.add(4, method="ngram", max_tokens=12)
    free = world.add(4, max_tokens=12)
    world.step()
    assert world.requests_of(world.launch()) == [free]
    world.collect()
    assert world.requests_of(world.launch()) == [host, free]
    world.drain()
    world.check_answers()


def test_grammar_request_is_planned_like_others():
    """The engine waits for the grammar's tokens itself."""
    world = World(depth=2, num_drafts=3, max_num_seqs=2, budget=12)
    follows = world.add(14, max_tokens=12, structured_outputs={"regex": "a*"})
    free = world.add(2, max_tokens=20)
    planned = []
    for _ in range(3):
        planned.append([(r, s.num_rows, s.num_logits) for r, s in world.spans(world.launch())])
        if len(world.in_flight) == 2:
            world.collect()
    assert planned == [
        [(follows, 12, 0)],
        [(follows, 2, 1), (free, 2, 1)],
        [(follows, 4, 4), (free, 4, 4)],
    ]
    world.drain()
    world.check_answers()


def scored(world: World) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (start, context rows, scored tokens) of the next step's spans."""
    plan = world.launch()
    world.collect()
    return [(s.start, s.num_context_rows, s.scored_tokens) for s in plan.spans]


def test_all_prompt_rows_but_the_last_are_scored():
    world = World(max_num_seqs=1, budget=4, num_drafts=3)
    world.add([1, 2, 3, 4, 5, 6, 0, 1, 2], prompt_logprobs=0)
    assert [scored(world) for _ in range(4)] == [
        [(0, 4, (2, 3, 4, 5))],
        [(4, 4, (6, 0, 1, 2))],
        [(8, 1, ())],
        [(9, 1, ())],
    ]
    world.drain()
    world.add([1, 2, 3, 4, 5, 6, 0, 1], prompt_logprobs=0)
    assert [scored(world) for _ in range(3)] == [
        [(0, 4, (2, 3, 4, 5))],
        [(4, 4, (6, 0, 1))],
        [(8, 1, ())],
    ]
    world.drain()
    world.check_answers()


def test_one_token_prompt_has_no_scores():
    world = World()
    request = world.add(1, prompt_logprobs=2)
    assert scored(world) == [(0, 1, ())]
    world.drain()
    assert request.prompt_logprobs == [None]
    world.check_answers()


def test_first_sibling_scores_the_prompt_and_others_use_cache():
    world = World(page_size=4, max_num_seqs=1)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    world.add(prompt)
    world.drain()
    requests = [world.add(prompt, sibling=i, prompt_logprobs=0, max_tokens=2) for i in range(2)]
    world.drain()
    assert [request.num_cached for request in requests] == [0, 8]
    assert [len(request.prompt_logprobs) for request in requests] == [9, 0]
    world.check_answers()


def test_zero_max_tokens_finishes_after_the_prompt():
    world = World(num_drafts=3, max_num_seqs=1, budget=4)
    request = world.add(9, max_tokens=0, prompt_logprobs=1)
    assert [world.step(), world.step()] == [[], []]
    (event,) = world.step()
    assert (event.tokens, event.finish_reason, event.num_verified) == ([], "length", 0)
    assert len(request.prompt_logprobs) == 9
    assert not world.scheduler.has_work
    assert world.scheduler.stats.generation_tokens == 0


def test_failed_request_ends_without_last_step_tokens():
    world = World(num_drafts=3)
    failed, other = world.add(4), world.add(4)
    world.step()
    world.launch()
    plan, result = world.in_flight.popleft()
    world.in_flight.append((plan, result._replace(errors={0: "Something is wrong."})))
    ended, going = world.collect()
    assert (ended.key, ended.tokens, ended.finish_reason) == (failed.key, [], "error")
    assert ended.error == failed.error == "Something is wrong."
    assert (len(going.tokens), going.error) == (4, None)
    assert failed.num_output == 1
    world.drain()
    assert other.finish_reason == "length"


def test_events_count_verified_and_accepted_drafts():
    world = World(num_drafts=3, accept=lambda drafts: min(drafts, 2), max_model_len=40)
    request = world.add(5, max_tokens=6)
    reported = [world.step()[0] for _ in range(3)]
    assert [
        (e.num_verified, e.num_accepted, e.num_computed_tokens, len(e.tokens)) for e in reported
    ] == [
        (0, 0, 0, 1),
        (3, 2, 5, 3),
        (3, 2, 8, 2),
    ]
    assert request.draft_counts.num_accepted == 4


def test_accepted_never_exceeds_counted_tokens():
    world = World(num_drafts=5, max_model_len=40, budget=64)
    world.add(5, max_tokens=3)
    world.step()
    (event,) = world.step()
    assert (event.num_verified, event.num_accepted, len(event.tokens)) == (5, 2, 2)


class ObservingPolicy(DraftPolicy):
    """Records the verified and accepted drafts that it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def observe(self, plan: Plan, result: StepResult) -> None:
        drafted = result.num_verified or [span.num_drafts for span in plan.spans]
        pairs = zip(plan.spans, zip(drafted, result.num_accepted, strict=True), strict=True)
        self.seen += [pair for span, pair in pairs if span.method is not None]


def test_policy_ignores_drafts_after_answer_end():
    world = World(depth=2, num_drafts=5, max_model_len=60, budget=64)
    world.scheduler.draft_policy = policy = ObservingPolicy()
    request = world.add(5, max_tokens=9)
    for _ in range(2):
        world.launch()
    while request.finish_reason is None:
        world.collect()
        world.launch()
    world.collect()
    assert policy.seen == [(5, 5), (2, 2), (0, 0)]  # all, up to the end, and a step after the end


@pytest.mark.parametrize(("end", "counts"), [(1, (1, 1)), (3, (3, 3)), (4, (5, 3))])
def test_drafts_after_answer_end_are_not_verified(end: int, counts: tuple[int, int]):
    spans = [Span(i, 4, 4, (TAIL,), 5, "dflash", 6) for i in range(2)]
    result = StepResult([[1, 2, 3, 4], [1]], [3, 0]).truncate({0: end}, spans)
    assert result.num_verified == [counts[0], 5]
    assert result.num_accepted == [counts[1], 0]


def test_logprobs_are_cut_with_tokens():
    world = World(num_drafts=3)
    request = world.add(4, max_tokens=3, logprobs=0)
    world.step()
    plan = world.plan()
    result = world.device.run(plan, world.accept)
    logprobs = [TokenLogprob(token, -1.0, 1) for token in result.tokens[0]]
    assert len(logprobs) == 4
    (event,) = world.scheduler.commit(plan, result._replace(logprobs={0: logprobs}))
    assert event.logprobs == logprobs[:2]
    assert [entry.token for entry in event.logprobs] == event.tokens == request.output_ids[1:]


def test_prefix_hit_starts_after_cached_pages():
    world = World(page_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    world.add(prompt)
    world.drain()
    world.add(prompt)
    plan = world.launch()
    assert (plan.spans[0].start, plan.spans[0].tokens) == (8, (2,))
    world.collect()
    world.drain()
    world.check_answers()


def test_prompts_run_in_full_without_prefix_caching():
    world = World(prefix_caching=False)
    for _ in range(2):
        world.add([1, 2, 3, 4, 5, 6, 0, 1, 2])
        plan = world.launch()
        assert plan.spans[0].start == 0
        world.collect()
        world.drain()


def test_statistics_count_steps_tokens_and_accepted_positions():
    world = World(num_drafts=3, accept=lambda drafts: min(drafts, 2))
    world.add(4, max_tokens=7)
    world.drain()
    stats = world.scheduler.stats
    assert (stats.steps, stats.prompt_tokens, stats.generation_tokens) == (3, 4, 7)
    for counts in (stats.draft_counts, world.requests[0].draft_counts):
        assert (counts.steps, counts.num_verified, counts.num_accepted) == (2, 6, 4)
        assert counts.accepted_per_position == [2, 2, 0]
        assert counts.acceptance_length == 3.0


class Scheduling(RuleBasedStateMachine):
    """Random traffic with one or two steps in flight, a pool often too small, and failing steps."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        pages=st.integers(8, 20),
        page_size=st.sampled_from([1, 2, 3, 4]),
        num_drafts=st.sampled_from([0, 1, 3, 5]),
        block=st.sampled_from([0, 8]),
        seqs=st.integers(1, 4),
        spare=st.integers(0, 20),
        prefix_caching=st.booleans(),
        mixed=st.sampled_from([None, 2, 6]),
        seed=st.integers(0, 10**6),
        length=st.integers(8, 24),
        windows=st.sampled_from([(), (), (1,), (3,), (4, 9), (6, 2)]),
        window_pages=st.integers(0, 9),
        host=st.sampled_from([0, 0, 2, 50]),
        pages_per_step=st.integers(1, 3),
    )
    def build(
        self,
        depth: int,
        pages: int,
        page_size: int,
        num_drafts: int,
        block: int,
        seqs: int,
        spare: int,
        prefix_caching: bool,
        mixed: int | None,
        seed: int,
        length: int,
        windows: tuple[int, ...],
        window_pages: int,
        host: int,
        pages_per_step: int,
    ):
        self.rng = random.Random(seed)
        budget = seqs * (num_drafts + 1) + spare
        rows = depth * max(budget, block)
        held = [max_held(window, rows, page_size) for window in windows]
        one = -(-length // page_size)
        self.world = World(
            pages=max(pages, -(-length // page_size)),
            page_size=page_size,
            max_model_len=length,
            max_num_seqs=seqs,
            budget=budget,
            num_drafts=num_drafts,
            block=block,
            depth=depth,
            prefix_caching=prefix_caching,
            accept=lambda drafts: self.rng.randint(0, drafts),
            policy=Policy(lambda c: self.rng.randint(0, c.max_drafts)),
            mixed=mixed,
            windows=[
                (window, min(one, count) + window_pages)
                for window, count in zip(windows, held, strict=True)
            ],
            host=[host] * (1 + len(windows)) if host and prefix_caching else [],
            pages_per_step=pages_per_step,
        )
        self.faults: dict[Request, Fault] = {}
        self.world.faulty = lambda request, span: (
            request in self.faults and self.faults[request](span)
        )

    @rule(data=st.data())
    def add(self, data: st.DataObject):
        limits = self.world.limits
        size = data.draw(st.integers(1, limits.max_model_len - 1))
        tail = data.draw(st.integers(0, 2))
        max_tokens = data.draw(st.sampled_from([None, 0, 1, 2, 5, 30]))
        self.world.add(
            [1] * (size - min(tail, size - 1)) + [2] * min(tail, size - 1),
            num_drafts=data.draw(st.integers(0, limits.num_drafts)),
            method=data.draw(st.sampled_from(["dflash", "ngram"])),
            stop=data.draw(st.booleans()),
            max_tokens=max_tokens,
            min_tokens=data.draw(st.integers(0, min(4, 4 if max_tokens is None else max_tokens))),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0])),
            structured_outputs=data.draw(st.sampled_from([None, None, {"regex": "a"}])),
        )

    @rule(data=st.data(), count=st.integers(2, 4))
    def add_equal(self, data: st.DataObject, count: int):
        limits = self.world.limits
        size = data.draw(st.integers(1, limits.max_model_len - 1))
        prompt = [data.draw(st.integers(1, 3))] * size
        for i in range(count):
            self.world.add(list(prompt), sibling=i, num_drafts=limits.num_drafts, max_tokens=4)

    @rule(times=st.integers(1, 4))
    def step(self, times: int):
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject):
        request = data.draw(st.sampled_from(self.world.requests))
        self.world.scheduler.finish(request, "abort")
        assert request.status is Status.FINISHED
        self.world.check()

    @rule(done=st.integers(0, 2), finish=st.booleans())
    def fail_step(self, done: int, finish: bool):
        plan = self.world.plan()
        requests = self.world.requests_of(plan)
        if finish and plan.spans:
            self.world.scheduler.finish(requests[0], "abort")
        self.world.cancel(plan, done)
        assert all(request.status is not Status.RUNNING for request in requests)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), kind=st.sampled_from(sorted(FAULTS)), position=st.integers(0, 20))
    def make_request_faulty(self, data: st.DataObject, kind: str, position: int):
        request = data.draw(st.sampled_from(self.world.requests))
        self.faults[request] = FAULTS[kind](position)

    @invariant()
    def outputs_are_correct(self):
        if hasattr(self, "world"):
            for request in self.world.requests:
                assert request.tokens == sequence(request, len(request.tokens))

    @invariant()
    def running_requests_came_before_waiting_ones(self):
        """Except when equal prompts wait for each other, or requests of a failed step run alone."""
        if hasattr(self, "world"):
            world = self.world
            if world.failures or world.scheduler.prefix_caching:
                return
            numbers = {request: i for i, request in enumerate(world.requests)}
            order = [numbers[r] for r in running(world) + list(world.scheduler.waiting)]
            assert order == sorted(order)

    @invariant()
    def only_requests_that_fail_alone_end_with_an_error(self):
        if hasattr(self, "world"):
            for request in self.world.requests:
                if request.finish_reason == "error":
                    assert self.world.failed_alone[request] >= 3
                    assert "The cause." in (request.error or "")

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_answers()
            for request in self.world.requests:
                assert request.finish_reason != "error" or self.world.failed_alone[request] >= 3


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def rows_of(plan: Plan) -> list[int]:
    return [span.num_rows for span in plan.spans]


def test_prompts_are_chunked_smaller_with_decodes():
    world = World(mixed=12, max_model_len=60, pages=80, prefix_caching=False)
    world.add(6, max_tokens=40)
    assert rows_of(world.launch()) == [6]
    world.collect()
    world.add(40)
    assert rows_of(world.launch()) == [4, 8]  # 12 rows in all
    world.collect()
    world.scheduler.finish(world.requests[0], "abort")
    assert rows_of(world.launch()) == [32]  # no request decodes: the whole rest in one step


def test_prompts_get_half_of_the_rows_when_decodes_need_more():
    world = World(mixed=8, max_model_len=60, budget=64, pages=80, max_num_seqs=4)
    for _ in range(3):
        world.add(4, max_tokens=40)
    assert rows_of(world.launch()) == [4, 4, 4]
    world.collect()
    world.add(40)
    assert rows_of(world.launch()) == [4, 4, 4, 4]


def test_skipped_requests_are_not_stalled_by_a_prompt():
    """With one of their results in flight, host methods draft only in every other plan."""
    world = World(mixed=12, max_model_len=60, budget=64, pages=80, depth=2)
    world.add(6, method="ngram", max_tokens=40)
    world.launch()
    world.collect()
    (span,) = world.launch().spans
    assert span.num_logits == span.num_rows <= 4
    world.add(40)
    assert rows_of(world.launch()) == [12]


def many(**options: int) -> World:
    """A world with room for long prompts."""
    large = {"pages": 700, "page_size": 16, "max_model_len": 1100, "budget": 2048}
    return World(**(large | options))


LONG = [position * 37 % 1009 for position in range(1000)]


def test_repeated_prompt_finds_full_pages_after_one_token_answer():
    world = many()
    for _ in range(4):
        world.add(list(LONG), max_tokens=1)
        world.drain()
    assert [request.num_cached for request in world.requests] == [0, 992, 992, 992]
    assert world.scheduler.stats.prefix_hits == 3 * 992
    world.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [2048, 1000, 300])
def test_equal_prompts_admitted_together_are_computed_once(depth: int, budget: int):
    world = many(depth=depth, budget=budget, max_num_seqs=8)
    for i in range(8):
        world.add(list(LONG), max_tokens=1, sibling=i)
    world.drain()
    assert world.device.prompt_rows == 1000 + 7 * 8
    assert [request.num_cached for request in world.requests] == [0] + [992] * 7
    world.check_answers()


@pytest.mark.parametrize("why", ["no prefix caching", "scores of the prompt"])
def test_request_without_shared_prefix_does_not_wait(why: str):
    world = World(prefix_caching=why != "no prefix caching")
    scores = 1 if why == "scores of the prompt" else None
    requests = [world.add(12, prompt_logprobs=scores) for _ in range(3)]
    assert world.requests_of(world.launch()) == requests
    world.collect()
    world.drain()
    world.check_answers()


@pytest.mark.parametrize(
    ("cached", "shared", "waits"),
    [
        (0, 40, True),
        (0, 20, True),
        (0, 16, False),
        (8, 24, True),
        (8, 20, False),
        (20, 20, False),
        (36, 36, False),
    ],
)
def test_prompt_waits_while_half_its_prefix_is_computed(cached: int, shared: int, waits: bool):
    """Pages of 4, a prompt of 40 tokens: `cached` are cached, `shared` are also the leader's."""
    world = World(page_size=4, max_model_len=60, pages=80, budget=100)
    prompt = [(i * 5 + 1) % 7 for i in range(40)]
    if cached:
        world.add([*prompt[:cached], 9])
        world.drain()
    leader = world.add([*prompt[:shared], *[9] * (41 - shared)])
    follower, other = world.add(prompt), world.add([8] * 10)
    first = [leader, other] if waits else [leader, follower, other]
    assert world.requests_of(world.launch()) == first
    world.collect()
    assert follower in world.requests_of(world.launch())
    assert follower.num_cached == (min(shared, 36) if waits else cached)
    world.collect()
    world.drain()
    world.check_answers()


@pytest.mark.parametrize("reason", ["abort", "preemption", "failure"])
@pytest.mark.parametrize("depth", [1, 2])
def test_follower_continues_when_leader_leaves(reason: str, depth: int):
    """It starts from the pages that are ready, and only when it has to."""
    world = World(page_size=4, budget=8, num_drafts=0, depth=depth)
    leader, second, third = (world.add([1] * 30, sibling=i) for i in range(3))
    assert world.requests_of(world.launch()) == [leader]
    assert world.requests_of(world.launch()) == [leader]
    world.collect()
    world.collect()
    if reason == "abort":
        world.scheduler.finish(leader, "abort")
    elif reason == "failure":
        world.cancel(world.plan())
        world.scheduler.finish(leader, "abort")
    else:
        world.scheduler._requeue(world.scheduler.running[0])
    plan = world.launch()
    (continuing,) = world.requests_of(plan)
    assert continuing is (leader if reason == "preemption" else second)
    assert plan.spans[0].start == 16
    world.collect()
    world.drain()
    assert third.num_cached == 28
    assert reason != "abort" or world.device.prompt_rows == 16 + 14 + 2
    world.check_answers()


def test_preempted_leader_does_not_block_followers():
    world = World(pages=12, page_size=4, budget=8, max_num_seqs=3, num_drafts=0)
    world.add([2] * 11, max_tokens=25)
    world.step()
    world.step()
    leader = world.add([1] * 34, max_tokens=3)
    followers = [world.add([1] * 34, max_tokens=3) for _ in range(2)]
    world.drain()
    assert leader.num_preemptions
    assert all(request.finish_reason == "length" for request in followers)
    world.check_answers()


@pytest.mark.parametrize("done", [0, 1, 2])
def test_failed_step_requests_run_alone_for_a_few_steps(done: int):
    """The step fails before it did anything, after its page writes, or at its end."""
    world = World(max_num_seqs=3, page_size=2, pages=80, num_drafts=3)
    requests = [world.add([i] * 6, max_tokens=30) for i in range(3)]
    world.step()
    world.step()
    tokens = [list(request.tokens) for request in requests]
    plan = world.plan()
    assert len(plan.spans) == 3
    assert world.cancel(plan, done) == []
    assert list(world.scheduler.waiting) == requests
    assert {request.status for request in requests} == {Status.WAITING}
    assert [request.tokens for request in requests] == tokens
    reported = []
    for _ in range(13):
        reported.append(world.requests_of(world.launch()))
        world.collect()
    assert reported == [[request] for request in requests for _ in range(4)] + [requests]
    world.drain()
    assert not any(request.num_preemptions for request in requests)
    world.check_answers()


@pytest.mark.parametrize("done", [0, 1, 2])
def test_failed_step_leaves_earlier_step_in_flight(done: int):
    world = World(depth=2, page_size=2, num_drafts=3, accept=lambda drafts: drafts // 2)
    request, other = world.add([1] * 5, max_tokens=20), world.add([2] * 5, max_tokens=20)
    world.launch()
    while request.status is not Status.FINISHED:
        if world.scheduler.waiting or len(world.in_flight) != 1:
            world.step()
            continue
        world.cancel(world.plan(), done)
        assert len(world.in_flight) == 1
        world.collect()
        for _ in range(10):
            world.step()
    world.drain()
    assert world.failures > 1
    assert other.finish_reason == "length"
    world.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["dflash", "ngram"])
def test_occasional_failures_lose_nothing(depth: int, method: str):
    world = World(depth=depth, page_size=2, budget=16, max_num_seqs=3)
    for i in range(6):
        world.add([i % 2] * (5 + i), method=method, max_tokens=20)
    turns = itertools.count(1)
    world.faulty = lambda request, span: next(turns) % 7 == 0
    world.drain()
    assert world.failures > 5
    assert {request.finish_reason for request in world.requests} == {"length"}
    world.check_answers()


@pytest.mark.parametrize("kind", ["always", "drafts", "decoding", "a position"])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_faulty_request_ends_with_error_and_others_continue(
    kind: str, prefix_caching: bool, depth: int
):
    """The fault may appear only some steps after admission."""
    world = World(budget=8, prefix_caching=prefix_caching, depth=depth, pages=60, max_model_len=60)
    first, bad, last = (world.add([i] * 47, max_tokens=10) for i in range(3))
    fault = FAULTS[kind](46)
    world.faulty = lambda request, span: request is bad and fault(span)
    events = world.drain(500)
    assert (first.finish_reason, last.finish_reason) == ("length", "length")
    assert bad.finish_reason == "error"
    assert bad.error == "The step failed 3 times with this request alone: The cause."
    (ended,) = [e for e in events if e.key == bad.key and e.finish_reason is not None]
    assert (ended.tokens, ended.error) == ([], bad.error)
    assert (ended.start is None) == (len(events) > 1 and bad.num_output > 0)
    world.check_answers()


def test_solo_failure_is_retried_three_times():
    world = World()
    bad = world.add(5)
    world.faulty = lambda request, span: True
    assert [len(world.step()) for _ in range(3)] == [0, 0, 1]
    assert (bad.finish_reason, world.failures) == ("error", 3)
    assert not world.scheduler.has_work


def test_cancelling_an_empty_plan_changes_nothing():
    world = World()
    assert world.scheduler.cancel(world.scheduler.plan(), "The cause.") == []
    world.add(5)
    world.drain()
    world.check_answers()


STAGES: dict[str, Callable[[World], tuple[Any, str]]] = {
    "drafts": lambda world: (world.scheduler, "_decode_spans"),
    "prompt spans": lambda world: (world.scheduler, "_prefill_span"),
    "sizes of reservations": lambda world: (world.scheduler, "_positions_to_reserve"),
    "pages": lambda world: (world.pool, "allocate"),
    "a window's pages": lambda world: (world.pool.groups[1], "allocate"),
    "cached pages": lambda world: (world.pool, "share"),
    "keys of pages": lambda world: (world.pool, "extend"),
    "prefix in progress": lambda world: (world.scheduler, "_is_prefix_in_progress"),
    "admission": lambda world: (world.scheduler, "_admit"),
    "queue time": lambda world: (scheduler.time, "monotonic"),
    "new slots": lambda world: (RunningRequest, "admission"),
    "page tables": lambda world: (RunningRequest, "page_writes"),
    "the plan": lambda world: (scheduler, "Plan"),
}
"""Functions that run within `Scheduler.plan`."""


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("depth", [1, 2])
def test_exception_in_plan_undoes_what_it_reserved(
    stage: str, depth: int, monkeypatch: pytest.MonkeyPatch
):
    """Each of the function's first calls in every plan raises once; some run before they raise."""
    windows = [(6, 36)]
    world = World(depth=depth, page_size=2, pages=36, budget=14, max_num_seqs=3, windows=windows)
    for i in range(7):
        prompt = [1] * 14 if i % 2 else [i] * (3 + 3 * i)
        world.add(prompt, max_tokens=12, method=("dflash", "ngram")[i % 2])
    owner, name = STAGES[stage](world)
    call = getattr(owner, name)
    plan = world.scheduler.plan
    failures = 0
    left = 0
    """Calls until the next failure; 0 for none."""

    def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal left, failures
        left -= 1
        if left:
            return call(*arguments, **options)
        failures += 1
        if failures % 2 and owner not in world.pool.groups:  # whose pages nobody would hold then
            call(*arguments, **options)
        raise MemoryError

    def failing_plan() -> Plan:
        nonlocal left
        for count in range(1, 5):
            waiting = set(world.scheduler.waiting)
            reserved = [list(record.lease.reserved) for record in world.scheduler.running]
            left = count
            try:
                return plan()
            except MemoryError:
                check_scheduler(world.scheduler)
                assert waiting <= set(world.scheduler.waiting), "an admitted request is lost"
                records = world.scheduler.running
                assert [list(r.lease.reserved) for r in records] == reserved[: len(records)]
            finally:
                left = 0
        return plan()

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(world.scheduler, "plan", failing_plan)
    world.drain()
    assert failures > 3
    world.check_answers()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_no_request_starves_behind_later_ones(
    seed: int, depth: int, monkeypatch: pytest.MonkeyPatch
):
    """Later requests of a higher priority never end; they share prefixes and outgrow the pool."""
    monkeypatch.setattr("strobe.request.MAX_PASSED", 6)
    noise = random.Random(seed)
    world = World(pages=14, max_num_seqs=3, depth=depth)
    shared = [noise.randrange(7) for _ in range(12)]
    lowest = SchedulingOptions(priority=9)
    world.add(8, max_tokens=12, scheduling=SchedulingOptions(priority=0))
    early = [world.add([*shared, number], max_tokens=12, scheduling=lowest) for number in range(3)]
    for _ in range(400):
        while len(world.scheduler.waiting) < 6:
            prompt = [noise.randrange(7) for _ in range(noise.randint(1, 16))]
            if noise.random() < 0.5:
                prompt = [*shared, *prompt]
            priority = SchedulingOptions(priority=noise.randint(-2, 8))
            world.add(prompt, max_tokens=noise.randint(1, 12), scheduling=priority)
        world.step()
        if all(request.status is Status.FINISHED for request in early):
            break
    assert [request.status for request in early] == [Status.FINISHED] * 3
    assert max(request.num_passed for request in early) <= 6 + world.limits.max_num_seqs
    assert min(request.num_passed for request in early) >= 6


def test_overdue_request_is_preempted_last(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strobe.request.MAX_PASSED", 1)
    world = World(pages=10, max_num_seqs=2, prefix_caching=False)
    urgent = SchedulingOptions(priority=-1)
    first = world.add(10, max_tokens=25, scheduling=urgent)
    late = world.add(10, max_tokens=25, scheduling=SchedulingOptions(priority=1))
    passing = world.add(4, max_tokens=2, scheduling=urgent)
    after = world.add(4, max_tokens=25, scheduling=urgent)
    while late.status is Status.WAITING:
        world.step()
    assert passing.num_passed == 0
    assert late.num_passed == 1
    assert after.status is Status.WAITING
    while late.status is Status.RUNNING:
        world.step()
    assert not late.num_preemptions
    assert first.num_preemptions
    world.drain()
    world.check_answers()
