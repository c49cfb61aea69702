"""What is made on first use, made before the first request: kernels, records of steps, buffers."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence

from strobe.engine.engine import Engine
from strobe.request import Request, SamplingParams
from strobe.runner.shapes import REPLAYED_ROWS, Shapes

logger = logging.getLogger(__name__)

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_DRAWN = _GREEDY.clone(temperature=1.0, top_p=0.9, seed=0)
_TOKENS = 24
_STEPS = _TOKENS + 2  # in which a request that finds room has ended


def warm_up(engine: Engine) -> None:
    """Answer a prompt; where steps are recorded, run those that come again and again, greedy and
    sampled, and the largest prefill. The engine is left as if nothing had run."""
    began = time.perf_counter()
    room = engine.limits.max_model_len - 1
    size = min(16, room)
    _run(engine, engine.add([0] * size, _GREEDY.clone(max_tokens=min(_TOKENS, room + 1 - size))))
    shapes = engine.parts.runner.shapes
    if shapes is not None:
        firsts = itertools.cycle(range(engine.resolved.target.decoder.vocab_size))
        _prefill(engine, firsts)
        for sampling in (_GREEDY, _DRAWN):
            _decode(engine, shapes, sampling, firsts)
            _mix(engine, shapes, sampling, firsts)
    while engine.has_work:
        engine.step()
    engine.forget()
    logger.info(
        "warmed up in %.1f s, %d steps recorded", time.perf_counter() - began, len(engine.graphs)
    )


def _prefill(engine: Engine, firsts: Iterator[int]) -> None:
    """As many rows as a step can have, in one prompt."""
    limits, pool = engine.limits, engine.parts.pool
    pages = (pool.capacity - 1) * limits.page_size - 2 * limits.block
    size = min(limits.max_num_batched_tokens, limits.max_model_len - 1, pages)
    if size > 0:
        _run(engine, engine.add(_prompt(size, firsts), _GREEDY.clone(max_tokens=1)))


def _decode(
    engine: Engine, shapes: Shapes, sampling: SamplingParams, firsts: Iterator[int]
) -> None:
    """Ever more requests, the next one's short prompt beside those that decode."""
    limits, asked = engine.limits, list[Request]()
    endless = sampling.clone(max_tokens=None)
    few = min(REPLAYED_ROWS // (1 + limits.num_drafts), limits.max_num_seqs)
    counts = [*range(1, few + 1), *[count for count in shapes.spans if count > few]]
    for count in counts:
        asked += [engine.add(_prompt(1, firsts), endless) for _ in range(count - len(asked))]
        for _ in range(2 + engine.depth):
            engine.step()
    _end(engine, asked)


def _mix(engine: Engine, shapes: Shapes, sampling: SamplingParams, firsts: Iterator[int]) -> None:
    """Prompts of every recorded number of rows together: one long and others short, or all alike.
    To a record, requests that decode beside them are the same."""
    for count in [1, *[crowd + 1 for crowd in shapes.crowds]]:
        if count > engine.limits.max_num_seqs:
            return
        for rows in [rows for rows in shapes.rows if rows >= count]:
            alike = [rows // count + (i < rows % count) for i in range(count)]
            for sizes in ([rows - count + 1] + [1] * (count - 1), alike):
                if max(sizes) < engine.limits.max_model_len:
                    one = sampling.clone(max_tokens=1)
                    asked = [engine.add(_prompt(size, firsts), one) for size in sizes]
                    _run(engine, *asked)


def _prompt(size: int, firsts: Iterator[int]) -> list[int]:
    """One that no cached page begins like."""
    return [next(firsts)] + [0] * (size - 1)


def _run(engine: Engine, *requests: Request) -> None:
    """Until they have ended; those that find no room are left."""
    for _ in range(_STEPS):
        if all(request.finish_reason is not None for request in requests):
            return
        engine.step()
    _end(engine, requests)


def _end(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason is None:
            engine.finish(request, "abort")
    engine.step()
