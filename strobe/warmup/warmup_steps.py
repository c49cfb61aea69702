"""Warm-up: compile kernels, capture steps and allocate buffers before the first request."""

from __future__ import annotations

import itertools
import logging
import time
from contextlib import suppress

from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.runner.buckets import MAX_CAPTURED_ROWS, Buckets
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.draft_policy import DraftPolicy
from strobe.warmup.cost_measurement import FixedDraftPolicy

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_SAMPLED = _GREEDY.clone(temperature=1.0, top_p=0.9, seed=0)
_OUTPUT_TOKENS = 24
_MAX_STEPS = _OUTPUT_TOKENS + 2  # enough to finish a request that was admitted at once
_MAX_SECONDS = 40.0  # a full warm-up with kernels to compile would take minutes


class WarmupTimeout(Exception):
    """The warm-up's time is up."""


def warm_up(engine: Engine, seconds: float = _MAX_SECONDS) -> None:
    """Answer a prompt; if steps are captured, also run the largest prefill and the common decode
    and mixed steps, greedy and sampled. The engine is reset afterwards.

    seconds: no step starts after this time; whatever is missing is compiled or captured on first
    use. A step that runs out of memory raises here rather than under load.
    """
    started = time.perf_counter()
    warmup = _WarmUp(engine, started + seconds)
    with suppress(WarmupTimeout):
        warmup.answer()
        buckets = engine.components.runner.buckets
        if buckets is not None:
            warmup.prefill()
            for sampling in (_GREEDY, _SAMPLED):
                warmup.decode(buckets, sampling)
                warmup.mix(buckets, sampling)
            for sampling in (_GREEDY, _SAMPLED):
                warmup.narrow(buckets, sampling)
    engine.scheduler.draft_policy = warmup.draft_policy
    warmup.end(*warmup.requests)
    while engine.has_work:
        engine.step()
    engine.reset()
    logger.info(
        "warmed up in %.1f s, %d steps captured", time.perf_counter() - started, len(engine.graphs)
    )


class _WarmUp:
    """Runs requests that lead to one kind of step each."""

    def __init__(self, engine: Engine, deadline: float):
        self.engine = engine
        self.limits = engine.limits
        self.deadline = deadline
        self.requests: list[Request] = []
        self.draft_policy = engine.scheduler.draft_policy
        # Not an adaptive policy, which would learn from these artificial requests.
        engine.scheduler.draft_policy = DraftPolicy()
        # Prompts differ in the first token, so that none hits another's pages.
        self._first_tokens = itertools.cycle(range(engine.resolved.target.decoder.vocab_size))

    def answer(self) -> None:
        """Answer a short prompt."""
        room = self.limits.max_model_len - 1
        size = min(16, room)
        tokens = min(_OUTPUT_TOKENS, room + 1 - size)
        self.finish(self.add(size, _GREEDY.clone(max_tokens=tokens)))

    def prefill(self) -> None:
        """Prefill one prompt with the maximum rows of a step."""
        limits = self.limits
        pool = self.engine.components.pool
        room = (pool.capacity - 1) * limits.page_size - 2 * limits.lookahead  # tokens
        size = min(limits.max_num_batched_tokens, limits.max_model_len - 1, room)
        if size > 0:
            self.finish(self.add(size, _GREEDY.clone(max_tokens=1)))

    def decode(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """Decode with every captured number of requests, adding short prompts to decoding ones."""
        endless = sampling.clone(max_tokens=None)
        num_small = min(MAX_CAPTURED_ROWS // (1 + self.limits.num_drafts), self.limits.max_num_seqs)
        requests: list[Request] = []
        for count in (
            *range(1, num_small + 1),
            *[count for count in buckets.spans if count > num_small],
        ):
            requests = [request for request in requests if request.finish_reason is None]
            requests += [self.add(1, endless) for _ in range(count - len(requests))]
            for _ in range(2 + self.engine.max_in_flight):
                self.step()
        self.end(*requests)

    def narrow(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """Run the other choices of an adaptive policy: no drafts, narrower blocks, and verifying
        some of the drafts."""
        adaptive = self.draft_policy
        method = self.engine.proposers.device_method
        endless = sampling.clone(max_tokens=None, speculation={"method": method})
        if not isinstance(adaptive, AdaptiveDraftPolicy):
            return
        fixed = self.engine.scheduler.draft_policy = FixedDraftPolicy(adaptive)
        requests: list[Request] = []
        mixed = [room - 1 for room in buckets.mixed_spans]
        for count in sorted({*buckets.spans, *mixed}):
            widths = list(enumerate(adaptive.widths))
            options = [Option(), *[Option(i, count, count * width) for i, width in widths[:-1]]]
            for i, width in widths if count in mixed else ():
                fewer = [drafts for drafts, _ in adaptive.rows(count, count, width)[:-1]]
                options += [Option(i, count, drafts) for drafts in (*fewer, count * width - 1)]
            for fixed.option in options:
                requests = [request for request in requests if request.finish_reason is None]
                requests += [self.add(1, endless) for _ in range(count - len(requests))]
                for _ in range(2 + self.engine.max_in_flight):
                    self.step()
        self.end(*requests)

    def mix(self, buckets: Buckets, sampling: SamplingParams) -> None:
        """Prefill several prompts with every captured number of rows in total: one long and the
        others short, or all of equal length. These steps also serve prompts mixed with decoding."""
        single_token = sampling.clone(max_tokens=1)
        for count in [1, *[count + 1 for count in buckets.mixed_spans]]:
            if count > self.limits.max_num_seqs:
                return
            for rows in [rows for rows in buckets.rows if rows >= count]:
                equal_sizes = [rows // count + (i < rows % count) for i in range(count)]
                for sizes in ([rows - count + 1] + [1] * (count - 1), equal_sizes):
                    if max(sizes) < self.limits.max_model_len:
                        self.finish(*[self.add(size, single_token) for size in sizes])

    def add(self, size: int, sampling: SamplingParams) -> Request:
        proposers = self.engine.proposers
        if self.engine.resolved.method in proposers.composites:  # run the drafter, not the host's
            sampling = sampling.clone(speculation={"method": proposers.device_method})
        prompt = [next(self._first_tokens)] + [0] * (size - 1)
        self.requests.append(self.engine.add(prompt, sampling))
        return self.requests[-1]

    def step(self) -> None:
        if time.perf_counter() > self.deadline:
            raise WarmupTimeout
        self.engine.step()

    def finish(self, *requests: Request) -> None:
        """Step until the requests have ended and nothing is in flight, so that all slots are free;
        abort requests that got no pages."""
        for _ in range(_MAX_STEPS):
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
