"""Capture and replay of steps on a CPU, to test what graphs read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.mask import LayerMask
from strobe.attention.recurrent_backend import RecurrentBackend
from strobe.engine.build import Components
from strobe.kv.kv_store import KVStore
from strobe.runner.buckets import Buckets
from strobe.runner.graphs import Graphs


class SlowPlan:
    """Attention span by span, with the inputs' values at the time of the call."""

    def __init__(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]):
        self.batch, self.store, self.masks = batch, store, masks

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        batch, mask = self.batch, self.masks[layer]
        group = self.store.spec.group_of(layer)
        self.store.write(layer, batch.kv_slots[group], k, v)
        out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"))
        for s, size in enumerate(batch.sizes.tolist()):
            assert size <= batch.longest
            if not size:
                continue
            start, first = int(batch.starts[s]), int(batch.row_starts[s])
            rows, keys = slice(first, first + size), torch.arange(start + size)
            slots = batch.tables[group][batch.slots[s], keys // batch.page_size] + keys
            seen, values = self.store.gather(layer, slots[None])
            positions = start + torch.arange(size)[:, None]
            allowed = (
                keys <= positions if mask.causal else torch.ones(size, len(keys), dtype=torch.bool)
            )
            if mask.window is not None:
                allowed = (
                    allowed & (positions - keys < mask.window) & (keys - positions < mask.window)
                )
            part = q[rows].transpose(0, 1)[None]
            if sinks is None:
                part = torch.nn.functional.scaled_dot_product_attention(
                    part, seen, values, allowed, enable_gqa=True
                )
            else:
                groups = part.shape[1] // seen.shape[1]
                seen, values = (x.repeat_interleave(groups, 1) for x in (seen, values))
                logits = part @ seen.transpose(2, 3) * part.shape[-1] ** -0.5
                logits = logits.masked_fill(~allowed, float("-inf"))
                column = sinks.view(1, -1, 1, 1).expand(-1, -1, size, -1)
                part = torch.cat((logits, column), -1).softmax(-1)[..., :-1] @ values
            out[rows] = part[0].transpose(0, 1).reshape(size, -1)
        return out


class SlowBackend:
    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> SlowPlan:
        return SlowPlan(batch, store, masks)


class FakeGraphs:
    """Captures by running once and undoing all effects; replays by running again. A replay clears
    the results of other graphs, which share their memory on a GPU."""

    def __init__(self, parts: Components):
        stores = [store.data for store in parts.stores.values()]
        self.state = [parts.state.cursor, parts.sampling.tables.counts, *stores]
        if parts.states is not None:
            self.state += [parts.states.length, *parts.states.tensors]
        self.buffers = parts.runner.output_buffers
        self.captured = self.replayed = 0
        self.results: list[list[Tensor]] = []

    def capture(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        state = [*self.state, *self.buffers.values()]
        before = [tensor.clone() for tensor in state]
        self.state[0].zero_()  # the step has advanced already and could pass the end otherwise
        result = body()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

        shared = [tensor.data_ptr() for tensor in self.buffers.values()]  # belong to no graph
        written = [t for t in tensors(result) if t.data_ptr() not in shared]
        self.results.append(written)

        def replay() -> None:
            self.replayed += 1
            results = [t for t in tensors(body()) if t.data_ptr() not in shared]
            for tensor in (tensor for result in self.results for tensor in result):
                tensor.zero_()
            for old, new in zip(written, results, strict=True):
                old.copy_(new)

        return replay, result


def tensors(result: Any) -> list[Tensor]:
    if result is None or isinstance(result, Tensor):
        return [] if result is None else [result]
    return [tensor for part in result for tensor in tensors(part)]


def captured(parts: Components, max_spans: int, num_drafts: int) -> FakeGraphs:
    """Let an engine's components pad, capture and replay."""
    pages, state = [group.num_pages for group in parts.pool.groups], parts.state
    for store in parts.stores.values():  # one more page, for padding, as on a GPU
        store.__init__(store.spec, [n + 1 for n in pages], state.page_size, state.device)
    host = parts.host_store
    if host is not None:
        host.__init__(
            list(parts.stores.values()),
            state.page_size,
            host.num_pages,
            states=parts.states,
            num_states=host.num_states,
            device=state.device,
        )
    for table, spare in zip(state.tables, pages, strict=True):
        table[-1] += spare * state.page_size
    double = FakeGraphs(parts)
    parts.graphs = Graphs(double)
    runners = [parts.runner]
    for proposer in parts.proposers.on_device.values():
        if hasattr(proposer, "graphs"):
            proposer.graphs = parts.graphs
            runners.append(proposer.runner)
    for runner in runners:
        runner.backend, runner.buckets = SlowBackend(), Buckets(max_spans, num_drafts)
    if parts.states is not None:
        parts.runner.backend = RecurrentBackend(parts.runner.backend, parts.states)
    return double
