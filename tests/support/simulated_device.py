"""A scheduler with a simulated device of a few dictionaries: no torch, no model.

Like the real device, it sees nothing but plans: it keeps lengths and page tables by slot, writes
K/V through the table and reads all K/V before it. Each written entry holds the whole prefix that it
stands for, so that the next read notices a lost, shared or overwritten page.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from strobe.config import Limits
from strobe.engine.scheduler import PrefixCache, Scheduler
from strobe.kv.host_tier import HostRows, HostTier
from strobe.kv.pages import PagePool
from strobe.request import DEFAULT_SCHEDULING, Request, SchedulingOptions, Status, TokenLogprob
from strobe.sampling_params import RepetitionDetection, SamplingParams
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftChain, DraftPlan, DraftPolicy
from strobe.speculation.proposer import Drafter
from strobe.step import TAIL, Admission, HostCopies, Plan, Span, StepResult, TokenEvent, num_rows
from tests.support.bookkeeping_checks import check_scheduler

STOP = 5
TOKENS = 7
Source = Request | Admission
"""Identifies a sequence: by its prompt, and by the seed that determines its answer."""


def truth(source: Source, position: int) -> int:
    """Return the token that plain decoding puts at a position of this sequence."""
    value = (source.seed * 1_000_003 + position * 7919 + 12345) & 0xFFFFFFFF
    value = (value ^ (value >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    return (value ^ (value >> 12)) % TOKENS


def host_draft(source: Source, position: int) -> int:
    """Return the host's draft of that token, which is often the true one."""
    wrong = (source.seed * 31 + position * 17) % 5 == 0
    return (truth(source, position) + wrong) % TOKENS


def sequence(source: Source, length: int) -> list[int]:
    """Return the first tokens of the prompt and the true answer."""
    prompt = list(source.tokens[: source.num_prompt])
    return (prompt + [truth(source, p) for p in range(source.num_prompt, length)])[:length]


def score_of(source: Source, position: int) -> TokenLogprob:
    """Return the log probability of the token at a position of the prompt."""
    return TokenLogprob(source.tokens[position], -float(position), position)


def scores_prompt(source: Source) -> bool:
    return source.sampling.prompt_logprobs is not None and not source.sibling


def repeats(request: Request, output: list[int]) -> bool:
    """Whether an output ends in as many copies of a pattern as the request allows."""
    settings = request.sampling.repetition_detection
    if not isinstance(settings, RepetitionDetection):
        return False
    return any(
        len(output) >= size * settings.min_count
        and output[-size:] * settings.min_count == output[-size * settings.min_count :]
        for size in range(max(settings.min_pattern_size, 1), settings.max_pattern_size + 1)
    )


