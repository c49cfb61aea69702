"""Checks that several tests on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe import LLM, SamplingParams
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.runner.graphs import Eager
from tests.support.bookkeeping_checks import check_engine
from tests.support.losslessness_matrix import Pair, plain_answers

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ON_GPU: dict[str, Any] = {"device": "cuda", "width": 64}
"""Options of `make_pair`; the heads have the smallest size that the kernels support."""

REGRET = 0.05
"""Maximum difference in fp32 log probability between the best token and the one chosen in bf16.
Measured on an H200: 0.0000, also with FP8 weights and with an FP8 cache."""


def finish(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run until the engine is idle and return the requests' outputs."""
    while engine.has_work:
        engine.step()
    check_engine(engine)
    return [request.output_ids for request in requests]


def keys_and_values(engine: Engine) -> list[Tensor]:
    """Return the stored keys and values without the first and last slots, which padding writes."""
    stores = engine.components.stores.values()
    return [layer[16:-16].clone() for store in stores for layer in store.layers]


def check_captured(
    make: Callable[[], Engine],
    answers: Callable[[Engine], Any],
    stored: Callable[[Engine], list[Tensor]],
) -> None:
    """Check that captured and eager runs of the same padded steps give equal answers and equal bits
    in the tensors that they leave in memory."""
    runs: list[tuple[Any, list[Tensor]]] = []
    for graphs in (True, False):
        engine = make()
        if not graphs:
            engine.graphs.run = Eager().run  # type: ignore[method-assign]
            engine.proposers["dflash"].graphs = engine.graphs  # type: ignore[attr-defined]
        outputs = answers(engine)
        assert bool(len(engine.graphs)) is graphs
        runs.append((outputs, stored(engine)))
        del engine
        gc.collect()  # its ranks end with it
    (captured, captured_tensors), (eager, eager_tensors) = runs
    assert captured == eager
    for captured_tensor, eager_tensor in zip(captured_tensors, eager_tensors, strict=True):
        assert torch.equal(captured_tensor, eager_tensor)


@contextmanager
def steady(engine: Engine, requests: Sequence[Request], *, after: int) -> Iterator[None]:
    """Run until each request has more than `after` tokens; within the context, launches must not
    wait for the device. Aborts the requests at the end."""
    while not all(request.num_output > after for request in requests):
        engine.step()
    launch = engine.launch

    def launch_without_sync(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.launch = launch_without_sync  # type: ignore[method-assign]
    yield
    for request in requests:
        engine.finish(request, "abort")
    finish(engine, requests)


def check_against_cpu(pair: Pair, *workloads: str) -> None:
    """Check that plain decoding in fp32 gives the same tokens as on a CPU."""
    on_cpu = replace(pair, device="cpu")
    for name in workloads:
        assert plain_answers(pair, name) == plain_answers(on_cpu, name)


def largest_regret(prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> float:
    """Return the largest difference in log probability between the demo target's best token in fp32
    and an answer's token."""
    judge = LLM(device="cuda", dtype="float32", method="none", kv_cache_memory="1GiB")
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        (output,) = judge.generate([{"prompt_token_ids": prompt + answer}], params, use_tqdm=False)
        rows = [row for row in (output.prompt_logprobs or [])[len(prompt) :] if row]
        assert len(rows) == len(answer)
        for token, row in zip(answer, rows, strict=True):
            best = max(entry.logprob for entry in row.values())
            worst = max(worst, best - row[token].logprob)
    return worst
