"""Pairs and checks that several tests on a GPU share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from matrix import Pair, plain_answers
from torch import Tensor

from strobe.engine.engine import Engine
from strobe.request import Request

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU: dict[str, Any] = {"device": "cuda", "width": 64}
"""Of `make_pair`: heads of the least size that the kernels have."""


def finish(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    """Run to the end -> the outputs of `asked`."""
    while engine.has_work:
        engine.step()
    engine.check()
    return [request.output_ids for request in asked]


def keys_and_values(engine: Engine) -> list[Tensor]:
    """What is left of them, without the first and the last slots, where padding is written."""
    stores = engine.components.stores.values()
    return [layer[16:-16].clone() for store in stores for layer in store.layers]


def check_captured(
    make: Callable[[], Engine],
    answers: Callable[[Engine], Any],
    left: Callable[[Engine], list[Tensor]],
) -> None:
    """Steps replayed from graphs and the same padded steps run as they are: equal answers, and
    equal bits in what both leave behind."""
    found: list[tuple[Any, list[Tensor]]] = []
    for graphs in (True, False):
        engine = make()
        if not graphs:
            engine.graphs.run = lambda key, body, *inputs: body(*inputs)  # type: ignore[method-assign]
            engine.proposers["dflash"].graphs = engine.graphs  # type: ignore[attr-defined]
        reported = answers(engine)
        assert bool(len(engine.graphs)) is graphs
        found.append((reported, left(engine)))
    (captured, ours), (plain, theirs) = found
    assert captured == plain
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@contextmanager
def steady(engine: Engine, asked: Sequence[Request], *, after: int) -> Iterator[None]:
    """Where each of `asked` has more than `after` tokens, launches must not wait for the device.
    Ends them."""
    while not all(request.num_output > after for request in asked):
        engine.step()
    launch = engine.launch

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.launch = watched  # type: ignore[method-assign]
    yield
    for request in asked:
        engine.finish(request, "abort")
    finish(engine, asked)


def check_against_cpu(pair: Pair, *workloads: str) -> None:
    """The target alone decodes in fp32 what it does on a CPU."""
    on_cpu = replace(pair, device="cpu")
    for name in workloads:
        assert plain_answers(pair, name) == plain_answers(on_cpu, name)
