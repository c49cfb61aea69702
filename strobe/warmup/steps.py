"""What is made on first use, made before the first request: kernels, captured steps, buffers."""

from __future__ import annotations

import itertools
import logging
import time
from contextlib import suppress

from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.runner.buckets import REPLAYED_ROWS, Buckets
from strobe.sampling_params import SamplingParams
from strobe.spec.adaptive import AdaptiveBudget, Choice
from strobe.spec.budget import Budget
from strobe.warmup.forced import Forced

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_DRAWN = _GREEDY.clone(temperature=1.0, top_p=0.9, seed=0)
_TOKENS = 24
_STEPS = _TOKENS + 2  # in which a request that finds room has ended
_SECONDS = 40.0  # with kernels that are still to be compiled, all would take minutes


class _Enough(Exception):
    """The time is up."""


def warm_up(engine: Engine, seconds: float = _SECONDS) -> None:
    """Answer a prompt; where steps are captured, run those that come again and again, greedy and
    sampled, and the largest prefill. The engine is left as if nothing had run.

    seconds: after these no further step is run, and what is missing is made when it is first used.
    A step that finds no memory raises here and not under load.
    """
    began = time.perf_counter()
    work = _WarmUp(engine, began + seconds)
    with suppress(_Enough):
        work.answer()
        buckets = engine.parts.runner.buckets
        if buckets is not None:
            work.prefill()
            for sampling in (_GREEDY, _DRAWN):
                work.decode(buckets, sampling)
                work.mix(buckets, sampling)
            for sampling in (_GREEDY, _DRAWN):
                work.narrow(buckets, sampling)
    engine.scheduler.budget = work.budget
    work.end(*work.asked)
    while engine.has_work:
        engine.step()
    engine.forget()
    logger.info(
        "warmed up in %.1f s, %d steps captured", time.perf_counter() - began, len(engine.graphs)
    )


class _WarmUp:
    """Requests that bring about one kind of step each."""

    def __init__(self, engine: Engine, deadline: float):
        self.engine, self.limits, self.deadline = engine, engine.limits, deadline
        self.asked: list[Request] = []
        self.budget, self.forced = engine.scheduler.budget, Forced()
        engine.scheduler.budget = Budget()  # an adaptive one would learn from what nobody asked
        # What prompts begin with, so that none finds another's pages.
        self._firsts = itertools.cycle(range(engine.resolved.target.decoder.vocab_size))

    def answer(self) -> None:
        """A short prompt's."""
        room = self.limits.max_model_len - 1
        size = min(16, room)
        tokens = min(_TOKENS, room + 1 - size)
        self.finish(self.add(size, _GREEDY.clone(max_tokens=tokens)))

    def prefill(self) -> None:
        """As many rows as a step can have, in one prompt."""
        limits, pool = self.limits, self.engine.parts.pool
        room = (pool.capacity - 1) * limits.page_size - 2 * limits.block  # tokens
        size = min(limits.max_num_batched_tokens, limits.max_model_len - 1, room)
        if size > 0:
            self.finish(self.add(size, _GREEDY.clone(max_tokens=1)))

    def decode(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """Ever more requests, the next one's short prompt beside those that decode."""
        endless = sampling.clone(max_tokens=None)
        few = min(REPLAYED_ROWS // (1 + self.limits.num_drafts), self.limits.max_num_seqs)
        asked: list[Request] = []
        for count in (*range(1, few + 1), *[count for count in buckets.spans if count > few]):
            asked = [request for request in asked if request.finish_reason is None]
            asked += [self.add(1, endless) for _ in range(count - len(asked))]
            for _ in range(2 + self.engine.depth):
                self.step()
        self.end(*asked)

    def narrow(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """What an adaptive budget may choose besides: no drafts, narrower blocks, and numbers of
        drafts of requests that differ in theirs."""
        budget = self.budget
        endless = sampling.clone(max_tokens=None, speculation={"method": "dflash"})
        if not isinstance(budget, AdaptiveBudget):
            return
        self.engine.scheduler.budget = self.forced
        asked: list[Request] = []
        mixed = [room - 1 for room in buckets.mixed_spans]
        for count in sorted({*buckets.spans, *mixed}):
            choices = [Choice(), *[Choice(i, most) for i, most in enumerate(budget.widths[:-1])]]
            for i, most in enumerate(budget.widths if count in mixed else ()):
                fewer = [drafts for drafts, _ in budget.rows(count, count, most)[:-1]]
                choices += [Choice(i, most, drafts) for drafts in (*fewer, count * most - 1)]
            for self.forced.choice in choices:
                asked = [request for request in asked if request.finish_reason is None]
                asked += [self.add(1, endless) for _ in range(count - len(asked))]
                for _ in range(2 + self.engine.depth):
                    self.step()
        self.end(*asked)

    def mix(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """Prompts of every captured number of rows together: one long and others short, or all
        alike. To a captured step, requests that decode beside them are the same."""
        one = sampling.clone(max_tokens=1)
        for count in [1, *[count + 1 for count in buckets.mixed_spans]]:
            if count > self.limits.max_num_seqs:
                return
            for rows in [rows for rows in buckets.rows if rows >= count]:
                alike = [rows // count + (i < rows % count) for i in range(count)]
                for sizes in ([rows - count + 1] + [1] * (count - 1), alike):
                    if max(sizes) < self.limits.max_model_len:
                        self.finish(*[self.add(size, one) for size in sizes])

    def add(self, size: int, sampling: SamplingParams) -> Request:
        if "+" in self.engine.resolved.method:  # so that the drafter runs
            sampling = sampling.clone(speculation={"method": "dflash"})
        prompt = [next(self._firsts)] + [0] * (size - 1)
        self.asked.append(self.engine.add(prompt, sampling))
        return self.asked[-1]

    def step(self) -> None:
        if time.perf_counter() > self.deadline:
            raise _Enough
        self.engine.step()

    def finish(self, *requests: Request) -> None:
        """Step until they have ended and nothing is in flight, so that the next ones find every
        slot free; those that find no room are left."""
        for _ in range(_STEPS):
            if all(request.finish_reason is not None for request in requests):
                break
            self.step()
        self.end(*requests)
        while self.engine.has_work:
            self.step()

    def end(self, *requests: Request) -> None:
        for request in requests:
            if request.finish_reason is None:
                self.engine.finish(request, "abort")