def answer(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """Return the request's whole output and its finish reason, by the stop rules alone."""
    output: list[int] = []
    if request.sampling.max_tokens == 0:
        return output, "length"
    structured = request.sampling.structured_outputs is not None
    for position in range(request.num_prompt, max_model_len):
        output.append(truth(request, position))
        min_tokens = 0 if structured else request.sampling.min_tokens
        if output[-1] in request.stop_ids and len(output) > min_tokens:
            return output, "stop"
        if len(output) == request.sampling.max_tokens or position == max_model_len - 1:
            break
        if len(output) >= request.sampling.min_tokens and repeats(request, output):
            return output, "repetition"
    return output, "length"


class Device:
    """Runs plans immediately; the scheduler receives the results when `collect` is called."""

    def __init__(self, limits: Limits, pool: PagePool):
        self.limits, self.pool = limits, pool
        self.length: dict[int, int] = {}
        self.owner: dict[int, Admission] = {}
        self.tables: dict[tuple[int, int], dict[int, int]] = {}
        """Pages by column, by page group and slot."""
        self.kv: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in pool.groups]
        self.host: list[dict[int, dict[int, tuple[int, ...]]]] = [{} for _ in pool.groups]
        """Contents of host memory by page group and row: those of a page by offset."""
        self.prompt_rows = 0
        """Rows of prompts, and of answers that were resumed, that have run."""

    def apply(self, plan: Plan) -> None:
        plan.check(self.limits.max_num_seqs, [group.num_pages for group in self.pool.groups])
        if plan.host is not None:
            self._copy(plan.host)
        for admission in plan.admitted:
            slot, tokens = admission.slot, list(admission.tokens)
            assert tokens == sequence(admission, len(tokens)), "another answer is resumed"
            assert 0 <= admission.length < len(tokens)
            before = self.owner.get(slot)
            resumed = before is not None and before.seed == admission.seed  # after a failed step
            uncached = not admission.length or resumed
            assert uncached or not scores_prompt(admission), "rows to score come from the cache"
            self.length[slot], self.owner[slot] = admission.length, admission
            for group in range(len(self.pool.groups)):
                self.tables[group, slot] = {}
        for slot, first, pages, group in plan.pages:
            for column, page in enumerate(pages, start=first):
                self.tables[group, slot][column] = page

    def _copy(self, copies: HostCopies) -> None:
        size = self.limits.page_size
        for copy in (*copies.evicted, *copies.saved):
            kv = self.kv[copy.group]
            page = {offset: kv[copy.device, offset] for offset in range(size)}
            assert copy in copies.evicted or self.pool.groups[copy.group]._key_of[copy.device]
            self.host[copy.group][copy.host] = page
        for copy in copies.loaded:
            assert self.pool.groups[copy.group]._holders[copy.device] == 1
            for offset, content in self.host[copy.group][copy.host].items():
                self.kv[copy.group][copy.device, offset] = content

    def entry(self, group: int, slot: int, position: int) -> tuple[int, int] | None:
        """Return the page and the offset of a position; None past the end of the table."""
        size = self.limits.page_size
        if position >= self.limits.max_pages * size:
            return None
        return self.tables[group, slot][position // size], position % size

    def run(self, plan: Plan, accept: Callable[[int], int]) -> StepResult:
        """Run the plan. accept(drafts): how many of that many device drafts are accepted."""
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
            sampled = [truth(owner, p) for p in range(first, first + kept + 1)]
            tokens.append(sampled if span.num_logits else [0])
            accepted.append(kept)
        drafted = None if plan.num_verified is None else verified
        return StepResult(tokens, accepted, num_verified=drafted, prompt_logprobs=scores)

    def _verified(self, plan: Plan) -> list[int]:
        """Return the number of verified drafts of each span: all drafts of the host, and as many
        of the device as the plan allows, dealt to the spans in turn, the last span first."""
        verified = [span.num_drafts if span.method is None else 0 for span in plan.spans]
        drafting = [i for i, span in enumerate(plan.spans) if span.method is not None]
        left = sum(plan.spans[i].num_drafts for i in drafting)
        left = left if plan.num_verified is None else min(left, plan.num_verified)
        while left:
            for i in reversed(drafting):
                if left and verified[i] < plan.spans[i].num_drafts:
                    verified[i], left = verified[i] + 1, left - 1
        return verified

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
            assert len(span.tokens) == 1, "no token can follow an unknown one"
            assert (span.method is not None) == (span.num_drafts > 0)
            assert span.start <= start <= span.max_start
            return
        owner = self.owner[span.slot]
        assert span.method is None
        assert span.start == start == span.max_start, "the host's tokens are late"
        assert span.tokens[0] == known[start], "the newest token is another"
        drafts = [host_draft(owner, start + 1 + j) for j in range(span.num_drafts)]
        assert list(span.tokens[1:]) == drafts, "drafts that the proposer did not make"

    def _check_scored(self, span: Span, start: int) -> None:
        """Check that the prompt tokens that follow the span's rows are scored if requested, with
        the requested number of top tokens."""
        owner, expected = self.owner[span.slot], ()
        if scores_prompt(owner):
            end = min(start + 1 + span.num_context_rows, owner.num_prompt)
            expected = owner.tokens[start + 1 : end]
        assert span.scored_tokens == expected
        assert not expected or span.top_logprobs == owner.sampling.prompt_logprobs

    def _write(self, slot: int, start: int, true: int, rejected: int, known: list[int]) -> None:
        for group, pool in enumerate(self.pool.groups):
            for position in range(start, start + true + rejected):
                entry = self.entry(group, slot, position)
                if entry is None:
                    continue
                if position < self.limits.max_model_len:
                    assert pool._holders[entry[0]] == 1, "a page without one owner is written"
                content = tuple(known[: position + 1]) if position < start + true else (-1,)
                self.kv[group][entry] = content

    def _read(self, slot: int, end: int, known: list[int]) -> None:
        """Read what a row at position `end` sees: all positions before, or those in a window."""
        for group, pool in enumerate(self.pool.groups):
            first = 0 if pool.window is None else max(end + 1 - pool.window, 0)
            for position in range(first, min(end, self.limits.max_model_len)):
                entry = self.entry(group, slot, position)
                assert entry is not None
                expected = tuple(known[: position + 1])
                assert self.kv[group][entry] == expected, "K/V of another sequence is read"


class HostDrafter:
    """Drafts a few tokens or none on the host, often the true ones."""

    def propose(self, request: Request, count: int) -> DraftChain:
        assert count > 0
        first = len(request.tokens)
        length = min(count, (request.seed * 3 + first * 5) % 7)
        return DraftChain(tuple([host_draft(request, first + j) for j in range(length)]), 2)


class Policy(DraftPolicy):
    """Limits each request's drafts by `count`, and records its arguments in `seen`."""

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
        windows: Sequence[tuple[int, int]] = (),
        host: Sequence[int] = (),
        pages_per_step: int = 2,
    ):
        """windows: window and pages of each further page group. host: pages of each group that host
        memory has room for; pages_per_step: pages copied beside a step."""
        self.limits = Limits(
            max_model_len, max_num_seqs, budget, num_drafts, page_size, block, mixed
        )
        others = [PagePool(count + 1, page_size, window=window) for window, count in windows]
        self.pool = PagePool(pages + 1, page_size, others=others)
        self.host = None
        if host:
            self.host = HostTier(
                self.pool,
                [HostRows(count) for count in host],
                pages_per_step=pages_per_step,
            )
        self.host_drafter = HostDrafter()
        self.scheduler = Scheduler(
            self.limits,
            self.pool,
            drafters={
                "dflash": Drafter(device="dflash"),
                "ngram": Drafter(self.host_drafter),
                "dflash+ngram": Drafter(self.host_drafter, "dflash"),
            },
            prefix_cache=PrefixCache(enabled=prefix_caching, host=self.host),
            draft_policy=policy,
        )
        self.device = Device(self.limits, self.pool)
        self.depth, self.accept = depth, accept
        self.in_flight: deque[tuple[Plan, StepResult]] = deque()
        self.requests: list[Request] = []
        self.owners: dict[int, Request] = {}
        """The request that was admitted last, by slot."""
        self.reported: dict[Request, list[int]] = {}
        self.ended: set[Request] = set()
        self.was_fetching = False
        self.failures, self.failed_alone = 0, Counter[Request]()
        self.faulty: Callable[[Request, Span], bool] = lambda request, span: False
        """Whether a step with this span of this request fails."""

    def add(
        self,
        prompt: list[int] | int,
        *,
        num_drafts: int | None = None,
        method: str = "dflash",
        stop: bool = False,
        sibling: int = 0,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
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
            scheduling=scheduling,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def spans(self, plan: Plan) -> list[tuple[Request, Span]]:
        """Return the spans of the newest plan with their requests."""
        return [(self.owners[span.slot], span) for span in plan.spans]

    def requests_of(self, plan: Plan) -> list[Request]:
        return [request for request, _ in self.spans(plan)]

    def plan(self) -> Plan:
        """Return the next plan, checked against the requests that it schedules."""
        before, alone = list(self.scheduler.waiting), self.scheduler._fault_isolation.solo_request()
        self.was_fetching = self.host is not None and bool(self.host.fetches)
        plan = self.scheduler.plan()
        assert plan.has_work or self.in_flight or not self.scheduler.has_work, (
            "no request makes progress"
        )
        records = {record.slot: record.request for record in self.scheduler.running}
        for admission in plan.admitted:
            slot = admission.slot
            request = self.owners[slot] = records[slot]
            assert admission == Admission(
                slot,
                admission.length,
                tuple(request.tokens),
                request.num_prompt,
                request.sampling,
                request.seed,
                request.sibling,
                request.stop_ids,
            )
        for request, span in self.spans(plan):
            assert records[span.slot] is request, "a slot serves another request"
            drafter = self.scheduler.drafters.get(request.method, Drafter())
            if span.method is not None:
                assert span.method == drafter.device
            if drafter.host is not None and drafter.device is None:
                assert TAIL not in span.tokens
            assert span.num_drafts <= min(request.num_drafts, self.limits.num_drafts)
        used = num_rows(plan.spans, plan.num_verified)
        assert used <= self.limits.max_num_batched_tokens, "the token budget is exceeded"
        if alone is None:
            self._check_overtaken(before, [self.owners[a.slot] for a in plan.admitted])
        return plan

    def _check_overtaken(self, waiting: list[Request], admitted: list[Request]) -> None:
        """Check the requests that others overtook: each waits for a running request to fill the
        cache with at least half of its remaining work."""
        if not admitted:
            return
        known = [request for request in waiting if request.status is Status.WAITING]
        last = waiting.index(admitted[-1])
        if self.host is not None and (self.host.fetches or self.was_fetching):
            return  # it may also wait for its own prefix, or another's, to be brought back
        for request in [r for r in known if waiting.index(r) < last]:
            assert self.scheduler.prefix_caching, "a request was overtaken"
            size, done = self.limits.page_size, self.cached(request)
            shared = max(_shared(request, other) for other in running(self)) // size * size
            assert 2 * (shared - done) >= len(request.tokens) - done, "it waits for too little"

    def cached(self, request: Request) -> int:
        """Return the number of positions that the request would take from the cache."""
        size, tokens = self.limits.page_size, request.tokens
        keys: list[bytes] = []
        for end in range(size, len(tokens), size):
            keys.append(self.pool.key(keys[-1] if keys else b"", tokens[end - size : end]))
        return max(border * size for border in range(len(keys) + 1) if self._begins(keys[:border]))

    def _begins(self, keys: list[bytes]) -> bool:
        """Whether a sequence can begin after pages with these keys."""
        position = len(keys) * self.limits.page_size
        for group in self.pool.groups:
            first = 0 if group.window is None else max(position + 1 - group.window, 0)
            seen = keys[first // self.limits.page_size :]
            if any(group.lookup(key) is None for key in seen):
                return False
        return True

    def launch(self) -> Plan:
        plan = self.plan()
        if plan.spans:
            self.in_flight.append((plan, self.device.run(plan, self.accept)))
        elif plan.host is not None:
            self.device.apply(plan)
        self.check()
        return plan

    def collect(self) -> list[TokenEvent]:
        plan, result = self.in_flight.popleft()
        return self._checked(self.scheduler.commit(plan, result))

    def _checked(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Check that events add up to the answers, and report each answer's start and end once."""
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
        """Let the plan's step fail: before it starts (done=0), after its admissions and pages (1),
        or after its end (2)."""
        if done == 1:
            self.device.apply(plan)
        if done == 2:
            self.device.run(plan, self.accept)
        live = [r for r in self.requests_of(plan) if r.status is not Status.FINISHED]
        self.failures += bool(plan.spans)
        self.failed_alone.update(live if len(live) == 1 else ())
        return self._checked(self.scheduler.cancel(plan, "The cause."))

    def step(self) -> list[TokenEvent]:
        """Step as the engine does for a caller that continues after an error."""
        plan = self.plan()
        if any(self.faulty(request, span) for request, span in self.spans(plan)):
            return self.cancel(plan, self.failures % 3)
        if plan.spans:
            self.in_flight.append((plan, self.device.run(plan, self.accept)))
        elif plan.host is not None:
            self.device.apply(plan)
        self.check()
        if not self.in_flight or (plan.spans and len(self.in_flight) < self.depth):
            return []
        return self.collect()

    def check(self) -> None:
        check_scheduler(self.scheduler)

    def drain(self, max_steps: int = 2000) -> list[TokenEvent]:
        """Step until no work is left; return all events."""
        events: list[TokenEvent] = []
        steps = 0
        while self.scheduler.has_work or self.in_flight:
            events += self.step()
            steps += 1
            assert steps < max_steps, "the scheduler never becomes idle"
        assert all(group.available == group.capacity for group in self.pool.groups)
        return events

    def check_answers(self) -> None:
        for request in self.requests:
            expected, reason = answer(request, self.limits.max_model_len)
            assert request.status is Status.FINISHED
            scored = scores_prompt(request)
            cut = request.finish_reason in ("abort", "error")
            if not cut or not scored:
                positions = range(1, request.num_prompt) if scored else ()
                scores = [score_of(request, p) for p in positions]
                assert request.prompt_logprobs == ([None, *scores] if scored else [])
            if cut:
                assert request.output_ids == expected[: request.num_output]
            else:
                assert (request.output_ids, request.finish_reason) == (expected, reason)


def _shared(request: Request, other: Request) -> int:
    """Return the length of the common prefix, the last token of each request left out."""
    pairs = list(zip(request.tokens[:-1], other.tokens[:-1], strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def running(world: World) -> list[Request]:
    return [record.request for record in world.scheduler.running]
