"""A scheduler and a device that is a few dictionaries: no torch, no model.

The device does what the real one does with a plan, of which it knows nothing else: it keeps lengths
and page tables by slot, writes what it runs through the table, and reads everything before it. Each
written place holds the whole prefix it stands for, so that a page lost, shared or overwritten is
noticed at the next read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from strobe.config import Limits
from strobe.engine.scheduler import Scheduler
from strobe.kv.pages import PagePool
from strobe.request import DEFAULT_SCHEDULING, Request, SchedulingOptions, Status, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.speculation.base import Drafter
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain, DraftPlan, DraftPolicy
from strobe.step import TAIL, Admission, Plan, Span, StepResult, TokenEvent, num_rows

STOP = 5
TOKENS = 7
Named = Request | Admission
"""What names a sequence: its prompt, and the seed that its answer follows from."""


def truth(named: Named, position: int) -> int:
    """The token the target alone puts at a position of this request's sequence."""
    value = (named.seed * 1_000_003 + position * 7919 + 12345) & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return (value ^ (value >> 12)) % TOKENS


def guess(named: Named, position: int) -> int:
    """The token that drafts on the host put there: often the true one."""
    wrong = (named.seed * 31 + position * 17) % 5 == 0
    return (truth(named, position) + wrong) % TOKENS


def sequence(named: Named, length: int) -> list[int]:
    """The first tokens of prompt and true answer."""
    prompt = list(named.tokens[: named.num_prompt])
    return (prompt + [truth(named, p) for p in range(named.num_prompt, length)])[:length]


def score_of(named: Named, position: int) -> TokenLogprob:
    """What the target gives the token at a position of the prompt."""
    return TokenLogprob(named.tokens[position], -float(position), position)


def scores_prompt(named: Named) -> bool:
    return named.sampling.prompt_logprobs is not None and not named.sibling


