"""Engines over tiny checkpoints, and runs that check every step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import Components, ResolvedConfig, build, resolve
from strobe.engine.engine import Engine
from strobe.request import Request, TokenLogprob
from strobe.runner.memory import group_bytes, group_pages
from strobe.sampling_params import SamplingParams
from strobe.speculation.proposer import Proposer, ProposerSet
from strobe.step import TokenEvent
from tests.support.bookkeeping_checks import check_engine
from tests.support.scripted_drafting import Scripted


def cache_bytes(resolved: ResolvedConfig, num_pages: int) -> int:
    """Bytes of keys and values of which the first page group has so many pages."""
    groups = resolved.page_groups
    return group_bytes(groups, group_pages(groups, resolved.limits, num_pages))


def make_engine(
    config: EngineConfig,
    replace: Callable[[Components, str], Proposer] | None = None,
    *,
    names: Sequence[str] = (),
    **options: Any,
) -> Engine:
    """Build an engine; replace(parts, name) makes the proposer that replaces each of `names`."""
    resolved = resolve(config)
    parts = build(resolved)
    if replace is not None:
        put(parts, {name: replace(parts, name) for name in names})
    return watched(Engine(resolved, components=parts, **options))


def put(parts: Components, proposers: Mapping[str, Any]) -> None:
    """Replace the proposers of these names."""
    old = parts.proposers
    parts.proposers = ProposerSet({**old.by_name, **proposers}, old.device, old.composites)


def watched(engine: Engine) -> Engine:
    """Give scripted proposers their engine, where they look up the requests of slots."""
    for proposer in engine.proposers.on_device.values():
        if isinstance(proposer, Scripted):
            proposer.engine = engine
    return engine


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    each_step: Callable[[list[Request]], None] | None = None,
    max_steps: int = 3000,
) -> list[list[int]]:
    """Run all prompts together; return their outputs, siblings one after another.

    After every step the engine checks itself, and the events so far must add up to the outputs; at
    the end the engine must be idle with every page free.
    """
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    requests: list[Request] = []
    for prompt, sampled in zip(prompts, params, strict=True):
        requests += engine.add_prompt(prompt, sampled)
    drain(engine, requests, each_step=each_step, max_steps=max_steps)
    return [request.output_ids for request in requests]


def drain(
    engine: Engine,
    requests: Sequence[Request],
    *,
    each_step: Callable[[list[Request]], None] | None = None,
    max_steps: int = 3000,
) -> dict[Request, list[TokenLogprob]]:
    """Step until the engine is idle and check each step; return the log probabilities."""
    by_key = {(request.key, request.sibling): request for request in requests}
    reported: dict[Request, list[int]] = {request: [] for request in requests}
    logprobs: dict[Request, list[TokenLogprob]] = {request: [] for request in requests}
    begun: set[Request] = set()
    ended: set[Request] = set()
    steps = 0
    while engine.has_work:
        for event in engine.step():
            request = by_key[event.key, event.sibling]
            assert (event.start is not None) == (not reported[request] and request not in begun)
            begun.add(request)
            assert request not in ended, "an event of a request after its end"
            reported[request] += event.tokens
            assert reported[request] == request.output_ids
            assert request.finish_reason == event.finish_reason
            check_event(request, event)
            logprobs[request] += event.logprobs
            if event.finish_reason is not None:
                ended.add(request)
        check_engine(engine)
        if each_step is not None:
            each_step(list(requests))
        steps += 1
        assert steps < max_steps, "the engine never becomes idle"
    assert all(request in ended for request in requests)
    assert engine.components.pool.available == engine.components.pool.capacity
    return logprobs


def check_event(request: Request, event: TokenEvent) -> None:
    """Check an event's counts and log probabilities against its tokens."""
    sampling, tokens = request.sampling, event.tokens
    assert 0 <= event.num_accepted <= min(event.num_verified, len(tokens))
    assert event.num_verified <= request.num_drafts
    if sampling.logprobs is None:
        assert not event.logprobs
        return
    assert [entry.token for entry in event.logprobs] == tokens
    assert {len(entry.top) for entry in event.logprobs} <= {sampling.logprobs}
