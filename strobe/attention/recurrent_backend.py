"""Recurrent layers with one state per sequence, wrapped around any attention backend.

Legend: S spans, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from strobe.attention.backend import AttentionBackend, AttentionPlan, Batch
from strobe.attention.groups import groups_of
from strobe.attention.mask import LayerMask
from strobe.kernels.kept_rows import rows_fit
from strobe.kernels.reference_recurrent import DeltaSpans, PaddedGroup
from strobe.kv.kv_store import KVStore
from strobe.kv.states import StateStore


class RecurrentBackend:
    """Another backend's attention, and recurrent states for the layers without attention. kernels:
    use a triton kernel."""

    def __init__(self, backend: AttentionBackend, states: StateStore, *, kernels: bool = False):
        self.backend = backend
        self.states = states
        self.kernels = kernels

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> RecurrentPlan:
        attend = self.backend.plan(batch, store, masks)
        return RecurrentPlan(attend, batch, self.states, kernels=self.kernels)


class RecurrentPlan:
    """One forward's attention plan, and its spans as recurrent layers read them.

    A span's start less the positions in its slot's state is the number of accepted rows whose
    changes the state lacks. A sequence starts from a zero state, whatever the slot held before.
    """

    def __init__(
        self, attend: AttentionPlan, batch: Batch, states: StateStore, *, kernels: bool = False
    ):
        self.attend = attend
        self.batch = batch
        self.states = states
        if kernels:
            from strobe.kernels.step_bookkeeping import cover

            self.accepted, self.starts_fresh = cover(batch, states.length, states.pending)
            return
        start = batch.starts
        sizes = batch.sizes
        self.starts_fresh = start == 0
        old = states.length.index_select(0, batch.slots)
        self.accepted = (start - old).clamp(0, states.pending).masked_fill(self.starts_fresh, 0)
        fits = rows_fit(self.accepted, sizes, self.starts_fresh, states.pending)
        written = torch.where(sizes > states.pending, start + sizes, start)
        states.length.index_copy_(0, batch.slots, torch.where(fits, old, written))

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend by the wrapped backend; see `AttentionPlan`."""
        return self.attend(layer, q, k, v, sinks=sinks)

    def stored(self, layer: int) -> list[Tensor]:
        """Return the layer's part of each of `StateStore.tensors`."""
        return [tensor[layer] for tensor in self.states.tensors]

    @property
    def spans(self) -> DeltaSpans:
        """The spans, for kernels."""
        return DeltaSpans(
            slots=self.batch.slots,
            first_rows=self.batch.row_starts,
            sizes=self.batch.sizes,
            accepted=self.accepted,
            starts_fresh=self.starts_fresh,
        )

    @cached_property
    def groups(self) -> list[PaddedGroup]:
        """The spans padded to groups, for plain torch."""
        batch = self.batch
        device = self.batch.slots.device
        span_groups = [(torch.arange(len(batch.slots), device=device), batch.longest)]
        if batch.row_counts:
            groups = groups_of(tuple(batch.row_counts), device)
            span_groups = [(group.spans, group.rows.shape[1]) for group in groups]
        padded = list[PaddedGroup]()
        for spans, longest in span_groups:
            sizes = batch.sizes[spans]
            offset = torch.arange(longest, device=device)
            rows = (batch.row_starts[spans][:, None] + offset).clamp_(max=len(batch.positions) - 1)
            padded.append(
                PaddedGroup(
                    slots=batch.slots[spans],
                    sizes=sizes,
                    accepted=self.accepted[spans],
                    starts_fresh=self.starts_fresh[spans],
                    rows=rows,
                    valid=offset < sizes[:, None],
                )
            )
        return padded
