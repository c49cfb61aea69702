"""The engine: plan a step, propose drafts, verify them with the target, commit the result."""

from __future__ import annotations

import functools
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from strobe.config import EngineConfig
from strobe.counters import EngineStats
from strobe.engine.admission import check_prompt, check_sampling, choose_method
from strobe.engine.build import Components, ResolvedConfig, build, resolve
from strobe.engine.scheduler import Scheduler
from strobe.models.heads.base import Drafts
from strobe.request import DEFAULT_SCHEDULING, FinishReason, Request, SchedulingOptions
from strobe.runner.batch import Layout, Shape
from strobe.runner.buckets import verified_rows
from strobe.runner.graphs import Eager
from strobe.runner.runner import Outputs
from strobe.runner.state import SimulatedAcceptance
from strobe.runner.step_output import StepOutput, Verified
from strobe.sampling.grammar import GrammarWalk
from strobe.sampling.state import SamplingMode
from strobe.sampling_params import SamplingParams, Speculation, StructuredOutputs
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.allocate import verified_drafts
from strobe.speculation.draft_policy import DraftPolicy
from strobe.step import Plan, Span, StepResult, TokenEvent
from strobe.transfer import download, upload


class Engine:
    """Requests in, tokens out. One thread; nothing here knows text."""

    def __init__(
        self,
        config: EngineConfig | ResolvedConfig,
        *,
        components: Components | None = None,
        draft_policy: DraftPolicy | None = None,
        simulated_acceptance: SimulatedAcceptance | None = None,
        on_launch: Callable[[Plan, int], None] = lambda plan, in_flight: None,
    ):
        """config: settings, resolved or not. components: parts built elsewhere (tests swap in a
        scripted proposer). draft_policy: decides the number of drafts per step.
        simulated_acceptance: the number of drafts to accept, regardless of the target, to measure
        speed. on_launch: called with each plan and the number of steps in flight, before it runs.
        Raises ValueError for settings that do not fit."""
        self.resolved = resolve(config) if isinstance(config, EngineConfig) else config
        self.config = self.resolved.config
        self.limits = self.resolved.limits
        self.components = components or build(self.resolved)
        self.runner = self.components.runner
        self.proposers = self.components.proposers
        self.state = self.components.state
        self.sampling = self.components.sampling
        self.graphs = self.components.graphs
        self.grammars = self.components.grammars
        self.scheduler = Scheduler(
            self.limits,
            self.components.pool,
            drafters=self.proposers.drafters,
            prefix_caching=self.config.enable_prefix_caching,
            draft_policy=draft_policy or self._make_draft_policy(),
        )
        self.max_in_flight = self.resolved.backends.overlap
        self.simulated_acceptance = simulated_acceptance
        self.on_launch = on_launch
        self.on_phase: Callable[[str], None] = lambda name: None
        """Called within each launch with "start", "draft" and "verify", as each is queued."""
        self._pending: deque[StepOutput] = deque()
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._reads_drafts = [False] * self.limits.max_num_seqs  # by slot
        self._request_numbers = itertools.count()
        self._last_done = 0.0

    def _make_draft_policy(self) -> DraftPolicy:
        """Make the adaptive policy if a proposer on the device gives margins, else one that
        verifies all drafts."""
        drafter = next(iter(self.proposers.on_device.values()), None)
        max_drafts = self.limits.num_drafts
        if not (self.config.adaptive and max_drafts and drafter is not None and drafter.margins):
            return DraftPolicy()
        rows = functools.partial(verified_rows, self.runner.buckets)
        max_mixed = self.limits.max_mixed_tokens or self.limits.max_num_batched_tokens
        widths = drafter.widths_for(max_drafts)
        return AdaptiveDraftPolicy(*widths, rows, max_mixed, self.limits.max_num_seqs)

    def step(self) -> list[TokenEvent]:
        """Launch the next step; commit the oldest one once `overlap` steps are in flight."""
        plan = self.scheduler.plan()
        launched = not plan.spans
        try:
            if not launched:
                self._save_states(plan)
                self._pending.append(self.launch(plan))
                launched = True
            if not self._pending or (plan.spans and len(self._pending) < self.max_in_flight):
                return []
            result = self._result(self._pending[0])
            events = self.scheduler.commit(self._pending[0].plan, result)
            self._pending.popleft()
            return events
        except BaseException as error:
            self.resolved.split.fail(error)
            if ended := self._cancel(plan, launched, f"{type(error).__name__}: {error}"):
                return ended
            raise

    def _save_states(self, plan: Plan) -> None:
        """Save the recurrent states of a request that runs alone, to resume from if this step
        fails, too."""
        states = self.components.states
        alone = self.scheduler.alone
        self._saved = [] if states is None or alone is None else states.save(plan.spans[0].slot)

    def _cancel(self, plan: Plan, launched: bool, error: str) -> list[TokenEvent]:
        """Give up a failed step: only this step if its launch failed; all steps in flight if a
        result could not be committed or grammars are out of step with their requests."""
        if self.components.states is not None:
            self.components.states.restore(self._saved)
        if not launched and all(step.grammars_advanced is not None for step in self._pending):
            return self.scheduler.cancel(plan, error)
        self._pending.clear()
        return self.scheduler.cancel_all(error)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> StepOutput:
        """Run one plan on the device. Waits for no result unless a grammar needs one."""
        started = time.perf_counter()
        self.on_launch(plan, len(self._pending))
        self._admit(plan)
        self.on_phase("start")
        slots = [span.slot for span in plan.spans]
        mode = self.sampling.mode(slots)
        shape = self.runner.shape_of(plan.spans, plan.num_verified)
        drafts, margins = self.proposers.propose(plan, shape)
        self.on_phase("draft")
        host_margins = None if margins is None else download(margins)
        spans = plan.spans
        walk = None
        if mode.grammar:
            spans, drafts, walk = self._walk_grammars(spans, drafts)
        readers = {i: span for i, span in enumerate(spans) if self._reads_drafts[span.slot]}
        host_drafts = download(drafts) if readers and drafts is not None else None
        layout = self._lay_out(plan, spans, shape, margins)
        verified, errors = self._verify(layout, mode, spans, drafts, walk)
        self.on_phase("verify")
        self.resolved.split.end_step()
        columns = self.sampling.score_columns(slots)
        host = Drafts(host_drafts, host_margins)
        return StepOutput(plan, layout, verified, columns, errors, host, readers, started)

    def follow(self, plan: Plan, in_flight: int) -> None:
        """Run a plan of another engine, which had so many steps in flight."""
        while len(self._pending) > in_flight:
            self._result(self._pending.popleft())
        self._pending.append(self.launch(plan))

    def _admit(self, plan: Plan) -> None:
        """Apply a plan's admissions and page-table entries. Raises AssertionError for an invalid
        plan."""
        plan.check(self.limits.max_num_seqs, self.components.pool.num_pages)
        self.state.apply(plan)
        self.sampling.admit(plan.admitted)
        for new in plan.admitted:
            structured = StructuredOutputs.of(new.sampling.structured_outputs)
            self.grammars.admit(new.slot, structured, new.tokens[new.num_prompt :])
            speculation = Speculation.of(new.sampling.speculation)
            self._reads_drafts[new.slot] = speculation.return_drafts

    def _verify(
        self,
        layout: Layout,
        mode: SamplingMode,
        spans: Sequence[Span],
        drafts: Tensor | None,
        walk: GrammarWalk | None,
    ) -> tuple[Verified, dict[int, str]]:
        """Run the target over the layout and verify the drafts [S, K], in one graph; with grammars
        in two, so that their masks are computed while the target runs. Returns also, by span, why
        its grammar cannot be followed further."""
        graphs = self.graphs if self.runner.is_captured(layout) else Eager()
        key = (mode, layout.shape)
        bounds = self.runner.bounds(spans)

        def forward(packed: Tensor, drafts: Tensor | None) -> Outputs:
            here = layout.with_packed(packed)
            placed = self.state.place(here, drafts)
            return placed, *self.runner.forward(self.state.make_batch(here, placed, bounds))

        def verify(packed: Tensor, drafts: Tensor | None) -> Verified:
            return self.verify(layout.with_packed(packed), mode, forward(packed, drafts), None)

        def forward_alone(packed: Tensor, drafts: Tensor | None) -> Outputs:
            return self.runner.copy_out(forward(packed, drafts))

        def verify_masked(packed: Tensor, masks: Tensor | None) -> Verified:
            return self.verify(layout.with_packed(packed), mode, outputs, masks)

        if walk is None:
            return graphs.run(key, verify, layout.packed, drafts), {}
        outputs = graphs.run(("forward", layout.shape), forward_alone, layout.packed, drafts)
        masks, errors = self._masks(walk, layout.shape)
        return graphs.run(key, verify_masked, layout.packed, masks), errors

    def verify(
        self, layout: Layout, mode: SamplingMode, outputs: Outputs, masks: Tensor | None
    ) -> Verified:
        """Sample the target's tokens, accept drafts, and show the target's features to the
        drafters. masks [S * W, words]: of grammars."""
        placed, residual, features = outputs
        batch = self.state.make_batch(layout, placed)
        sampled = self.runner.sample(residual, layout, batch, mode, masks)
        tokens = sampled.tokens.view(-1, layout.shape.max_logits)
        # Lengths and newest tokens advance by the accepted drafts.
        accepted = self.state.accept(layout, batch, tokens, self.simulated_acceptance)
        if mode.processed:
            self.sampling.count_tokens(layout.slots, tokens, accepted, layout.active)
        scores = self.runner.score_prompt(residual, layout)
        self.proposers.observe(batch, features)  # drafters' K/V, on the same pages
        return sampled, accepted, scores

    def _lay_out(
        self, plan: Plan, spans: Sequence[Span], shape: Shape, margins: Tensor | None
    ) -> Layout:
        """Lay out the plan's spans with the drafts to verify: if the plan limits the device's
        drafts, the most likely ones by their margins [S, K]."""
        layout = self.runner.lay_out(spans, shape)
        if plan.num_verified is None or not shape.max_drafts:
            return layout
        ranking = margins, plan.confidence, plan.num_verified
        num_drafts = verified_drafts(layout, *ranking, kernels=self.state.kernels)
        return self.runner.narrow(layout, num_drafts, shape)

    def _walk_grammars(
        self, planned: Sequence[Span], drafts: Tensor | None
    ) -> tuple[list[Span], Tensor | None, GrammarWalk]:
        """Walk the grammars along the drafts. Returns the spans and drafts [S, K] to verify, with
        forced tokens in place of drafts that are not allowed. Waits for the results in flight and
        for the drafts, which the walk reads."""
        for output in self._pending:
            self._result(output)
        spans = list(planned)
        draft_tokens: list[list[int]] = [] if drafts is None else drafts.clamp(min=0).tolist()
        host_drafts = [
            draft_tokens[i][: s.num_drafts] if s.method else list(s.tokens[s.num_context_rows :])
            for i, s in enumerate(spans)
        ]
        # A chunk in the middle of a prompt gives no token, and its rows stay free.
        slots = [span.slot if span.num_logits else -1 for span in spans]
        walk = self.grammars.walk(slots, host_drafts)
        changed = [i for i, tokens in enumerate(walk.drafts) if tokens != host_drafts[i]]
        for i in changed:
            if spans[i].method is None:
                spans[i] = spans[i]._replace(tokens=(spans[i].tokens[0], *walk.drafts[i]))
            else:
                draft_tokens[i][: len(host_drafts[i])] = walk.drafts[i]
        if drafts is not None:  # a copy: the forward's graph may use the memory of the drafter's
            drafts = upload(draft_tokens, self.state.device) if changed else drafts.clone()
        return spans, drafts, walk

    def _masks(self, walk: GrammarWalk, shape: Shape) -> tuple[Tensor, dict[int, str]]:
        """Compute the masks [S * W, words] of all rows, and by span the reason that its grammar
        cannot be followed further. A GPU copies them from pinned memory, which torch does not reuse
        before the copy is done."""
        size = shape.spans, shape.max_logits, self.grammars.compiler.words
        masks = torch.empty(size, dtype=torch.int32, pin_memory=self.state.device.type == "cuda")
        errors = self.grammars.fill(walk, masks.numpy())
        return masks.to(self.state.device, non_blocking=True).flatten(0, 1), errors

    def _result(self, output: StepOutput) -> StepResult:
        """Wait for a step's result and advance the grammars by its tokens, once."""
        result = output.result(self._last_done)
        if not output.grammars_advanced:
            output.grammars_advanced = None
            self._last_done = output.done_at
            for i, span in enumerate(output.plan.spans):
                if span.num_logits and i not in result.errors:
                    self.grammars.advance(span.slot, result.tokens[i])
            output.grammars_advanced = True
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
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> list[Request]:
        """Queue all `n` answers to a prompt. key: name of the prompt in events; request_id: name in
        the log. Raises ValueError, naming the value, for a request that cannot run."""
        add = functools.partial(self.add, prompt_ids, sampling, key=key, scheduling=scheduling)
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
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> Request:
        """Queue one answer. sibling: index among the prompt's n answers; seed: used if the sampling
        parameters have none; key: name of the prompt in events, by default the request's number.
        Raises ValueError, naming the value, for a request that cannot run."""
        check_prompt(prompt_ids, self.resolved)
        check_sampling(sampling, self.resolved)
        asked = Speculation.of(sampling.speculation)
        methods = self.proposers.drafters
        method, num_drafts, off_reason = choose_method(asked, self.resolved, methods)
        number = next(self._request_numbers)
        seeds = sampling.seed, seed, self.config.seed + number
        seed = next(value for value in seeds if value is not None)
        end_ids = () if sampling.ignore_eos else self.resolved.target.eos_ids
        if sampling.structured_outputs is not None:
            self.compile(sampling)
            end_ids = (*end_ids, *self.grammars.compiler.tokenizer.eos_tokens)
        request = Request(
            request_id or f"request-{number}",
            prompt_ids,
            sampling,
            seed=seed,
            sibling=sibling,
            stop_ids=frozenset((*end_ids, *sampling.stop_token_ids)),
            method=method,
            num_drafts=num_drafts,
            off_reason=off_reason,
            key=number if key is None else key,
            scheduling=scheduling,
        )
        self.scheduler.add(request)
        return request

    def compile(self, sampling: SamplingParams) -> None:
        """Compile a request's grammar before it is added, from any thread. Raises ValueError if it
        does not compile."""
        if isinstance(sampling.structured_outputs, StructuredOutputs):
            self.grammars.compiler.compile(sampling.structured_outputs)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: its text met a stop string, or its client disconnected."""
        self.scheduler.finish(request, reason)

    def reset(self) -> None:
        """Clear counters, request numbers and the prefix cache; the engine must be idle."""
        assert not self.has_work, "requests are running"
        self._request_numbers = itertools.count()
        self.scheduler.results.stats = EngineStats()
        self.components.pool.clear_cache()

    def check_device(self) -> None:
        """Raise if a GPU is unusable, as after an illegal access, or another rank has ended."""
        self.resolved.split.check()
        if self.resolved.device.type == "cuda":
            torch.cuda.synchronize(self.resolved.device)
