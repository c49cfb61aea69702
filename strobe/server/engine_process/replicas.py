"""Several engine processes that answer as one. Imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from strobe.config import EngineConfig
from strobe.counters import EngineStats
from strobe.request import SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import EngineClient, Generation
from strobe.server.engine_process.engine_messages import FromServer, Ready
from strobe.server.engine_process.resources import make_replicas, share_memory
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.log_format import engine_logger
from strobe.server.server_settings import ServerConfig

logger = logging.getLogger(__name__)

OPEN_TOKENS = 64
"""Cached prompt tokens that weigh as much as one open answer."""
MAX_CREDIT = 8 * OPEN_TOKENS
"""Maximum of cached tokens that count, so that requests that share a long prefix spread as well."""


class PrefixIndex:
    """The prefixes that an engine probably has in its cache: its newest prompts' prefixes."""

    def __init__(self, max_pages: int):
        self._max_pages = max_pages
        self._keys: OrderedDict[int, None] = OrderedDict()

    def clear(self) -> None:
        """Forget all prefixes."""
        self._keys.clear()

    def match(self, keys: Sequence[int]) -> int:
        """Return the number of a prompt's first pages that are in the cache."""
        known = itertools.takewhile(self._keys.__contains__, keys)
        return sum(1 for _ in known)

    def add(self, keys: Sequence[int]) -> None:
        """Add a prompt's pages in reverse, so that its last ones are evicted first."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._max_pages:
            self._keys.popitem(last=False)


def prefix_keys(prompt_ids: Sequence[int], cache_salt: str, page_size: int) -> list[int]:
    """Return a key of each page that another prompt can share, by its tokens and all before."""
    key = hash(cache_salt)
    keys = list[int]()
    for end in range(page_size, len(prompt_ids), page_size):
        key = hash((key, *prompt_ids[end - page_size : end]))
        keys.append(key)
    return keys


class Replicas:
    """The client of several engines, with `EngineClient`'s interface.

    A request goes where the longest prefix of its prompt is cached, unless open answers outweigh
    that; see `_cost`. An engine that ends is restarted, while the others go on. Its requests
    without any token yet move to another engine, once each, so that a prompt that ends engines does
    not end them all; the rest fail. This ends with the last engine.
    """

    def __init__(self, config: EngineConfig, settings: ServerConfig):
        """Raises ValueError if the machine has too few GPUs or too little memory."""
        self.config = config = share_memory(config, settings.data_parallel_size)
        self.on_death: Callable[[], None] = lambda: None
        self.engines = [
            EngineClient(
                config,
                settings.logs,
                restart=settings.restart_engine,
                kv_events=settings.kv_events,
                replica=replica,
            )
            for replica in make_replicas(config, settings.data_parallel_size)
        ]
        for number, engine in enumerate(self.engines):
            engine.on_death = partial(self._engine_died, number)
            engine.engines = self.engines
            engine.on_orphan = self._move
        self._prefixes: dict[int, tuple[Ready, PrefixIndex]] = {}
        self._num_routed = [0] * len(self.engines)

    def _engine_died(self, number: int) -> None:
        if self.dead:
            self.on_death()
        elif self.engines[number].facts is not None:
            engine_logger(logger, number).error(
                "the engine's process ended and will not be restarted; the other engines keep "
                "serving"
            )

    @property
    def _answering(self) -> list[EngineClient]:
        return [engine for engine in self.engines if engine.can_answer]

    @property
    def facts(self) -> Ready | None:
        """Facts common to all engines that can answer, with the sums of their slots and pages."""
        facts = [engine.facts for engine in self._answering if engine.facts is not None]
        return facts[0]._replace(
            max_model_len=min(entry.max_model_len for entry in facts),
            max_num_seqs=sum(entry.max_num_seqs for entry in facts),
            pages=sum(entry.pages for entry in facts),
            kv_bytes=sum(entry.kv_bytes for entry in facts),
        ) if facts else None  # fmt: skip

    @property
    def snapshot(self) -> EngineSnapshot | None:
        """The state of all engines that can answer together."""
        parts = [engine.snapshot for engine in self._answering if engine.snapshot is not None]
        if not parts:
            return None
        stats = EngineStats()
        for part in parts:
            stats.merge(part.stats)
        return EngineSnapshot(
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts),
            kv_used=sum(part.kv_used for part in parts) / len(parts),
            stats=stats,
        )

    @property
    def can_answer(self) -> bool:
        return bool(self._answering)

    @property
    def dead(self) -> bool:
        return all(engine.dead for engine in self.engines)

    @property
    def state(self) -> str:
        """A sentence that says why no engine can answer."""
        return next((e.state for e in self.engines if not e.dead), "All engines have ended.")

    @property
    def grammar_fault(self) -> str | None:
        """Why no engine compiles grammars, None if one does."""
        faults = [engine.grammar_fault for engine in self._answering]
        return faults[0] if faults and None not in faults else None

    @property
    def num_open(self) -> int:
        """Number of unfinished answers."""
        return sum(engine.num_open for engine in self.engines)

    def start(self) -> None:
        """Start all processes; needs a running event loop."""
        for engine in self.engines:
            engine.start()

    async def ready(self) -> Ready:
        """Wait until all engines have been ready and return their facts. Raises as
        `EngineClient.ready`, once the first one cannot start."""
        first, *_ = await asyncio.gather(*(engine.ready() for engine in self.engines))
        return self.facts or first

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop all processes as `EngineClient.stop`."""
        await asyncio.gather(*(engine.stop(timeout) for engine in self.engines))

    def send(self, message: FromServer) -> None:
        """Send all engines a message that concerns no generation: Release."""
        for _, index in self._prefixes.values():
            index.clear()
        for engine in self.engines:
            engine.send(message)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingOptions,
    ) -> Generation:
        """Submit a prompt to the engine with the lowest cost. Raises EngineDead."""
        number = self._route(prompt_ids, params, scheduling)
        if number is None:  # an engine that will be able to answer, or else any, says why it cannot
            engine = next((e for e in self.engines if not e.dead), self.engines[0])
            return engine.submit(prompt_ids, params, request_id, scheduling)
        generation = self.engines[number].submit(prompt_ids, params, request_id, scheduling)
        generation.engine = number
        return generation

    def _move(self, generation: Generation) -> bool:
        """Give a prompt of an engine that has ended to another; return whether there is one."""
        prompt = generation.prompt
        if generation.moved:
            return False
        number = self._route(prompt.prompt_ids, prompt.params, prompt.scheduling)
        if number is None:
            return False
        generation.engine = number
        self.engines[number].adopt(generation)
        return True

    def _route(
        self, prompt_ids: list[int], params: SamplingParams, scheduling: SchedulingOptions
    ) -> int | None:
        """Choose the engine with the lowest cost for a prompt, and count the prompt as its own.
        None if no engine can answer."""
        keys = list[int]()
        if self.config.enable_prefix_caching:
            keys = prefix_keys(prompt_ids, scheduling.cache_salt, self.config.page_size)
        has_grammar = params.structured_outputs is not None
        cached = {
            number: self.config.page_size * self._index(number).match(keys)
            for number, engine in enumerate(self.engines)
            if engine.can_answer
        }
        if not cached:
            return None
        on_all = min(cached.values())
        number = min(cached, key=lambda n: self._cost(n, cached[n] - on_all, has_grammar))
        self._index(number).add(keys)
        self._num_routed[number] += 1
        return number

    def _cost(self, number: int, num_cached: int, has_grammar: bool) -> tuple[int, ...]:
        """Return an engine's cost of a prompt: whether it can compile no grammar for it, whether it
        would wait for a slot, the weight of open answers minus the weight of cached tokens, and
        among equals the cached tokens and the number of requests that the engine got so far.
        num_cached: cached tokens of the prompt in this engine, beyond the ones in every engine."""
        engine = self.engines[number]
        assert engine.facts is not None
        return (
            has_grammar and engine.grammar_fault is not None,
            engine.num_open >= engine.facts.max_num_seqs,
            OPEN_TOKENS * engine.num_open - min(num_cached, MAX_CREDIT),
            -num_cached,
            self._num_routed[number],
        )

    def _index(self, number: int) -> PrefixIndex:
        """Return the index of an engine's cache, a new one after each start of its process. Its
        engine does not make up for the requests that others got before."""
        facts = self.engines[number].facts
        assert facts is not None
        known = self._prefixes.get(number)
        if known is None or known[0] is not facts:
            known = self._prefixes[number] = facts, PrefixIndex(facts.pages)
            self._num_routed[number] = max(self._num_routed)
        return known[1]
