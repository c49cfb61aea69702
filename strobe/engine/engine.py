"""Engine.step(): who runs, what is proposed, what the target says, what became of it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import torch

from strobe.config import EngineConfig
from strobe.engine.build import Parts, Resolved, build, resolve
from strobe.engine.scheduler import DraftLength, Scheduler, full_length
from strobe.engine.stats import EngineStats
from strobe.request import FinishReason, Request
from strobe.runner.batch import Inputs
from strobe.runner.collect import Flight
from strobe.runner.picking import GREEDY, How
from strobe.sampling_params import SamplingParams, Speculation, StructuredOutputs
from strobe.spec.verify import settle, verify
from strobe.step import Plan, TokenEvent, Verdict


class Engine:
    """Requests in, tokens out. One thread; nothing here knows text."""

    def __init__(
        self,
        setup: EngineConfig | Resolved,
        *,
        parts: Parts | None = None,
        draft_length: DraftLength = full_length,
        simulated_acceptance: float | None = None,
    ):
        """setup: settings, or what they were resolved to already. parts: made elsewhere (tests swap
        in a scripted proposer). draft_length: how many drafts a request verifies in a step.
        simulated_acceptance: tokens that each drafting step shall bring on average, whatever the
        target says: for measurements of speed only. Raises ValueError for settings that do not fit.
        """
        self.resolved = resolve(setup) if isinstance(setup, EngineConfig) else setup
        self.config, self.limits = self.resolved.config, self.resolved.limits
        self.parts = parts or build(self.resolved)
        self.runner, self.proposers = self.parts.runner, self.parts.proposers
        self.state, self.picking = self.parts.state, self.parts.picking
        self.graphs = self.parts.graphs
        held = self.proposers.proposers
        self.scheduler = Scheduler(
            self.limits,
            self.parts.pool,
            host_methods={name for name, p in held.items() if p.needs_host_tokens},
            prefix_caching=self.config.enable_prefix_caching,
            recurrent=self.parts.states is not None,
            draft_length=draft_length,
        )
        self.grammars = self.parts.picking.grammars
        self.depth = self.resolved.choice.overlap
        self.simulated_acceptance = simulated_acceptance
        self.mark: Callable[[str], None] = lambda name: None
        """Called within each launch with "start", "draft" and "verify", as each is queued."""
        self._flying: deque[Flight] = deque()
        self._numbers = itertools.count()

    def step(self) -> list[TokenEvent]:
        """Launch the next step, collect the oldest once `overlap` are in flight, tell the news."""
        plan = self.scheduler.plan()
        if plan.spans:
            try:
                self._flying.append(self.launch(plan))
            except BaseException:
                self.scheduler.cancel(plan)
                raise
        if not self._flying or (plan.spans and len(self._flying) < self.depth):
            return []
        oldest = self._flying[0]
        verdict = oldest.land()
        self._flying.popleft()
        return self.scheduler.commit(oldest.plan, verdict)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Run one plan on the device; nothing here waits for a result."""
        self.state.apply(plan)
        self.picking.apply(plan)
        self.mark("start")
        proposal = self.proposers.propose(plan)  # tokens only
        self.mark("draft")
        plan = plan.shorten(proposal.known)
        proposal = self.picking.mend(plan, proposal)  # by what grammars force
        inputs, how = self.runner.arrange(plan, proposal), self.picking.how(plan)
        if how.by_host or not self.runner.replays(inputs):
            verdict = self.decide(inputs, how, plan)
        else:
            verdict = self.graphs.run(how, inputs, lambda inputs: self.decide(inputs, how, plan))
        self.mark("verify")
        return Flight(plan, verdict)

    def decide(self, inputs: Inputs, how: How, plan: Plan) -> Verdict:
        """The device's part of a step behind the drafts. Recorded in a graph unless `how` says that
        the host has a hand in it, which alone reads the plan."""
        batch = self.runner.prepare(inputs)  # one ragged layout
        out = self.runner.forward(batch, greedy=how == GREEDY)  # features of the captured layers
        self.proposers.observe(batch, out.hidden)  # the drafter's K/V, on the same pages
        picking = self.picking.of(batch, how, plan)  # rules, noise and filters of each row
        if how.by_host:
            verdict = verify(out, batch, picking, self.simulated_acceptance)
            self.picking.advance(plan, batch, verdict)  # before lengths: it may find no memory
            self.state.advance(batch, verdict)  # lengths and tails for the next step
        else:
            verdict = settle(out, batch, picking, self.state, self.simulated_acceptance)
        return verdict._replace(prompt_scores=out.prompt_scores)

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._flying)

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        sibling: int = 0,
        seed: int | None = None,
        request_id: str | None = None,
    ) -> Request:
        """Queue one answer. sibling: which of a prompt's n answers; seed: used where the sampling
        parameters bring none. Raises ValueError, naming the value, for what cannot run."""
        self._check_prompt(prompt_ids)
        self._check_sampling(sampling)
        method, drafts, off = self._choose(Speculation.of(sampling.speculation))
        number = next(self._numbers)
        if sampling.seed is not None:
            seed = sampling.seed
        elif seed is None:
            seed = self.config.seed + number
        ends = () if sampling.ignore_eos else self.resolved.target.eos_ids
        if sampling.structured_outputs is not None:
            ends = (*ends, *self.grammars.tokenizer.eos_tokens)
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
        )
        self.grammars.follow(request)
        self.scheduler.add(request)
        return request

    def compile(self, sampling: SamplingParams) -> None:
        """Have a request's grammar compiled before it is added; another thread may do so. Raises
        ValueError for one that does not compile."""
        if isinstance(sampling.structured_outputs, StructuredOutputs):
            self.grammars.compile(sampling.structured_outputs)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request from outside: its text met a stop string, or nobody waits for it."""
        self.scheduler.finish(request, reason)

    def forget(self) -> None:
        """Be as if nothing had run: counters, numbers of requests and cached pages. Nothing may be
        running."""
        assert not self.has_work, "requests are running"
        self._numbers = itertools.count()
        self.scheduler.stats = EngineStats()
        self.parts.pool.forget()

    def check(self) -> None:
        """Raises AssertionError where bookkeeping disagrees, also between host and device."""
        self.scheduler.check()
        for record in self.scheduler.running:
            if not record.in_flight:
                assert int(self.state.cursor[record.slot, 0]) == record.lease.length

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("The prompt is empty; give it at least one token.")
        limit = self.limits.max_model_len
        if len(prompt_ids) >= limit:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, but max_model_len is {limit} with the "
                f"answer; shorten it to {limit - 1} tokens or raise max_model_len."
            )
        self._check_ids("The prompt", prompt_ids)

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_ids("logit_bias", list(sampling.logit_bias or ()))
        structured = StructuredOutputs.of(sampling.structured_outputs)
        if structured is not None:
            self._check_ids("structured_outputs.after", structured.after)
            self._check_ids("structured_outputs.opener", structured.opener_ids)
        size = self.resolved.target.decoder.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            top = getattr(sampling, name) or 0
            if top > size:
                raise ValueError(
                    f"{name} is {top}, but the vocabulary has {size} tokens; ask for at most that."
                )

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        size = self.resolved.target.decoder.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(i for i in ids if not 0 <= i < size)
            raise ValueError(
                f"{what} holds token id {wrong}, but the vocabulary has ids 0 to {size - 1}."
            )

    def _choose(self, asked: Speculation) -> tuple[str, int, str | None]:
        """(method, drafts per step, why not) for one request."""
        most = self.limits.num_drafts
        method = asked.method or self.resolved.method
        if asked.num_drafts is not None and asked.num_drafts > most:
            raise ValueError(
                f"speculation.num_drafts is {asked.num_drafts}, but this engine verifies at most "
                f"{most} drafts per step; ask for 0 to {most}."
            )
        if method == "none" or asked.num_drafts == 0:
            if asked.method == "none" or asked.num_drafts == 0:
                return "none", 0, "the request turned speculation off"
            if self.resolved.draft is None:
                return "none", 0, "no drafter is loaded"
            return "none", 0, "the engine's method is none"
        if method not in self.proposers.proposers or not most:
            mend = "start the engine with a drafter" if method == "dflash" else "give num_drafts"
            raise ValueError(
                f"speculation.method is {method!r}, but this engine cannot draft so; {mend}."
            )
        return method, most if asked.num_drafts is None else asked.num_drafts, None
