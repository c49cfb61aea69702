"""Sends requests to a replaying engine, and watches what becomes of them."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.step import TokenEvent
from strobe.tools.bench.rates import synchronize
from strobe.tools.bench.replay import ReplayEngine
from strobe.tools.bench.settings import LoadSettings


class Job(NamedTuple):
    """A request to come: seconds after the start; the place in the traces where its answer begins,
    and the tokens of the answer, None for no end."""

    at: float
    place: int
    tokens: int | None


@dataclass
class Life:
    """A request's: when it was to come, and when its first and newest tokens did."""

    due: float
    first: float = 0.0
    newest: float = 0.0
    tokens: int = 0


@dataclass
class Turn:
    """What all requests of a way came to between two moments of the clock."""

    lives: list[Life] = field(default_factory=list[Life])
    began: float = 0.0
    ended: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafting: int = 0
    made: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / (self.ended - self.began)

    def begin(self) -> None:
        """Forget what came before now."""
        self.__dict__.update(Turn(self.lives, began=time.perf_counter()).__dict__)

    def take(self, event: TokenEvent) -> None:
        self.tokens += len(event.tokens)
        if event.num_proposed:
            self.drafting += 1
            self.made += event.num_proposed
            self.verified += event.num_verified
            self.accepted += event.num_accepted


class Driver:
    """Sends requests to an engine and watches what becomes of them."""

    def __init__(self, engine: ReplayEngine, settings: LoadSettings, way: str, count: int):
        self.engine, self.settings, self.count = engine, settings, count
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
        self.active: dict[Any, tuple[Request, Life]] = {}

    def run(self, jobs: Sequence[Job]) -> Turn:
        """At a concurrency the clock runs from when the first requests all have a token until fewer
        than that are left; at a rate from the first request to the last one's end."""
        waiting, turn = deque(jobs), Turn()
        synchronize(self.engine.resolved.device)
        turn.began = start = time.perf_counter()
        full = bool(self.settings.rate)
        try:
            while waiting or self.active:
                self._send(waiting, turn, start)
                if not self.engine.has_work:
                    time.sleep(max(start + waiting[0].at - time.perf_counter(), 0.0))
                    continue
                self._step(turn)
                if not full and all(life.first for life in turn.lives[: self.count]):
                    full = True
                    turn.begin()
                if full and self._is_over(turn, waiting):
                    break
            turn.ended = time.perf_counter()
        finally:
            for request, _ in self.active.values():
                self.engine.finish(request, "abort")
            self.active.clear()
            while self.engine.has_work:
                self.engine.step()
        synchronize(self.engine.resolved.device)
        return turn

    def _send(self, waiting: deque[Job], turn: Turn, start: float) -> None:
        now = time.perf_counter()
        while waiting and start + waiting[0].at <= now:
            if not self.settings.rate and len(self.active) >= self.count:
                break
            job = waiting.popleft()
            params = self.params.clone(max_tokens=job.tokens)
            request = self.engine.add(self.prompt, params, seed=job.place)
            life = Life(start + job.at if self.settings.rate else now)
            self.active[request.key] = request, life
            turn.lives.append(life)

    def _step(self, turn: Turn) -> None:
        events, now = self.engine.step(), time.perf_counter()
        turn.steps += bool(events)
        for event in events:
            turn.take(event)
            _, life = self.active[event.key]
            life.first = life.first or now
            life.newest, life.tokens = now, life.tokens + len(event.tokens)
            if event.finish_reason is not None:
                del self.active[event.key]

    def _is_over(self, turn: Turn, waiting: deque[Job]) -> bool:
        if self.settings.steady:
            return turn.tokens >= self.count * (self.settings.max_tokens or 256)
        return not self.settings.rate and not waiting and len(self.active) < self.count