def answer(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """What the request must say in the end, and why it stops, by the stop rules alone."""
    made: list[int] = []
    if request.sampling.max_tokens == 0:
        return made, "length"
    structured = request.sampling.structured_outputs is not None
    for position in range(request.num_prompt, max_model_len):
        made.append(truth(request, position))
        least = 0 if structured else request.sampling.min_tokens
        if made[-1] in request.stop_ids and len(made) > least:
            return made, "stop"
        if len(made) == request.sampling.max_tokens:
            break
    return made, "length"


class Device:
    """Runs plans at once; what it decided is learnt by the scheduler when `collect` is called."""

    def __init__(self, limits: Limits, pool: PagePool):
        self.limits, self.pool = limits, pool
        self.length: dict[int, int] = {}
        self.owner: dict[int, Admission] = {}
        self.table: dict[int, dict[int, int]] = {}
        self.kv: dict[tuple[int, int], tuple[int, ...]] = {}
        self.prompt_rows = 0
        """That it has run of prompts, and of answers that were resumed."""

    def apply(self, plan: Plan) -> None:
        plan.check(self.limits.max_num_seqs, self.pool.num_pages)
        for one in plan.admitted:
            assert list(one.tokens) == sequence(one, len(one.tokens)), "another answer is resumed"
            assert 0 <= one.length < len(one.tokens)
            before = self.owner.get(one.slot)
            resumed = before is not None and before.seed == one.seed  # after a step that failed
            fresh = not one.length or resumed
            assert fresh or not scores_prompt(one), "rows to score come from the cache"
            self.length[one.slot], self.owner[one.slot] = one.length, one
            self.table[one.slot] = {}
        for slot, first, pages in plan.pages:
            for column, page in enumerate(pages, start=first):
                self.table[slot][column] = page

    def place(self, slot: int, position: int) -> tuple[int, int] | None:
        size = self.limits.page_size
        if position >= self.limits.max_pages * size:
            return None
        return self.table[slot][position // size], position % size

    def run(self, plan: Plan, accept: Callable[[int], int]) -> StepResult:
        """accept(drafts) -> how many of so many drafts of the device's own the target keeps."""
        self.apply(plan)
        tokens, accepted = [], []
        scores: dict[int, list[TokenLogprob]] = {}
        verified = self._verified(plan)
        assert len({span.slot for span in plan.spans}) == len(plan.spans)
        for i, span in enumerate(plan.spans):
            owner, slot = self.owner[span.slot], span.slot
            start = self.length[slot]
            known = sequence(owner, start + span.num_rows + 1)
            if start >= len(owner.tokens) or span.tokens[0] == TAIL or span.num_drafts:
                self._check_decode(span, start, known)
            else:
                self._check_prefill(span, start)
            self._check_scored(span, start)
            if span.scored_tokens:
                following = range(start + 1, start + 1 + len(span.scored_tokens))
                scores[i] = [score_of(owner, position) for position in following]
            certain = span.num_context_rows
            offered = min(verified[i], max(0, self.limits.max_model_len - 1 - start))
            if span.method is None:
                own = span.tokens[certain : certain + offered]
                true = known[start + certain : start + certain + offered]
                kept = next((j for j in range(offered) if own[j] != true[j]), offered)
            else:
                kept = accept(offered)
                self._write(slot, start, 0, self.limits.lookahead, known)  # the drafter's scratch
            self._write(slot, start, certain + kept, verified[i] - kept, known)
            self._read(slot, start, known)
            self.length[slot] = start + certain + kept
            first = start + certain
            made = [truth(owner, p) for p in range(first, first + kept + 1)]
            tokens.append(made if span.num_logits else [0])
            accepted.append(kept)
        drafted = None if plan.num_verified is None else verified
        return StepResult(tokens, accepted, num_verified=drafted, prompt_logprobs=scores)

    def _verified(self, plan: Plan) -> list[int]:
        """Drafts of each span that are verified: of those that the device makes, one of each span
        after another, the last ones first, until there are as many as the plan says."""
        found = [span.num_drafts if span.method is None else 0 for span in plan.spans]
        made = [i for i, span in enumerate(plan.spans) if span.method is not None]
        left = sum(plan.spans[i].num_drafts for i in made)
        left = left if plan.num_verified is None else min(left, plan.num_verified)
        while left:
            for i in reversed(made):
                if left and found[i] < plan.spans[i].num_drafts:
                    found[i], left = found[i] + 1, left - 1
        return found

    def _check_prefill(self, span: Span, start: int) -> None:
        owner = self.owner[span.slot]
        assert span.start == span.max_start == start
        assert span.tokens, "a span without rows"
        assert span.tokens == owner.tokens[start : start + len(span.tokens)]
        assert (span.num_drafts, span.method) == (0, None)
        assert span.num_logits == int(start + len(span.tokens) == len(owner.tokens))
        self.prompt_rows += len(span.tokens)

    def _check_decode(self, span: Span, start: int, known: list[int]) -> None:
        assert span.num_logits == 1 + span.num_drafts == span.num_rows
        assert span.num_context_rows == 1
        if span.tokens[0] == TAIL:
            assert len(span.tokens) == 1, "nobody knows what follows a token that nobody knows"
            assert (span.method is not None) == (span.num_drafts > 0)
            assert span.start <= start <= span.max_start
            return
        owner = self.owner[span.slot]
        assert span.method is None
        assert span.start == start == span.max_start, "the host's tokens are late"
        assert span.tokens[0] == known[start], "the newest token is another"
        drafts = [guess(owner, start + 1 + j) for j in range(span.num_drafts)]
        assert list(span.tokens[1:]) == drafts, "drafts that the proposer did not make"

    def _check_scored(self, span: Span, start: int) -> None:
        """Scored are those prompt tokens that follow its rows, where their scores were asked for,
        each with as many others as were asked for."""
        owner, wanted = self.owner[span.slot], ()
        if scores_prompt(owner):
            wanted = owner.tokens[
                start + 1 : min(start + 1 + span.num_context_rows, owner.num_prompt)
            ]
        assert span.scored_tokens == wanted
        assert not wanted or span.top_logprobs == owner.sampling.prompt_logprobs

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


class Guesses:
    """Drafts on the host: a few, or none, and often the true ones."""

    def __init__(self) -> None:
        self.asked: list[tuple[Request, int]] = []

    def propose(self, request: Request, count: int) -> DraftChain:
        assert count > 0
        self.asked.append((request, count))
        first = len(request.tokens)
        found = min(count, (request.seed * 3 + first * 5) % 7)
        return DraftChain(tuple([guess(request, first + j) for j in range(found)]), 2)


class Policy(DraftPolicy):
    """A budget by the request and what it may verify at most."""

    def __init__(self, count: Callable[[Candidate], int]):
        self.count = count
        self.seen: list[tuple[list[Candidate], BatchLoad]] = []

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        self.seen.append((list(candidates), load))
        return DraftPlan([self.count(candidate) for candidate in candidates])


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
        accept: Callable[[int], int] = lambda drafts: drafts,
        policy: DraftPolicy | None = None,
        mixed: int | None = None,
    ):
        self.limits = Limits(
            max_model_len, max_num_seqs, budget, num_drafts, page_size, block, mixed
        )
        self.pool = PagePool(pages + 1, page_size)
        self.guesses = Guesses()
        self.scheduler = Scheduler(
            self.limits,
            self.pool,
            drafters={
                "dflash": Drafter(device="dflash"),
                "ngram": Drafter(self.guesses),
                "dflash+ngram": Drafter(self.guesses, "dflash"),
            },
            prefix_caching=prefix_caching,
            draft_policy=policy,
        )
        self.device = Device(self.limits, self.pool)
        self.depth, self.accept = depth, accept
        self.flying: deque[tuple[Plan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.at: dict[int, Request] = {}
        """By slot, whom the device was told of last."""
        self.reported: dict[Request, list[int]] = {}
        self.ended: set[Request] = set()
        self.failures, self.failed_alone = 0, Counter[Request]()
        self.faulty: Callable[[Request, Span], bool] = lambda request, span: False
        """Whether steps with that span fail."""

    def add(
        self,
        prompt: list[int] | int,
        *,
        num_drafts: int | None = None,
        method: str = "dflash",
        stop: bool = False,
        sibling: int = 0,
        place: SchedulingOptions = DEFAULT_SCHEDULING,
        **sampling: object,
    ) -> Request:
        prompt = prompt if isinstance(prompt, list) else [1] * prompt
        drafts = self.limits.num_drafts if num_drafts is None else num_drafts
        number = len(self.requests)
        request = Request(
            f"r{number}",
            prompt,
            SamplingParams(**({"max_tokens": 8} | sampling)),
            seed=number,
            sibling=sibling,
            stop_ids=frozenset([STOP]) if stop else frozenset(),
            method=method if drafts else "none",
            num_drafts=drafts,
            key=number,
            scheduling=place,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def spans(self, plan: Plan) -> list[tuple[Request, Span]]:
        """Whose each span of the newest plan is."""
        return [(self.at[span.slot], span) for span in plan.spans]

    def who(self, plan: Plan) -> list[Request]:
        return [request for request, _ in self.spans(plan)]

    def plan(self) -> Plan:
        """The next plan, checked against the requests that it is made of."""
        before, alone = list(self.scheduler.waiting), self.scheduler._fault_isolation.solo_request()
        plan = self.scheduler.plan()
        assert plan.spans or self.flying or not self.scheduler.has_work, "nobody moves"
        records = {record.slot: record.request for record in self.scheduler.running}
        for one in plan.admitted:
            request = self.at[one.slot] = records[one.slot]
            assert one == Admission(
                one.slot,
                one.length,
                tuple(request.tokens),
                request.num_prompt,
                request.sampling,
                request.seed,
                request.sibling,
                request.stop_ids,
            )
        for request, span in self.spans(plan):
            assert records[span.slot] is request, "a slot serves a request it was not given to"
            drafter = self.scheduler.drafters.get(request.method, Drafter())
            if span.method is not None:
                assert span.method == drafter.device
            if drafter.host is not None and drafter.device is None:
                assert TAIL not in span.tokens
            assert span.num_drafts <= min(request.num_drafts, self.limits.num_drafts)
        used = num_rows(plan.spans, plan.num_verified)
        assert used <= self.limits.max_num_batched_tokens, "the token budget is exceeded"
        if alone is None:
            self._check_overtaken(before, [self.at[one.slot] for one in plan.admitted])
        return plan

    def _check_overtaken(self, waiting: list[Request], admitted: list[Request]) -> None:
        """Who waited in front of one that was admitted, and was not, waits for half of its work or
        more to be done by others."""
        if not admitted:
            return
        known = [request for request in waiting if request.status is Status.WAITING]
        last = waiting.index(admitted[-1])
        for request in [one for one in known if waiting.index(one) < last]:
            assert self.scheduler.prefix_caching, "a request was overtaken"
            size, done = self.limits.page_size, self.cached(request)
            shared = max(_shared(request, other) for other in running(self)) // size * size
            assert 2 * (shared - done) >= len(request.tokens) - done, "it waits for too little"

    def cached(self, request: Request) -> int:
        """Positions that the cache would give it."""
        size, tokens, parent = self.limits.page_size, request.tokens, b""
        for end in range(size, len(tokens), size):
            parent = self.pool.key(parent, tokens[end - size : end])
            if self.pool.lookup(parent) is None:
                return end - size
        return (len(tokens) - 1) // size * size

    def launch(self) -> Plan:
        plan = self.plan()
        if plan.spans:
            self.flying.append((plan, self.device.run(plan, self.accept)))
        self.check()
        return plan

    def collect(self) -> list[TokenEvent]:
        plan, result = self.flying.popleft()
        return self._heard(self.scheduler.commit(plan, result))

    def _heard(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Events add up to the answers, and say once how an answer began and once how it ended."""
        self.check()
        for event in events:
            request = self.requests[event.key]
            assert event.sibling == request.sibling
            assert request not in self.ended, "an event of a request after its end"
            assert (event.start is None) == (request in self.reported)
            reported = self.reported.setdefault(request, [])
            reported += event.tokens
            assert reported == request.output_ids
            assert 0 <= event.num_accepted <= min(event.num_verified, len(event.tokens))
            assert event.num_verified <= request.num_drafts
            ending = event.finish_reason, event.stop_reason, event.error
            assert ending == (request.finish_reason, request.stop_reason, request.error)
            if event.finish_reason is not None:
                self.ended.add(request)
        return events

    def cancel(self, plan: Plan, done: int = 0) -> list[TokenEvent]:
        """The step of the plan fails when nothing was done yet, its pages were, or all of it."""
        if done == 1:
            self.device.apply(plan)
        if done == 2:
            self.device.run(plan, self.accept)
        live = [one for one in self.who(plan) if one.status is not Status.FINISHED]
        self.failures += bool(plan.spans)
        self.failed_alone.update(live if len(live) == 1 else ())
        return self._heard(self.scheduler.cancel(plan, "What failed."))

    def step(self) -> list[TokenEvent]:
        """As the engine does it, for a caller that goes on after an error."""
        plan = self.plan()
        if any(self.faulty(request, span) for request, span in self.spans(plan)):
            return self.cancel(plan, self.failures % 3)
        if plan.spans:
            self.flying.append((plan, self.device.run(plan, self.accept)))
        self.check()
        if not self.flying or (plan.spans and len(self.flying) < self.depth):
            return []
        return self.collect()

    def check(self) -> None:
        self.scheduler.check()

    def drain(self, most: int = 2000) -> list[TokenEvent]:
        """All the events to the end."""
        events: list[TokenEvent] = []
        steps = 0
        while self.scheduler.has_work or self.flying:
            events += self.step()
            steps += 1
            assert steps < most, "the scheduler does not come to an end"
        assert self.pool.available == self.pool.capacity
        return events

    def check_answers(self) -> None:
        for request in self.requests:
            made, reason = answer(request, self.limits.max_model_len)
            assert request.status is Status.FINISHED
            asked = scores_prompt(request)
            cut = request.finish_reason in ("abort", "error")
            if not cut or not asked:
                places = range(1, request.num_prompt) if asked else ()
                scores = [score_of(request, p) for p in places]
                assert request.prompt_logprobs == ([None, *scores] if asked else [])
            if cut:
                assert request.output_ids == made[: request.num_output]
            else:
                assert (request.output_ids, request.finish_reason) == (made, reason)


def _shared(request: Request, other: Request) -> int:
    """Tokens that both begin with, the last of either left out."""
    pairs = list(zip(request.tokens[:-1], other.tokens[:-1], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def running(world: World) -> list[Request]:
    return [record.request for record in world.scheduler.running]
