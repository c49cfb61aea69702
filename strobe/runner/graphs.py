"""Captures the device's part of a step and replays it: the only module that knows CUDA graphs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
Body = Callable[[Tensor, Tensor | None], Any]
"""(packed layout, the other input of a step: its drafts or masks) -> results."""


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


@dataclass(kw_only=True)
class _Graph:
    """replay: runs the body again; packed, step_input: tensors that it reads; packed_source: the
    tensor last copied into `packed`; result: tensors that it writes."""

    replay: Callable[[], None]
    packed: Tensor
    packed_source: Tensor
    step_input: Tensor | None
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
        self._num_captured = 0

    def __len__(self) -> int:
        return self._num_captured

    def run(
        self, key: Hashable, body: Body, packed: Tensor, step_input: Tensor | None = None
    ) -> Any:
        """Run body(packed, step_input), captured under the key, which determines their shapes.

        packed: the layout; the same tensor always holds the same values. step_input: new in each
        step.
        """
        graph = self._graphs.get(key)
        if graph is None:
            result = body(packed, step_input)
            if key not in self._graphs:
                captured = self._capture(key, body, packed, step_input)
                self._graphs[key] = captured
                self._num_captured += captured is not None
            return result
        if graph.packed_source is not packed:
            graph.packed.copy_(packed)
            graph.packed_source = packed
        if graph.step_input is not None and step_input is not None:
            graph.step_input.copy_(step_input)
        graph.replay()
        return graph.result

    def _capture(
        self, key: Hashable, body: Body, packed: Tensor, step_input: Tensor | None
    ) -> _Graph | None:
        """Capture the body after its first run. Without memory for that return None: it stays
        eager."""
        try:
            own_packed = packed.clone()
            own_input = None if step_input is None else step_input.clone()
            replay, result = self.capturer.capture(lambda: body(own_packed, own_input))
        except RuntimeError as error:
            logger.warning("A step runs without a graph (%s): %s", key, error)
            return None
        return _Graph(
            replay=replay,
            packed=own_packed,
            packed_source=packed,
            step_input=own_input,
            result=result,
        )


class Eager:
    """Runs every body eagerly."""

    def __len__(self) -> int:
        return 0

    def run(
        self, key: Hashable, body: Body, packed: Tensor, step_input: Tensor | None = None
    ) -> Any:
        return body(packed, step_input)
