"""Attention on a CPU in compiled C, which reads pages in place; plain torch for what that lacks.

Legend: T rows, Hq / Hkv query and key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.mask import LayerMask
from strobe.attention.reference import ReferencePlan
from strobe.kernels.cpu.calls import BatchStruct, CpuCalls, LayerStruct
from strobe.kv.kv_store import NO_SCALE, KVStore

MOST_ROWS = 64
"""Rows of a span up to which C attends; of more, torch's blocked attention is faster. A power of
two of at least 16, so that no group of the reference has spans of both kinds."""


class CompiledPlan:
    """The reference's plan, made when a layer needs it, and `heads`, which runs in C."""

    def __init__(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask], calls: CpuCalls):
        self.batch = batch
        self.store = store
        self.masks = masks
        self._calls = calls
        assert all(table.is_contiguous() for table in batch.tables)
        self._longest = max(batch.row_counts, default=0)
        self._struct = BatchStruct(
            positions=batch.positions.data_ptr(),
            starts=batch.starts.data_ptr(),
            sizes=batch.sizes.data_ptr(),
            row_starts=batch.row_starts.data_ptr(),
            slots=batch.slots.data_ptr(),
            rows=batch.positions.shape[0],
            spans=batch.starts.shape[0],
            page_size=batch.page_size,
            columns=batch.tables[0].shape[1],
            limit=batch.limit,
            most_rows=MOST_ROWS,
        )
        self._address = addressof(self._struct)
        self._by_group = [
            (slots.data_ptr(), table.data_ptr())
            for slots, table in zip(batch.kv_slots, batch.tables, strict=True)
        ]

    @cached_property
    def reference(self) -> ReferencePlan:
        """The same forward in plain torch."""
        return ReferencePlan(self.batch, self.store, self.masks)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """See `AttentionPlan`."""
        return self.reference(layer, q, k, v, sinks)

    def joined(self, layer: int, qkv: Tensor, q_heads: int, sinks: Tensor | None = None) -> Tensor:
        """See `ReferencePlan.joined`."""
        return self.reference.joined(layer, qkv, q_heads, sinks)

    def stores(self, layer: int) -> bool:
        """Whether C can read and write the layer's keys and values."""
        store = self.store
        return store.spec.dtype == torch.float32 and store.scales[layer] == NO_SCALE

    def struct(self, layer: int, **fields: Any) -> LayerStruct:
        """Return the layer as `heads` reads it. fields: those that the models know."""
        mask = self.masks[layer]
        return LayerStruct(
            store=self.store.layers[layer].data_ptr(),
            window=mask.window or 0,
            causal=mask.causal,
            **fields,
        )

    def heads(self, layer: int, struct: LayerStruct, qkv: Tensor) -> Tensor:
        """Norm and rotate heads, store keys and values, attend: qkv [T, (Hq + 2 Hkv) D], which is
        overwritten -> [T, Hq * D]."""
        slots, table = self._by_group[self.store.spec.group_of(layer)]
        width = struct.q_heads * struct.width
        out = qkv.new_empty(qkv.shape[0], width)
        self._calls.attention(
            self._address, addressof(struct), slots, table, qkv.data_ptr(), out.data_ptr()
        )
        if self._longest > MOST_ROWS:
            q = qkv[:, :width].unflatten(1, (struct.q_heads, struct.width))
            self.reference.attend_spans(layer, q, out, more_rows_than=MOST_ROWS)
        return out


class CompiledBackend:
    """Attends in C."""

    def __init__(self, calls: CpuCalls):
        self._calls = calls

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> CompiledPlan:
        return CompiledPlan(batch, store, masks, self._calls)
