"""The device's part of a step, captured once and replayed: the one place that knows CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
Body = Callable[..., Any]


class CUDACapturer:
    """CUDA graphs, which share one pool of memory, for they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """How to run the body again, and the tensors it then writes its result to. Garbage is not
        collected meanwhile: freeing another engine's graph would end the capture. After a capture
        that failed the pool cannot be used for another, so the next ones get a new pool."""
        graph, collected = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                result = body()
        except BaseException:
            self._pool = torch.cuda.graph_pool_handle()
            raise
        finally:
            if collected:
                gc.enable()
        return graph.replay, result


class _Graph(NamedTuple):
    """replay: does the body again; inputs: the tensors it reads; input_sources: whose values they
    hold; result: the tensors it writes."""

    replay: Callable[[], None]
    inputs: tuple[Tensor | None, ...]
    input_sources: list[Tensor | None]
    result: Any


class Graphs:
    """Bodies by key.

    The first time a body runs as it is, which loads its kernels, and is then captured over inputs
    of its own; from then on what has changed is copied into those and the graph is replayed. A
    replay overwrites the result of the one before: whoever needs it longer copies it in the same
    stream.
    """

    def __init__(self, capturer: CUDACapturer):
        self.capturer = capturer
        self._graphs: dict[Hashable, _Graph] = {}
        self._uncapturable: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, body: Body, packed: Tensor, *inputs: Tensor | None) -> Any:
        """body(packed, *inputs), captured under the key, which also says the inputs' shapes.

        packed: the layout, of which the same tensor holds the same values as before; the others
        are new in each step.
        """
        graph = self._graphs.get(key)
        if graph is None:
            result = body(packed, *inputs)
            if key not in self._uncapturable:
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
        """Capture the body, which has just run: where there is no memory for that, it goes on
        running as it is."""
        try:
            graph_inputs = tuple([None if tensor is None else tensor.clone() for tensor in inputs])
            replay, result = self.capturer.capture(lambda: body(*graph_inputs))
        except RuntimeError as error:
            logger.warning("A step runs without a graph (%s): %s", key, error)
            self._uncapturable.add(key)
        else:
            self._graphs[key] = _Graph(replay, graph_inputs, [inputs[0]], result)


class Eager:
    """Runs every body as it is."""

    def __len__(self) -> int:
        return 0

    def run(self, key: Hashable, body: Body, *inputs: Tensor | None) -> Any:
        return body(*inputs)
