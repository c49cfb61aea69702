"""Captures the device's part of a step and replays it: the only module that knows CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
Body = Callable[..., Any]


class CUDACapturer:
    """Captures CUDA graphs that share one memory pool, since they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture the body. Returns a function that replays it and the tensors that it writes its
        result to. Garbage collection is off meanwhile: freeing another engine's graph would end the
        capture. After a failed capture the pool is unusable, so later captures get a new one. After
        an invalid one torch stays on the stream of captures, and does not close the pool; freeing
        that would end the program."""
        graph = torch.cuda.CUDAGraph()
        collected = gc.isenabled()
        stream = torch.cuda.current_stream()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = body()
        except BaseException:
            torch.cuda.set_stream(stream)
            end = torch._C._cuda_endAllocateToPool  # pyright: ignore[reportPrivateUsage]
            with suppress(RuntimeError):  # it is closed
                end(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        finally:
            if collected:
                gc.enable()
        return graph.replay, result


class _Graph(NamedTuple):
    """replay: runs the body again; inputs: tensors that it reads; input_sources: the tensors that
    were copied into them; result: tensors that it writes."""

    replay: Callable[[], None]
    inputs: tuple[Tensor | None, ...]
    input_sources: list[Tensor | None]
    result: Any


class Graphs:
    """Captured bodies by key.

    A body's first run is eager, which loads its kernels; it is then captured over input tensors of
    its own. Later runs copy changed inputs into these and replay. A replay overwrites the previous
    result: copy it in the same stream to keep it longer.
    """

    def __init__(self, capturer: CUDACapturer):
        self.capturer = capturer
        self._graphs: dict[Hashable, _Graph | None] = {}
        """None: it runs eagerly."""

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def run(self, key: Hashable, body: Body, packed: Tensor, *inputs: Tensor | None) -> Any:
        """Run body(packed, *inputs), captured under the key, which determines the inputs' shapes.

        packed: the layout; the same tensor always holds the same values. The other inputs are new
        in each step.
        """
        graph = self._graphs.get(key)
        if graph is None:
            result = body(packed, *inputs)
            if key not in self._graphs:
                self._capture(key, body, (packed, *inputs))
            return result
        if graph.input_sources[0] is not packed:
            graph.inputs[0].copy_(packed)  # pyright: ignore[reportOptionalMemberAccess]
            graph.input_sources[0] = packed
        for graph_input, value in zip(graph.inputs[1:], inputs, strict=True):
            if graph_input is not None and value is not None:
                graph_input.copy_(value)
        graph.replay()
        return graph.result

    def _capture(self, key: Hashable, body: Body, inputs: tuple[Tensor | None, ...]) -> None:
        """Capture the body after its first run; without memory for that, it stays eager."""
        try:
            graph_inputs = tuple([None if tensor is None else tensor.clone() for tensor in inputs])
            replay, result = self.capturer.capture(lambda: body(*graph_inputs))
            self._graphs[key] = _Graph(
                replay=replay, inputs=graph_inputs, input_sources=[inputs[0]], result=result
            )
        except RuntimeError as error:
            logger.warning("A step runs without a graph (%s): %s", key, error)
            self._graphs[key] = None


class Eager:
    """Runs every body eagerly."""

    def __len__(self) -> int:
        return 0

    def run(self, key: Hashable, body: Body, *inputs: Tensor | None) -> Any:
        return body(*inputs)
