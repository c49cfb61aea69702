"""The device's part of a step, recorded once and replayed: the one place that knows CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from strobe.runner.batch import DRAFTS, Inputs

logger = logging.getLogger(__name__)
Body = Callable[[Inputs], Any]


class Recorder(Protocol):
    """Keeps work on the device so that it can be done again without the host's."""

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """How to do it again, and the tensors it then writes its result to. Does not do it."""
        ...


class CUDARecorder:
    """Captures CUDA graphs, which share one pool of memory, for they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = body()
        return graph.replay, result


class _Kept(NamedTuple):
    """replay: does the body again; own: the tensors it reads; held: whose values they are; result:
    the tensors it writes."""

    replay: Callable[[], None]
    own: tuple[Tensor, ...]
    held: list[Tensor]
    result: Any


class Graphs:
    """Bodies by key and shape.

    The first time a body runs as it is, which loads its kernels, and is then recorded over inputs
    of its own; from then on what has changed is copied into those and the record is replayed. A
    replay overwrites the result of the one before: whoever needs it longer copies it in the same
    stream.
    """

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._kept: dict[Hashable, _Kept] = {}
        self._refused: set[Hashable] = set()
        self._room: Tensor | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def run(self, key: Hashable, inputs: Inputs, body: Body) -> Any:
        """body(inputs), recorded under the key together with the inputs' shape."""
        tensors = inputs.tensors
        layout = inputs.layout
        key = (key, layout.shape, layout.longest, tensors[1].shape[0], len(tensors))
        kept = self._kept.get(key)
        if kept is None:
            result = body(inputs)
            if key not in self._refused:
                self._keep(key, inputs, body)
            return result
        for i, now in enumerate(tensors):
            # The same tensor holds the same geometry as before; drafts are new in each step.
            if i >= DRAFTS or kept.held[i] is not now:
                kept.own[i].copy_(now)
            if i < DRAFTS:
                kept.held[i] = now
        kept.replay()
        return kept.result

    def _keep(self, key: Hashable, inputs: Inputs, body: Body) -> None:
        """Record the body, which has just run: where there is no memory for that, it goes on
        running as it is."""
        try:
            own = tuple([self._own(tensor) for tensor in inputs.tensors])
            replay, static = self.recorder.record(lambda: body(inputs.over(own)))
        except RuntimeError as error:
            logger.warning("A step of shape %s runs uncaptured: %s", inputs.layout.shape, error)
            self._refused.add(key)
        else:
            self._kept[key] = _Kept(replay, own, list(inputs.tensors[:DRAFTS]), static)

    def _own(self, tensor: Tensor) -> Tensor:
        """A copy for a record to read. Probabilities [S, K, V], the only large ones, lie in one
        buffer: they are copied there before each replay, and one replay follows another."""
        if tensor.ndim < 3:
            return tensor.clone()
        if self._room is None or self._room.numel() < tensor.numel():
            self._room = torch.empty_like(tensor.flatten())
        return self._room[: tensor.numel()].view(tensor.shape).copy_(tensor)


class Eager:
    """Runs every body as it is."""

    def __len__(self) -> int:
        return 0

    def run(self, key: Hashable, inputs: Inputs, body: Body) -> Any:
        return body(inputs)
