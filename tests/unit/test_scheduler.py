"""The scheduler against a device that is a few dictionaries: no torch, no model.

The device does what the real one does with a plan: it keeps lengths and page tables by slot,
writes what it runs through the table, and reads everything before it. Each written place holds the
whole prefix it stands for, so that a page lost, shared or overwritten is noticed at the next read.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strobe.config import Limits
from strobe.engine.scheduler import Scheduler
from strobe.kv.pages import PagePool
from strobe.request import Request, Status, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.step import HostVerdict, Plan, TokenEvent

ROOT = Path(__file__).parents[2]
STOP = 5
TOKENS = 7


def truth(request: Request, position: int) -> int:
    """The token the target alone puts at a position of this request's sequence."""
    value = (request.seed * 1_000_003 + position * 7919 + 12345) & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return (value ^ (value >> 12)) % TOKENS


def sequence(request: Request, length: int) -> list[int]:
    """The first tokens of prompt and true answer."""
    prompt = request.tokens[: request.num_prompt]
    return (prompt + [truth(request, p) for p in range(request.num_prompt, length)])[:length]


def score_of(request: Request, position: int) -> TokenLogprob:
    """What the target gives the token at a position of the prompt."""
    return TokenLogprob(request.tokens[position], -float(position), position)


def answer(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """What the request must say in the end, and why it stops, by the stop rules alone."""
    made: list[int] = []
    if request.sampling.max_tokens == 0:
        return made, "length"
    for position in range(request.num_prompt, max_model_len):
        made.append(truth(request, position))
        least = 0 if request.structured is not None else request.sampling.min_tokens
        if made[-1] in request.stop_ids and len(made) > least:
            return made, "stop"
        if len(made) == request.sampling.max_tokens:
            break
    return made, "length"


class Device:
    """Runs plans at once; what it decided is learnt by the scheduler when `collect` is called."""

    def __init__(self, limits: Limits, pool: PagePool, host_methods: frozenset[str] = frozenset()):
        self.limits, self.pool, self.host_methods = limits, pool, host_methods
        self.length: dict[int, int] = {}
        self.owner: dict[int, Request] = {}
        self.table: dict[int, dict[int, int]] = {}
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}

    def apply(self, plan: Plan) -> None:
        for slot, request, length in plan.admitted:
            self.length[slot], self.owner[slot] = length, request
            self.table[slot] = {}
        for slot, first, pages in plan.pages:
            for column, page in enumerate(pages, start=first):
                self.table[slot][column] = page

    def place(self, slot: int, position: int) -> tuple[int, int] | None:
        size = self.limits.page_size
        if position >= self.limits.max_pages * size:
            return None
        return self.table[slot][position // size], position % size

    def run(self, plan: Plan, accept: Callable[[int], int]) -> HostVerdict:
        """accept(drafts) -> how many of so many drafts the target keeps."""
        self.apply(plan)
        tokens, accepted = [], []
        scores: dict[int, list[TokenLogprob]] = {}
        for i, span in enumerate(plan.spans):
            request, slot = span.request, span.slot
            assert self.owner[slot] is request, "a slot serves a request it was not given to"
            start = self.length[slot]
            known = sequence(request, start + span.num_tokens + span.drafts + 1)
            if span.tokens is None:
                assert span.start <= start <= span.bound
                assert span.rows == 1 + span.drafts
                if request.method in self.host_methods or request.needs_host_tokens:
                    assert len(request.tokens) == start + 1, "the host's tokens are late"
            else:
                assert span.start == span.bound == start
                assert list(span.tokens) == request.tokens[start : start + len(span.tokens)]
                assert not span.drafts
                ends = start + len(span.tokens) == len(request.tokens)
                assert span.rows == (1 if ends else 0)
            if span.scored:
                scores[i] = [score_of(request, p + 1) for p in range(start, start + span.scored)]
            assert span.scored == self._to_score(request, start, span.num_tokens)
            room = max(0, self.limits.max_model_len - 1 - start)
            offered = min(span.drafts, room)
            kept = accept(offered)
            if span.drafts and request.method not in self.host_methods:
                self._write(slot, start, 0, self.limits.block, known)  # the drafter's scratch
            self._write(slot, start, span.num_tokens + kept, span.drafts - kept, known)
            self._read(slot, start, known)
            self.length[slot] = start + span.num_tokens + kept
            first = start + span.num_tokens
            made = [truth(request, p) for p in range(first, first + kept + 1)] if span.rows else [0]
            tokens.append(made)
            accepted.append(kept)
        return HostVerdict(tokens, accepted, {}, scores)

    def _to_score(self, request: Request, start: int, count: int) -> int:
        """Of so many positions from `start` on, how many are followed by a prompt token whose
        score was asked for."""
        if request.sampling.prompt_logprobs is None or request.sibling:
            return 0
        return sum(position + 1 < request.num_prompt for position in range(start, start + count))

    def _write(self, slot: int, start: int, true: int, rejected: int, known: list[int]) -> None:
        for position in range(start, start + true + rejected):
            place = self.place(slot, position)
            if place is None:
                continue
            if position < self.limits.max_model_len:
                assert self.pool.holders(place[0]) == 1, "a page without one owner is written"
            content = tuple(known[: position + 1]) if position < start + true else (-1,)
            self.kv[place] = content

    def _read(self, slot: int, end: int, known: list[int]) -> None:
        for position in range(min(end, self.limits.max_model_len)):
            place = self.place(slot, position)
            assert place is not None
            assert self.kv[place] == tuple(known[: position + 1]), "K/V of another sequence is read"


class World:
    """A scheduler, its device, and the queue of steps in flight between them."""

    def __init__(
        self,
        *,
        pages: int = 40,
        page_size: int = 4,
        max_model_len: int = 40,
        max_num_seqs: int = 4,
        budget: int = 64,
        num_drafts: int = 3,
        block: int = 0,
        depth: int = 1,
        prefix_caching: bool = True,
        host_methods: tuple[str, ...] = (),
        accept: Callable[[int], int] = lambda drafts: drafts,
        draft_length: Callable[[Request, int], int] | None = None,
        mixed: int | None = None,
    ):
        self.limits = Limits(
            max_model_len, max_num_seqs, budget, num_drafts, page_size, block, mixed
        )
        self.pool = PagePool(pages + 1, page_size)
        options = {"draft_length": draft_length} if draft_length else {}
        self.scheduler = Scheduler(
            self.limits,
            self.pool,
            host_methods=host_methods,
            prefix_caching=prefix_caching,
            **options,
        )
        self.device = Device(self.limits, self.pool, frozenset(host_methods))
        self.depth, self.accept = depth, accept
        self.flying: deque[tuple[Plan, HostVerdict]] = deque()
        self.requests: list[Request] = []

    def add(
        self,
        prompt: list[int] | int,
        *,
        num_drafts: int | None = None,
        method: str = "dflash",
        stop: bool = False,
        sibling: int = 0,
        **sampling: object,
    ) -> Request:
        prompt = prompt if isinstance(prompt, list) else [1] * prompt
        drafts = self.limits.num_drafts if num_drafts is None else num_drafts
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            SamplingParams(**({"max_tokens": 8} | sampling)),
            seed=len(self.requests),
            sibling=sibling,
            stop_ids=frozenset([STOP]) if stop else frozenset(),
            method=method if drafts else "none",
            num_drafts=drafts,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def launch(self) -> Plan:
        plan = self.scheduler.plan()
        used = sum(span.num_tokens + span.drafts for span in plan.spans)
        assert used <= self.limits.max_num_batched_tokens, "the token budget is exceeded"
        if plan.spans:
            self.flying.append((plan, self.device.run(plan, self.accept)))
        self.check()
        return plan

    def collect(self) -> list[TokenEvent]:
        plan, verdict = self.flying.popleft()
        events = self.scheduler.commit(plan, verdict)
        self.check()
        return events

    def step(self) -> list[TokenEvent]:
        """As the engine does it."""
        plan = self.launch()
        if not self.flying or (plan.spans and len(self.flying) < self.depth):
            return []
        return self.collect()

    def check(self) -> None:
        self.scheduler.check()

    def drain(self, most: int = 2000) -> None:
        steps = 0
        while self.scheduler.has_work or self.flying:
            self.step()
            steps += 1
            assert steps < most, "the scheduler does not come to an end"
        assert self.pool.available == self.pool.capacity

    def check_answers(self) -> None:
        for request in self.requests:
            made, reason = answer(request, self.limits.max_model_len)
            assert request.status is Status.FINISHED
            asked = request.sampling.prompt_logprobs is not None and not request.sibling
            if request.finish_reason != "abort" or not asked:
                places = range(1, request.num_prompt) if asked else ()
                scores = [score_of(request, p) for p in places]
                assert request.prompt_logprobs == ([None, *scores] if asked else [])
            if request.finish_reason == "abort":
                assert request.output_ids == made[: request.num_output]
            else:
                assert (request.output_ids, request.finish_reason) == (made, reason)


def running(world: World) -> list[Request]:
    return [record.request for record in world.scheduler.running]


def test_bookkeeping_modules_load_no_torch():
    names = [
        "request",
        "step",
        "config",
        "kv.pages",
        "kv.lease",
        "engine.scheduler",
        "engine.stats",
    ]
    code = "import sys\n" + "".join(f"import strobe.{name}\n" for name in names)
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_requests_are_admitted_first_come_first_served():
    world = World(max_num_seqs=2)
    first, second, third = world.add(5), world.add(30), world.add(1)
    plan = world.launch()
    assert [span.request for span in plan.spans] == [first, second]
    assert third.status is Status.WAITING
    world.collect()
    world.drain()
    world.check_answers()


def test_a_small_request_does_not_overtake_a_large_one_that_finds_no_pages():
    world = World(pages=10, max_num_seqs=4)
    world.add(20)
    large, small = world.add(30), world.add(1)
    world.step()
    assert large.status is Status.WAITING
    assert small.status is Status.WAITING
    world.drain()
    world.check_answers()


def test_a_prompt_runs_in_chunks_beside_decoding_requests_within_the_budget():
    world = World(max_num_seqs=2, budget=12, num_drafts=3)
    short, long = world.add(2, max_tokens=30), world.add(30)
    spans = [world_step_spans(world) for _ in range(4)]
    assert spans[0] == [(short, 2, 0, 1), (long, 10, 0, 0)]
    assert spans[1] == [(short, 1, 3, 4), (long, 8, 0, 0)]
    assert spans[2] == [(short, 1, 3, 4), (long, 8, 0, 0)]
    assert spans[3] == [(short, 1, 3, 4), (long, 4, 0, 1)]
    world.drain()
    world.check_answers()


def world_step_spans(world: World) -> list[tuple[Request, int, int, int]]:
    plan = world.launch()
    world.collect()
    return [(s.request, s.num_tokens, s.drafts, s.rows) for s in plan.spans]


def test_the_last_chunk_asks_for_one_row_and_earlier_ones_for_none():
    world = World(max_num_seqs=1, budget=4, num_drafts=3)
    world.add(9)
    rows = [world_step_spans(world)[0][1:] for _ in range(3)]
    assert rows == [(4, 0, 0), (4, 0, 0), (1, 0, 1)]


def test_drafting_requests_reserve_the_whole_block_and_plain_ones_one_position():
    world = World(page_size=1, num_drafts=3, draft_length=lambda request, allowed: 1)
    drafting, plain = world.add(2), world.add(2, num_drafts=0)
    world.step()
    world.launch()
    open_positions = {r.request: r.lease.open for r in world.scheduler.running}
    assert open_positions == {drafting: 4, plain: 1}
    world.collect()


def test_a_drafter_whose_block_is_longer_than_what_is_verified_gets_its_whole_block():
    world = World(page_size=1, num_drafts=2, block=8)
    world.add(2)
    world.step()
    plan = world.launch()
    assert plan.spans[0].drafts == 2
    assert world.scheduler.running[0].lease.open == 8
    world.drain()
    world.check_answers()


def test_a_request_verifies_no_more_drafts_than_its_own_and_the_policy_allow():
    asked: list[tuple[str, int]] = []

    def policy(request: Request, allowed: int) -> int:
        asked.append((request.id, allowed))
        return allowed - 1

    world = World(num_drafts=3, draft_length=policy)
    world.add(2), world.add(2, num_drafts=2), world.add(2, num_drafts=0)
    world.step()
    assert [row[2:] for row in world_step_spans(world)] == [(2, 3), (1, 2), (0, 1)]
    assert asked == [("r0", 3), ("r1", 2)]


def test_the_newest_running_request_makes_room_and_resumes_with_its_tokens():
    world = World(pages=10, max_num_seqs=2, prefix_caching=False)
    old, new = world.add(10, max_tokens=25), world.add(10, max_tokens=25)
    while not new.num_preemptions:
        world.step()
        assert not old.num_preemptions
    assert new.status is Status.WAITING
    assert running(world) == [old]
    made = list(new.output_ids)
    assert made
    assert world.scheduler.stats.preemptions == 1
    world.drain()
    assert new.output_ids[: len(made)] == made
    world.check_answers()


def test_a_preempted_request_goes_before_requests_that_never_ran():
    world = World(pages=10, max_num_seqs=2)
    world.add(10, max_tokens=25)
    new, late = world.add(10, max_tokens=25), world.add(10, max_tokens=3)
    while not new.num_preemptions:
        world.step()
    assert list(world.scheduler.waiting) == [new, late]
    world.drain()
    world.check_answers()


def test_nobody_is_admitted_in_a_step_that_could_not_reserve_for_everyone():
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


def test_an_admission_leaves_room_for_the_whole_prompt_and_a_block():
    world = World(pages=10, page_size=4, max_num_seqs=2, num_drafts=3, prefix_caching=False)
    world.add(16)
    world.step()
    refused = world.add(19)
    world.step()
    assert refused.status is Status.WAITING
    world.drain()
    world.check_answers()


def test_a_request_of_the_longest_length_runs_alone_in_the_smallest_pool():
    world = World(pages=10, page_size=4, max_model_len=40, max_num_seqs=2)
    alone = world.add(39, max_tokens=None)
    other = world.add(20, max_tokens=None)
    world.drain()
    assert alone.finish_reason == other.finish_reason == "length"
    assert len(alone.tokens) == len(other.tokens) == 40
    world.check_answers()


def test_a_late_result_of_a_stopped_request_is_dropped_and_its_pages_wait_for_it():
    world = World(depth=2, num_drafts=3)
    request = world.add(4, max_tokens=4)
    world.launch()
    world.launch()
    world.collect()
    world.launch()
    events = world.collect()
    assert events[0].finish_reason == "length"
    assert request.num_output == 4
    assert world.flying, "a step is still in flight"
    assert world.pool.available < world.pool.capacity
    assert len(world.scheduler.running) == 0
    assert world.scheduler.has_work
    assert world.launch().spans == ()
    assert world.collect() == []
    assert request.num_output == 4
    assert world.pool.available == world.pool.capacity
    assert not world.scheduler.has_work


def test_a_slot_in_flight_is_not_given_to_another_request():
    world = World(depth=2, max_num_seqs=1)
    first, second = world.add(4, max_tokens=1), world.add(4)
    world.launch()
    world.launch()
    world.collect()
    assert first.status is Status.FINISHED
    assert world.launch().spans == ()
    world.collect()
    assert [span.request for span in world.launch().spans] == [second]
    world.drain()
    world.check_answers()


def test_a_preempted_request_in_flight_keeps_its_pages_until_collected():
    world = World(pages=10, max_num_seqs=2, depth=2, prefix_caching=False)
    world.add(10, max_tokens=25)
    new = world.add(10, max_tokens=25)
    while not new.num_preemptions:
        made = list(new.output_ids)
        world.step()
    assert new.output_ids == made
    world.drain()
    assert new.num_preemptions
    world.check_answers()


def test_others_wait_for_the_pages_of_a_preempted_request_in_flight_and_stay():
    """Its pages are on their way: preempting one more would throw work away for nothing."""
    world = World(pages=12, page_size=2, max_model_len=24, max_num_seqs=4, depth=2, num_drafts=1)
    for _ in range(4):
        world.add(4, max_tokens=20)
    waited = 0
    while world.scheduler.has_work or world.flying:
        before = world.scheduler.stats.preemptions
        plan = world.launch()
        lost = world.scheduler.stats.preemptions - before
        assert lost <= 1
        waited += bool(lost) and len(plan.spans) < len(world.scheduler.running)
        if world.flying and (not plan.spans or len(world.flying) == 2):
            world.collect()
    assert world.scheduler.stats.preemptions
    assert waited, "nobody ever had to wait"
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
    assert world.collect() == [TokenEvent(going, [truth(going, 4)], None)]
    assert flying.output_ids == []
    world.step()
    world.scheduler.finish(going, "stop")
    world.scheduler.finish(going, "abort")
    assert going.finish_reason == "stop"
    world.drain()
    assert going.finish_reason == "stop"


def test_finish_of_a_preempted_request_in_flight_releases_it_once():
    world = World(pages=10, max_num_seqs=2, depth=2)
    world.add(10, max_tokens=25)
    new = world.add(10, max_tokens=25)
    while not new.num_preemptions:
        world.step()
    world.scheduler.finish(new, "abort")
    assert new not in world.scheduler.waiting
    world.drain()
    world.check_answers()


def test_max_tokens_cuts_a_run_of_accepted_drafts():
    world = World(num_drafts=3)
    request = world.add(4, max_tokens=3)
    world.step()
    (event,) = world.step()
    assert event.tokens == [truth(request, 5), truth(request, 6)]
    assert event.finish_reason == "length"
    world.check_answers()


def test_the_context_end_cuts_an_answer_without_max_tokens():
    world = World(max_model_len=11, num_drafts=3)
    request = world.add(4, max_tokens=None)
    world.drain()
    assert len(request.tokens) == 11
    assert request.finish_reason == "length"
    world.check_answers()


def stop_positions(request: Request, limit: int) -> list[int]:
    return [p for p in range(request.num_prompt, limit) if truth(request, p) == STOP]


def test_a_stop_id_ends_the_answer_inside_an_accepted_run_and_is_kept():
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
    for least in (first - 1, first, first + 1):
        request = world.add(4, max_tokens=30, stop=True, min_tokens=least)
        request.seed = early.seed
    world.drain()
    lengths = [request.num_output for request in world.requests[1:]]
    assert lengths[0] == first
    assert lengths[1] == lengths[2] > first
    world.check_answers()


def test_stop_reason_names_only_ids_the_caller_asked_for():
    world = World()
    asked = world.add(4, max_tokens=30, stop=True, stop_token_ids=[STOP])
    own = world.add(4, max_tokens=30, stop=True)
    world.drain()
    assert (asked.finish_reason, asked.stop_reason) == ("stop", STOP)
    assert (own.finish_reason, own.stop_reason) == ("stop", None)


@pytest.mark.parametrize("applied", [False, True])
def test_a_cancelled_plan_is_planned_again_as_if_it_had_not_been(applied: bool):
    world = World(max_num_seqs=3, page_size=2, num_drafts=3)
    cached = world.add([1, 2, 3, 4, 5, 6], max_tokens=2)
    world.drain()
    world.add([1, 2, 3, 4, 0, 0], max_tokens=20)
    world.add([6] * 9, max_tokens=20)
    for _ in range(4):
        plan = world.scheduler.plan()
        assert len(plan.spans) == 2
        if applied:
            world.device.apply(plan)
        world.scheduler.cancel(plan)
        world.check()
        world.step()
    world.drain()
    world.scheduler.cancel(world.scheduler.plan())
    assert cached.finish_reason == "length"
    world.check_answers()


def test_a_plan_cancelled_behind_one_in_flight_leaves_that_one_alone():
    world = World(depth=2, page_size=2, num_drafts=3, accept=lambda drafts: drafts // 2)
    request = world.add(5, max_tokens=20)
    world.launch()
    while request.status is not Status.FINISHED:
        world.scheduler.cancel(world.scheduler.plan())
        world.check()
        world.launch()
        world.collect()
    world.drain()
    world.check_answers()


def test_a_method_that_reads_the_hosts_tokens_waits_for_its_result():
    world = World(depth=2, host_methods=("ngram",), num_drafts=3)
    host = world.add(4, method="ngram", max_tokens=12)
    free = world.add(4, max_tokens=12)
    world.step()
    plan = world.launch()
    assert [span.request for span in plan.spans] == [free]
    world.collect()
    plan = world.launch()
    assert [span.request for span in plan.spans] == [host, free]
    world.drain()
    world.check_answers()


def test_a_request_with_a_grammar_waits_for_its_result_from_its_first_token_on():
    """Chunks of its prompt need none and follow each other."""
    world = World(depth=2, num_drafts=3, max_num_seqs=2, budget=12)
    follows = world.add(14, max_tokens=12, structured_outputs={"regex": "a*"})
    free = world.add(2, max_tokens=20)
    planned = [[(s.request, s.num_tokens, s.rows) for s in world.launch().spans] for _ in range(2)]
    assert planned == [[(follows, 12, 0)], [(follows, 2, 1), (free, 2, 1)]]
    world.collect()
    plan = world.launch()
    assert [span.request for span in plan.spans] == [free]
    world.collect()
    plan = world.launch()
    assert [(span.request, span.drafts) for span in plan.spans] == [(follows, 3), (free, 3)]
    world.drain()
    world.check_answers()


def scored(world: World) -> list[tuple[int, int, int]]:
    """(start, tokens, scored) of the next step's spans."""
    plan = world.launch()
    world.collect()
    return [(s.start, s.num_tokens, s.scored) for s in plan.spans]


def test_every_row_of_a_prompt_but_the_last_is_scored_in_whatever_chunks():
    world = World(max_num_seqs=1, budget=4, num_drafts=3)
    world.add(9, prompt_logprobs=0)
    assert [scored(world) for _ in range(4)] == [
        [(0, 4, 4)],
        [(4, 4, 4)],
        [(8, 1, 0)],
        [(9, 1, 0)],
    ]
    world.drain()
    world.add(8, prompt_logprobs=0)
    assert [scored(world) for _ in range(3)] == [[(0, 4, 4)], [(4, 4, 3)], [(8, 1, 0)]]
    world.drain()
    world.check_answers()


def test_a_prompt_of_one_token_has_nothing_to_score():
    world = World()
    request = world.add(1, prompt_logprobs=2)
    assert scored(world) == [(0, 1, 0)]
    world.drain()
    assert request.prompt_logprobs == [None]
    world.check_answers()


def test_only_the_first_of_siblings_scores_the_prompt_and_the_others_use_the_cache():
    world = World(page_size=4, max_num_seqs=1)
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2]
    world.add(prompt)
    world.drain()
    requests = [world.add(prompt, sibling=i, prompt_logprobs=0, max_tokens=2) for i in range(2)]
    world.drain()
    assert [request.num_cached for request in requests] == [0, 8]
    assert [len(request.prompt_logprobs) for request in requests] == [9, 0]
    world.check_answers()


def test_a_request_for_no_tokens_ends_with_its_prompt():
    world = World(num_drafts=3, max_num_seqs=1, budget=4)
    request = world.add(9, max_tokens=0, prompt_logprobs=1)
    assert [world.step(), world.step()] == [[], []]
    (event,) = world.step()
    assert (event.tokens, event.finish_reason, event.drafted) == ([], "length", 0)
    assert len(request.prompt_logprobs) == 9
    assert not world.scheduler.has_work
    assert world.scheduler.stats.generation_tokens == 0


def test_a_request_in_error_ends_without_the_tokens_of_its_last_step():
    world = World(num_drafts=3)
    broken, other = world.add(4), world.add(4)
    world.step()
    world.launch()
    broken.error = "What was wrong."
    ended, going = world.collect()
    assert (ended.tokens, ended.finish_reason) == ([], "error")
    assert len(going.tokens) == 4
    assert broken.num_output == 1
    world.drain()
    assert other.finish_reason == "length"


def test_events_say_what_was_drafted_accepted_and_where():
    world = World(num_drafts=3, accept=lambda drafts: min(drafts, 2), max_model_len=40)
    request = world.add(5, max_tokens=6)
    told = [world.step()[0] for _ in range(3)]
    assert [(e.drafted, e.accepted, e.context, len(e.tokens)) for e in told] == [
        (0, 0, 0, 1),
        (3, 2, 5, 3),
        (3, 2, 8, 2),
    ]
    assert request.speculation.accepted == 4


def test_accepted_drafts_are_never_more_than_the_tokens_that_count():
    world = World(num_drafts=5, max_model_len=40, budget=64)
    world.add(5, max_tokens=3)
    world.step()
    (event,) = world.step()
    assert (event.drafted, event.accepted, len(event.tokens)) == (5, 2, 2)


def test_log_probabilities_are_cut_with_the_tokens_that_do_not_count():
    world = World(num_drafts=3)
    request = world.add(4, max_tokens=3, logprobs=0)
    world.step()
    plan = world.scheduler.plan()
    verdict = world.device.run(plan, world.accept)
    found = [TokenLogprob(token, -1.0, 1) for token in verdict.tokens[0]]
    assert len(found) == 4
    (event,) = world.scheduler.commit(plan, verdict._replace(logprobs={0: found}))
    assert event.logprobs == found[:2]
    assert [one.token for one in event.logprobs] == event.tokens == request.output_ids[1:]


def test_a_prefix_hit_starts_behind_the_cached_pages():
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


def test_without_prefix_caching_every_prompt_runs_whole():
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
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 4)
    assert stats.accepted_per_position == [2, 2, 0]
    assert stats.acceptance_length == 3.0
    counts = world.requests[0].speculation
    assert (counts.steps, counts.drafted, counts.accepted) == (2, 6, 4)
    assert counts.acceptance_length == 3.0


