"""Engine.step(): who runs, what is proposed, what the target says, what became of it."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.admission import check_prompt, check_sampling, choose_method
from strobe.engine.build import Parts, Resolved, build, resolve
from strobe.engine.outcomes import EngineStats
from strobe.engine.scheduler import Scheduler
from strobe.request import USUAL, FinishReason, Place, Request
from strobe.runner.batch import Layout, Shape
from strobe.runner.buckets import verified_rows
from strobe.runner.graphs import Eager
from strobe.runner.pending import PendingStep, Verdict
from strobe.runner.runner import Output
from strobe.runner.state import Simulated
from strobe.sampling.grammar import GrammarWalk
from strobe.sampling.state import SamplingMode
from strobe.sampling_params import SamplingParams, Speculation, StructuredOutputs
from strobe.spec.adaptive import AdaptiveBudget
from strobe.spec.allocate import verified_drafts
from strobe.spec.budget import Budget
from strobe.spec.dflash import DFlashProposer
from strobe.step import Plan, StepResult, TokenEvent
from strobe.transfer import download, upload


class Engine:
    """Requests in, tokens out. One thread; nothing here knows text."""

    def __init__(
        self,
        setup: EngineConfig | Resolved,
        *,
        parts: Parts | None = None,
        budget: Budget | None = None,
        simulated_acceptance: Simulated | None = None,
    ):
        """setup: settings, or what they were resolved to already. parts: made elsewhere (tests swap
        in a scripted proposer). budget: how many drafts requests verify in a step.
        simulated_acceptance: what drafting steps shall bring, whatever the target says. Raises
        ValueError for settings that do not fit.
        """
        self.resolved = resolve(setup) if isinstance(setup, EngineConfig) else setup
        self.config, self.limits = self.resolved.config, self.resolved.limits
        self.parts = parts or build(self.resolved)
        self.runner, self.proposers = self.parts.runner, self.parts.proposers
        self.state, self.sampling = self.parts.state, self.parts.sampling
        self.graphs, self.grammars = self.parts.graphs, self.parts.grammars
        self.scheduler = Scheduler(
            self.limits,
            self.parts.pool,
            host=self.proposers.on_host,
            prefix_caching=self.config.enable_prefix_caching,
            budget=budget or self._budget(),
        )
        self.depth = self.resolved.choice.overlap
        self.simulated_acceptance = simulated_acceptance
        self.mark: Callable[[str], None] = lambda name: None
        """Called within each launch with "start", "draft" and "verify", as each is queued."""
        self._pending: deque[PendingStep] = deque()
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._numbers = itertools.count()
        self._done = 0.0

    def _budget(self) -> Budget:
        """An adaptive one where something is drafted on the device."""
        drafter, most = self.proposers.all.get("dflash"), self.limits.num_drafts
        if not (self.config.adaptive and most and isinstance(drafter, DFlashProposer)):
            return Budget()
        rows = functools.partial(verified_rows, self.runner.buckets)
        beside = self.limits.max_mixed_tokens or self.limits.max_num_batched_tokens
        return AdaptiveBudget(*drafter.widths_for(most), rows, beside, self.limits.max_num_seqs)

    def step(self) -> list[TokenEvent]:
        """Launch the next step, and take in the oldest once `overlap` are in flight."""
        plan = self.scheduler.plan()
        launched = not plan.spans
        try:
            if not launched:
                self._save_states(plan)
                self._pending.append(self.launch(plan))
                launched = True
            if not self._pending or (plan.spans and len(self._pending) < self.depth):
                return []
            result = self._result(self._pending[0])
            events = self.scheduler.commit(self._pending[0].plan, result)
            self._pending.popleft()
            return events
        except BaseException as error:
            if ended := self._cancel(plan, launched, f"{type(error).__name__}: {error}"):
                return ended
            raise

    def _save_states(self, plan: Plan) -> None:
        """Keep the recurrent states of a request that runs alone: if this step of it fails, too,
        it goes on from them."""
        self._saved = []
        if self.parts.states is not None and self.scheduler.alone is not None:
            self._saved = self.parts.states.save(plan.spans[0].slot)

    def _cancel(self, plan: Plan, launched: bool, error: str) -> list[TokenEvent]:
        """Give up a step that failed: a launch by itself; but all steps in flight where a result
        could not be taken in, or grammars stand where no step has left them."""
        if self.parts.states is not None:
            self.parts.states.restore(self._saved)
        if not launched and all(pending.followed is not None for pending in self._pending):
            return self.scheduler.cancel(plan, error)
        self._pending.clear()
        return self.scheduler.cancel_all(error)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> PendingStep:
        """Run one plan on the device; nothing here waits for a result, unless a grammar must."""
        began = time.perf_counter()
        self._admit(plan)
        self.mark("start")
        slots = [span.slot for span in plan.spans]
        mode, shape = self.sampling.mode(slots), self.runner.shape_of(plan.spans, plan.verified)
        drafts, margins = self.proposers.propose(plan, shape)
        self.mark("draft")
        walk, told = None, None if margins is None else download(margins)
        if mode.grammar:
            plan, drafts, walk = self._constrain(plan, drafts)
        layout, bounds = self._lay_out(plan, shape, margins), self.runner.bounds(plan.spans)
        graphs = self.graphs if self.runner.captured(layout) else Eager()

        def forward(packed: Tensor, drafts: Tensor | None) -> Output:
            batch = self.state.place(layout.over(packed), drafts, bounds)
            return self.runner.keep(self.runner.forward(batch))

        def verify(packed: Tensor, *given: Tensor | None) -> Verdict:
            return self.verify(layout.over(packed), bounds, mode, output, *given)

        output, masks, errors = None, None, dict[int, str]()
        if walk is not None:  # masks are computed while the target runs
            output = graphs.run(("forward", layout.shape), forward, layout.packed, drafts)
            masks, errors = self._masks(walk, layout.shape)
        verdict = graphs.run((mode, layout.shape), verify, layout.packed, drafts, masks)
        self.mark("verify")
        tops = self.sampling.top_logprobs(slots) if mode.logprobs is not None else {}
        return PendingStep(plan, verdict, tops, errors, layout, told, began)

    def _admit(self, plan: Plan) -> None:
        """Take over what is new in a plan. Raises AssertionError for one that cannot be run."""
        plan.check(self.limits.max_num_seqs, self.parts.pool.num_pages)
        self.state.apply(plan)
        self.sampling.admit(plan.admitted)
        for one in plan.admitted:
            structured = StructuredOutputs.of(one.sampling.structured_outputs)
            self.grammars.admit(one.slot, structured, one.tokens[one.num_prompt :])

    def verify(
        self,
        layout: Layout,
        bounds: Sequence[int],
        mode: SamplingMode,
        output: Output | None,
        drafts: Tensor | None,
        masks: Tensor | None,
    ) -> Verdict:
        """The device's part of a step behind the drafts, captured where its shape comes again.
        output: the forward's, where that has run: no input, it lies always in one place."""
        batch = self.state.place(layout, drafts, bounds)  # ids, positions and K/V slots of all rows
        output = self.runner.forward(batch) if output is None else output
        sampled = self.runner.sample(output, layout, batch, mode, masks)
        tokens = sampled.tokens.view(-1, layout.shape.logits)
        # Lengths and newest tokens move on by what was kept of the drafts.
        accepted = self.state.accept(layout, batch, tokens, self.simulated_acceptance)
        if mode.processed:
            self.sampling.count(layout.slots, tokens, accepted, layout.active)
        scores = self.runner.score_prompt(output, layout)
        verdict = Verdict(tokens, accepted, sampled.scores, scores)
        self.proposers.observe(batch, output.hidden, verdict)  # drafters' K/V, on the same pages
        return verdict

    def _lay_out(self, plan: Plan, shape: Shape, margins: Tensor | None) -> Layout:
        """The plan's layout, with the drafts that it verifies; of those that the device makes, the
        most promising ones by their margins [S, K]."""
        layout = self.runner.lay_out(plan.spans, shape)
        if plan.verified is None or not shape.drafts:
            return layout
        given = margins, plan.confidence, plan.verified
        drafts = verified_drafts(layout, *given, kernels=self.state.kernels)
        return self.runner.narrow(layout, drafts, shape)

    def _constrain(
        self, plan: Plan, drafts: Tensor | None
    ) -> tuple[Plan, Tensor | None, GrammarWalk]:
        """Walk the grammars along the drafts: the plan and the drafts [S, K] with forced tokens in
        the place of drafts that are not allowed. Waits for results and drafts, which the walk
        reads."""
        for pending in self._pending:
            self._result(pending)
        spans = list(plan.spans)
        made: list[list[int]] = [] if drafts is None else drafts.clamp(min=0).tolist()
        given = [
            (made[i][: s.drafts] if s.method is not None else list(s.tokens[1:]))
            if s.drafts and s.slot in self.grammars
            else []
            for i, s in enumerate(spans)
        ]
        # A chunk in the middle of a prompt gives no token, and its rows stay free.
        walk = self.grammars.walk([span.slot if span.logits else -1 for span in spans], given)
        changed = [i for i, tokens in enumerate(walk.drafts) if tokens != given[i]]
        for i in changed:
            if spans[i].method is None:
                spans[i] = spans[i]._replace(tokens=(spans[i].tokens[0], *walk.drafts[i]))
            else:
                made[i][: len(given[i])] = walk.drafts[i]
        if drafts is not None:  # a copy: the forward's graph may use the memory of the drafter's
            drafts = upload(made, self.state.device) if changed else drafts.clone()
        return plan._replace(spans=tuple(spans)), drafts, walk

    def _masks(self, walk: GrammarWalk, shape: Shape) -> tuple[Tensor, dict[int, str]]:
        """The masks [S * W, words] of all rows, and by span why its request cannot go on. A GPU
        copies them from pinned memory, which torch gives to nobody else until that is done."""
        size = shape.spans, shape.logits, self.grammars.compiler.words
        pinned = self.state.device.type == "cuda"
        masks = torch.empty(size, dtype=torch.int32, pin_memory=pinned)
        errors = self.grammars.fill(walk, masks.numpy())
        return masks.to(self.state.device, non_blocking=True).flatten(0, 1), errors

    def _result(self, pending: PendingStep) -> StepResult:
        """Wait for a step, and have grammars follow its tokens, once."""
        result = pending.result(self._done)
        if not pending.followed:
            pending.followed, self._done = None, pending.done
            for i, span in enumerate(pending.plan.spans):
                if span.logits and span.slot in self.grammars and i not in result.errors:
                    self.grammars.advance(span.slot, result.tokens[i])
            pending.followed = True
        return result

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._pending)

    def add_prompt(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        key: Hashable = None,
        request_id: str | None = None,
        seed: int | None = None,
        place: Place = USUAL,
    ) -> list[Request]:
        """Queue all `n` answers to a prompt. key: what their events call the prompt; request_id: in
        the log. Raises ValueError, naming the value, for what cannot run."""
        add = functools.partial(self.add, prompt_ids, sampling, key=key, place=place)
        requests: list[Request] = []
        for i in range(sampling.n):
            name = f"{request_id}-{i}" if request_id and sampling.n > 1 else request_id
            seed = requests[0].seed if requests else seed
            requests.append(add(sibling=i, seed=seed, request_id=name))
        return requests

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sibling: int = 0,
        seed: int | None = None,
        request_id: str | None = None,
        key: Hashable = None,
        place: Place = USUAL,
    ) -> Request:
        """Queue one answer. sibling: which of a prompt's n answers; seed: used where the sampling
        parameters bring none; key: what its events call the prompt, by default the request's
        number. Raises ValueError, naming the value, for what cannot run."""
        check_prompt(prompt_ids, self.resolved)
        check_sampling(sampling, self.resolved)
        asked = Speculation.of(sampling.speculation)
        method, drafts, off = choose_method(asked, self.resolved, self.proposers.all)
        number = next(self._numbers)
        if sampling.seed is not None:
            seed = sampling.seed
        elif seed is None:
            seed = self.config.seed + number
        ends = () if sampling.ignore_eos else self.resolved.target.eos_ids
        if sampling.structured_outputs is not None:
            self.compile(sampling)
            ends = (*ends, *self.grammars.compiler.tokenizer.eos_tokens)
        request = Request(
            request_id or f"request-{number}",
            prompt_ids,
            sampling,
            seed=seed,
            sibling=sibling,
            stop_ids=frozenset((*ends, *sampling.stop_token_ids)),
            method=method,
            num_drafts=drafts,
            off_reason=off,
            key=number if key is None else key,
            place=place,
        )
        self.scheduler.add(request)
        return request

    def compile(self, sampling: SamplingParams) -> None:
        """Have a request's grammar compiled before it is added; another thread may do so. Raises
        ValueError for one that does not compile."""
        if isinstance(sampling.structured_outputs, StructuredOutputs):
            self.grammars.compiler.compile(sampling.structured_outputs)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: its text met a stop string, or nobody waits for it."""
        self.scheduler.finish(request, reason)

    def forget(self) -> None:
        """Be as if nothing had run: counters, numbers of requests and cached pages. Nothing may be
        running."""
        assert not self.has_work, "requests are running"
        self._numbers = itertools.count()
        self.scheduler.outcomes.stats = EngineStats()
        self.parts.pool.forget()

    def check_device(self) -> None:
        """Raises where a GPU can do nothing more, as after an illegal access."""
        if self.resolved.device.type == "cuda":
            torch.cuda.synchronize(self.resolved.device)

    def check(self) -> None:
        """Raises AssertionError where bookkeeping disagrees, also between host and device."""
        self.scheduler.check()
        for record in self.scheduler.running:
            if not record.in_flight:
                assert int(self.state.cursor[record.slot, 0]) == record.lease.length
