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
from strobe.engine.grammar_walk import WalkedDrafts, walk_drafts
from strobe.engine.scheduler import PrefixCache, Scheduler
from strobe.engine.shadow_mode import ShadowMode
from strobe.models.heads.head import Drafts
from strobe.request import DEFAULT_SCHEDULING, FinishReason, Request, SchedulingOptions
from strobe.runner.buckets import verified_rows
from strobe.runner.layout import Layout, Shape
from strobe.runner.step_ops.torch_step_ops import SimulatedAcceptance
from strobe.runner.step_output import StepOutput
from strobe.runner.verify_step import Verified, VerifyStep
from strobe.sampling.grammar import GrammarWalk
from strobe.sampling.sampling_state import SamplingMode
from strobe.sampling_params import SamplingParams, Speculation, StructuredOutputs
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.allocate import verified_drafts
from strobe.speculation.costs import PrefillCosts
from strobe.speculation.draft_policy import DraftPolicy
from strobe.step import Plan, StepResult, TokenEvent


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
        self.shadow = None
        if self.config.shadow:
            self.shadow = ShadowMode(self.resolved, self.components)
        self.scheduler = self._make_scheduler(draft_policy)
        self.verify_step = VerifyStep(
            runner=self.runner,
            state=self.state,
            sampling=self.sampling,
            graphs=self.graphs,
            observer=self.proposers if self.shadow is None else None,
            simulated_acceptance=simulated_acceptance,
        )
        self.prefill_costs = PrefillCosts()
        if self.components.host_tier is not None:
            self.components.host_tier.prefill_ms = self.prefill_costs.ms
        self.on_launch = on_launch
        self.on_phase: Callable[[str], None] = lambda name: None
        """Called within each launch with "start", "draft" and "verify", as each is queued."""
        self._pending: deque[StepOutput] = deque()
        self._saved: list[tuple[Tensor, Tensor]] = []
        self._reads_drafts = [False] * self.limits.max_num_seqs  # by slot
        self._request_numbers = itertools.count()
        self._last_done = 0.0

    @property
    def max_in_flight(self) -> int:
        """Maximum number of steps in flight. A chain of shadow mode goes on where its last block
        was decided, so each step waits for the one before while answers are scored."""
        if self.shadow is not None and self.shadow.ledger.num_open:
            return 1
        return self.resolved.backends.overlap

    def _make_scheduler(self, draft_policy: DraftPolicy | None) -> Scheduler:
        """Make the scheduler of the engine's parts. draft_policy: None for the settings' own."""
        parts = self.components
        prefix_cache = PrefixCache(
            enabled=self.config.enable_prefix_caching,
            kept_states=parts.kept_states,
            host=parts.host_tier,
        )
        return Scheduler(
            self.limits,
            parts.pool,
            drafters=parts.proposers.drafters,
            prefix_cache=prefix_cache,
            draft_policy=draft_policy or self._make_draft_policy(),
            shadow=None if self.shadow is None else self.shadow.ledger,
        )

    def _make_draft_policy(self) -> DraftPolicy:
        """Make the adaptive policy if a proposer on the device gives margins, else one that
        verifies all drafts."""
        drafter = next(iter(self.proposers.on_device.values()), None)
        max_drafts = self.limits.num_drafts
        if self.shadow is not None:
            return DraftPolicy()
        if not (self.config.adaptive and max_drafts and drafter is not None and drafter.margins):
            return DraftPolicy()
        rows = functools.partial(verified_rows, self.runner.buckets)
        max_mixed = self.limits.max_mixed_tokens or self.limits.max_num_batched_tokens
        widths, block_rows = drafter.widths_for(max_drafts)
        return AdaptiveDraftPolicy(
            widths,
            block_rows,
            rows,
            max_mixed_rows=max_mixed,
            max_requests=self.limits.max_num_seqs,
        )

    def step(self) -> list[TokenEvent]:
        """Launch the next step; commit the oldest one once `overlap` steps are in flight."""
        plan = self.scheduler.plan() if len(self._pending) < self.max_in_flight else Plan()
        launched = not plan.has_work
        try:
            if not launched:
                self._save_states(plan)
                self._launch_next(plan)
                launched = True
            if not self._pending or (plan.spans and len(self._pending) < self.max_in_flight):
                return []
            result = self._result(self._pending[0])
            if self.shadow is not None:
                self.shadow.observe_step(result)
            if self.components.host_tier is not None and not self._pending[0].has_captured:
                self.prefill_costs.observe(self._pending[0].plan, result)
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
        self._saved = []
        if states is not None and self.scheduler.alone is not None and plan.spans:
            self._saved = states.save(plan.spans[0].slot)

    def _launch_next(self, plan: Plan) -> None:
        """Launch a plan, which may have copies only: these have no result to wait for."""
        if plan.spans:
            num_graphs = len(self.graphs)
            output = self.launch(plan)
            output.has_captured = len(self.graphs) > num_graphs
            self._pending.append(output)
            return
        self.on_launch(plan, len(self._pending))
        self._copy_host(plan)
        self.resolved.split.end_step()

    @torch.inference_mode()
    def _copy_host(self, plan: Plan) -> None:
        """Queue a plan's copies between the tiers of the prefix cache."""
        if self.components.host_store is not None:
            self.components.host_store.copy(plan.host)

    def _cancel(self, plan: Plan, launched: bool, error: str) -> list[TokenEvent]:
        """Give up a failed step: only this step if its launch failed; all steps in flight if a
        result could not be committed or grammars are out of step with their requests."""
        if self.components.states is not None:
            self.components.states.restore(self._saved)
        if not launched and not any(output.is_torn for output in self._pending):
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
        proposed = self._propose(plan, shape)
        self.on_phase("draft")
        walked = self._walk_grammars(plan, proposed.tokens) if mode.grammar else None
        drafts = proposed.tokens if walked is None else walked.by_device
        layout = self._lay_out(plan, shape, proposed.margins, walked)
        readers = [i for i, slot in enumerate(slots) if self._reads_drafts[slot]]
        on_host = Drafts(drafts if readers else None, proposed.margins).download()
        verified, errors = self._verify(plan, layout, mode, drafts=drafts, walked=walked)
        self.on_phase("verify")
        self.resolved.split.end_step()
        return StepOutput(
            plan=plan,
            layout=layout,
            verified=verified,
            score_columns=self.sampling.score_columns(slots),
            errors=errors,
            proposed=on_host,
            draft_readers=readers,
            started_at=started,
        )

    def _propose(self, plan: Plan, shape: Shape) -> Drafts:
        """Propose the plan's drafts, and in shadow mode the drafts that are only scored."""
        if self.shadow is not None:
            self.shadow.propose(plan)
        return self.proposers.propose(plan, shape)

    def _verify(
        self,
        plan: Plan,
        layout: Layout,
        mode: SamplingMode,
        *,
        drafts: Tensor | None,
        walked: WalkedDrafts | None,
    ) -> tuple[Verified, dict[int, str]]:
        """Run the target on all rows and verify the drafts; see `VerifyStep.run`. In shadow mode,
        let drafters read the features of the answers that are scored."""
        masks = None if walked is None else functools.partial(self._masks, walked.walk, layout)
        verified, errors = self.verify_step.run(plan.spans, layout, mode, drafts, masks)
        if self.shadow is not None:
            self.shadow.observe(plan, verified)
        return verified, errors

    def follow(self, plan: Plan, in_flight: int) -> None:
        """Run a plan of another engine, which had so many steps in flight."""
        while len(self._pending) > in_flight:
            self._result(self._pending.popleft())
        self._launch_next(plan)

    def _admit(self, plan: Plan) -> None:
        """Apply a plan's admissions, page-table entries and copies of states. Raises AssertionError
        for an invalid plan."""
        groups = self.components.pool.groups
        plan.check(self.limits.max_num_seqs, [group.num_pages for group in groups])
        self._copy_host(plan)
        self.state.apply(plan)
        self.sampling.admit(plan.admitted)
        if self.components.states is not None:
            self.components.states.copy(plan.states)
        for new in plan.admitted:
            structured = StructuredOutputs.of(new.sampling.structured_outputs)
            self.grammars.admit(new.slot, structured, new.tokens[new.num_prompt :])
            speculation = Speculation.of(new.sampling.speculation)
            self._reads_drafts[new.slot] = speculation.return_drafts

    def _walk_grammars(self, plan: Plan, drafts: Tensor | None) -> WalkedDrafts:
        """Walk the grammars along the drafts [S, K]. Waits for the results in flight."""
        for output in self._pending:
            self._result(output)
        return walk_drafts(self.grammars, plan.spans, drafts, self.state.device)

    def _lay_out(
        self, plan: Plan, shape: Shape, margins: Tensor | None, walked: WalkedDrafts | None
    ) -> Layout:
        """Lay out the plan's spans with the drafts to verify: if the plan limits the device's
        drafts, the most likely ones by their margins [S, K]."""
        layout = self.runner.lay_out(plan.spans, shape, None if walked is None else walked.forced)
        if plan.num_verified is None or not shape.max_drafts:
            return layout
        num_drafts = verified_drafts(
            layout,
            margins,
            confidence=plan.confidence,
            count=plan.num_verified,
            ops=self.state.ops,
        )
        return self.runner.narrow(layout, num_drafts, shape)

    def _masks(self, walk: GrammarWalk, layout: Layout) -> tuple[Tensor, dict[int, str]]:
        """Compute the masks [S * W, words] of all rows, and by span the reason that its grammar
        cannot be followed further. A GPU copies the masks from pinned memory, which torch does not
        reuse before the copy is done."""
        size = (layout.shape.spans, layout.shape.max_logits, self.grammars.compiler.words)
        masks = torch.empty(size, dtype=torch.int32, pin_memory=self.state.device.type == "cuda")
        errors = self.grammars.fill(walk, masks.numpy())
        return masks.to(self.state.device, non_blocking=True).flatten(0, 1), errors

    def _result(self, output: StepOutput) -> StepResult:
        """Wait for a step's result and advance the grammars by its tokens, once."""
        result = output.result(self._last_done)
        self._last_done = max(self._last_done, output.done_at)
        if self.shadow is not None:
            self.shadow.read()  # drafts follow the grammars from where they stood at the launch
        output.advance_grammars(self.grammars)
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
        speculation = Speculation.of(sampling.speculation)
        methods = self.proposers.drafters
        method, num_drafts, off_reason = choose_method(speculation, self.resolved, methods)
        number = next(self._request_numbers)
        seeds = sampling.seed, seed, self.config.seed + number
        seed = next(value for value in seeds if value is not None)
        end_ids = () if sampling.ignore_eos else self.resolved.target.eos_ids
        if sampling.structured_outputs is not None:
            self.compile(sampling)
            end_ids = (*end_ids, *self.grammars.compiler.tokenizer.eos_tokens)
        request = Request(
            id=request_id or f"request-{number}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=seed,
            sibling=sibling,
            stop_ids=frozenset((*end_ids, *sampling.stop_token_ids)),
            method=method,
            num_drafts=num_drafts,
            off_reason=off_reason,
            always_drafts=speculation.always,
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
        """Clear counters, request numbers, the prefix cache and the costs of prompts' rows; the
        engine must be idle."""
        assert not self.has_work, "requests are running"
        self._request_numbers = itertools.count()
        self.scheduler.reset_stats()
        self.prefill_costs.reset()
        self.components.clear_prefix_cache()

    def check_device(self) -> None:
        """Raise if a GPU is unusable, as after an illegal access, or another rank has ended."""
        self.resolved.split.check()
        if self.resolved.device.type == "cuda":
            torch.cuda.synchronize(self.resolved.device)