class Scheduling(RuleBasedStateMachine):
    """Random traffic at depth 1 and 2 over a pool that is often too small."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        pages=st.integers(8, 20),
        page_size=st.sampled_from([1, 2, 3, 4]),
        num_drafts=st.sampled_from([0, 1, 3, 5]),
        block=st.sampled_from([0, 8]),
        seqs=st.integers(1, 4),
        spare=st.integers(0, 20),
        prefix_caching=st.booleans(),
        seed=st.integers(0, 10**6),
        length=st.integers(8, 24),
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
        seed: int,
        length: int,
    ):
        self.rng = random.Random(seed)
        self.world = World(
            pages=max(pages, -(-length // page_size)),
            page_size=page_size,
            max_model_len=length,
            max_num_seqs=seqs,
            budget=seqs * (num_drafts + 1) + spare,
            num_drafts=num_drafts,
            block=block,
            depth=depth,
            prefix_caching=prefix_caching,
            host_methods=("ngram",),
            accept=lambda drafts: self.rng.randint(0, drafts),
            draft_length=lambda request, allowed: self.rng.randint(0, allowed),
        )
        self.order: list[Request] = []
        self.steps = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject):
        limits = self.world.limits
        size = data.draw(st.integers(1, limits.max_model_len - 1))
        rest = data.draw(st.integers(0, 2))
        most = data.draw(st.sampled_from([None, 0, 1, 2, 5, 30]))
        self.world.add(
            [1] * (size - min(rest, size - 1)) + [2] * min(rest, size - 1),
            num_drafts=data.draw(st.integers(0, limits.num_drafts)),
            method=data.draw(st.sampled_from(["dflash", "ngram"])),
            stop=data.draw(st.booleans()),
            max_tokens=most,
            min_tokens=data.draw(st.integers(0, min(4, 4 if most is None else most))),
            prompt_logprobs=data.draw(st.sampled_from([None, None, 0])),
            structured_outputs=data.draw(st.sampled_from([None, None, {"regex": "a"}])),
        )

    @rule(times=st.integers(1, 4))
    def step(self, times: int):
        for _ in range(times):
            self.world.step()
            self.steps += 1

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject):
        request = data.draw(st.sampled_from(self.world.requests))
        self.world.scheduler.finish(request, "abort")
        assert request.status is Status.FINISHED
        self.world.check()

    @rule(applied=st.booleans(), finish=st.booleans())
    def cancel(self, applied: bool, finish: bool):
        plan = self.world.scheduler.plan()
        if applied:
            self.world.device.apply(plan)
        if finish and plan.spans:
            self.world.scheduler.finish(plan.spans[0].request, "abort")
        self.world.scheduler.cancel(plan)
        self.world.check()

    @invariant()
    def what_was_told_is_true(self):
        if hasattr(self, "world"):
            for request in self.world.requests:
                assert request.tokens == sequence(request, len(request.tokens))

    @invariant()
    def running_requests_came_before_waiting_ones(self):
        if hasattr(self, "world"):
            numbers = {request: i for i, request in enumerate(self.world.requests)}
            order = [numbers[r] for r in running(self.world) + list(self.world.scheduler.waiting)]
            assert order == sorted(order)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            self.world.check_answers()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def rows_of(plan: Plan) -> list[int]:
    return [span.num_tokens + span.drafts for span in plan.spans]


def test_prompts_beside_decoding_requests_come_in_smaller_pieces():
    world = World(mixed=12, max_model_len=60, pages=80, prefix_caching=False)
    world.add(6, max_tokens=40)
    assert rows_of(world.launch()) == [6]
    world.collect()
    world.add(40)
    assert rows_of(world.launch()) == [4, 8]  # 12 rows in all
    world.collect()
    world.scheduler.finish(world.requests[0], "abort")
    assert rows_of(world.launch()) == [32]  # nobody decodes: all the rest at once


def test_prompts_get_half_of_the_rows_where_decoding_takes_more():
    world = World(mixed=8, max_model_len=60, budget=64, pages=80, max_num_seqs=4)
    for _ in range(3):
        world.add(4, max_tokens=40)
    assert rows_of(world.launch()) == [4, 4, 4]
    world.collect()
    world.add(40)
    assert rows_of(world.launch()) == [4, 4, 4, 4]


def test_requests_that_sit_a_step_out_are_not_stalled_by_a_prompt():
    """With a result of theirs in flight, host methods draft in every other plan only."""
    world = World(mixed=12, max_model_len=60, budget=64, pages=80, depth=2, host_methods=("ngram",))
    world.add(6, method="ngram", max_tokens=40)
    world.launch()
    world.collect()
    assert rows_of(world.launch()) == [4]
    world.add(40)
    assert rows_of(world.launch()) == [12]
