"""Send requests to a replaying engine and time their tokens."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from strobe.counters import DraftCounts
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.step import TokenEvent
from strobe.tools.bench.bench_settings import LoadSettings
from strobe.tools.bench.measurement import open_requests
from strobe.tools.bench.rates import synchronize
from strobe.tools.bench.replay import ReplayEngine


class Arrival(NamedTuple):
    """A planned request: its arrival in seconds after the start, the place in the traces where its
    answer begins, and the answer's tokens (None: it never ends)."""

    at: float
    place: int
    tokens: int | None


@dataclass
class RequestTimes:
    """When a request was due, and when its first and last tokens arrived."""

    due: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass
class LoadRun:
    """Times of all requests, and the tokens and drafts counted between `began` and `ended`."""

    requests: list[RequestTimes] = field(default_factory=list[RequestTimes])
    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    steps: int = 0
    draft_counts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / (self.ended - self.began)

    def restart(self) -> None:
        """Start the clock and all counts again; keep the requests."""
        self.began = time.perf_counter()
        self.ended = 0.0
        self.tokens = 0
        self.steps = 0
        self.draft_counts = DraftCounts()

    def count(self, event: TokenEvent) -> None:
        self.tokens += len(event.tokens)
        if event.num_proposed is not None:
            self.draft_counts.add(event.num_verified, event.num_accepted, event.num_proposed)


class Driver:
    """Sends requests to an engine and times their tokens."""

    def __init__(self, engine: ReplayEngine, settings: LoadSettings, way: str, count: int):
        self.engine = engine
        self.settings = settings
        self.count = count
        drafts = {"plain": 0, "adaptive": None}
        max_drafts = drafts[way] if way in drafts else int(way)
        self.params = SamplingParams(
            temperature=settings.temperature,
            ignore_eos=True,
            max_tokens=None,
            speculation=None if max_drafts is None else {"num_drafts": max_drafts},
        )
        size = engine.resolved.target.decoder.vocab_size
        noise = random.Random(engine.config.seed)
        self.prompt = [noise.randrange(size) for _ in range(settings.prompt_len)]
        self.active: dict[Hashable, Request] = {}
        self.times: dict[Hashable, RequestTimes] = {}

    def run(self, arrivals: Sequence[Arrival]) -> LoadRun:
        """Send all requests and return the run's times and counts.

        At a concurrency of n, the clock starts when the first n requests all have a token and stops
        when fewer than n are left; at a rate, it runs from the first request until all have ended.
        """
        waiting = deque(arrivals)
        run = LoadRun()
        synchronize(self.engine.resolved.device)
        run.began = start = time.perf_counter()
        full = bool(self.settings.rate)
        with open_requests(self.engine) as self.active:
            while waiting or self.active:
                self._send(waiting, run, start)
                if not self.engine.has_work:
                    time.sleep(max(start + waiting[0].at - time.perf_counter(), 0.0))
                    continue
                self._step(run)
                if not full and all(times.first for times in run.requests[: self.count]):
                    full = True
                    run.restart()
                if full and self._is_over(run, waiting):
                    break
            run.ended = time.perf_counter()
        synchronize(self.engine.resolved.device)
        return run

    def _send(self, waiting: deque[Arrival], run: LoadRun, start: float) -> None:
        now = time.perf_counter()
        while waiting and start + waiting[0].at <= now:
            if not self.settings.rate and len(self.active) >= self.count:
                break
            arrival = waiting.popleft()
            params = self.params.clone(max_tokens=arrival.tokens)
            request = self.engine.add(self.prompt, params, seed=arrival.place)
            times = RequestTimes(due=start + arrival.at if self.settings.rate else now)
            self.active[request.key] = request
            self.times[request.key] = times
            run.requests.append(times)

    def _step(self, run: LoadRun) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        run.steps += bool(events)
        for event in events:
            run.count(event)
            times = self.times[event.key]
            times.first = times.first or now
            times.tokens = times.tokens + len(event.tokens)
            times.last = now
            if event.finish_reason is not None:
                del self.active[event.key]

    def _is_over(self, run: LoadRun, waiting: deque[Arrival]) -> bool:
        if self.settings.steady:
            return run.tokens >= self.count * (self.settings.max_tokens or 256)
        return not self.settings.rate and not waiting and len(self.active) < self.count
