"""Recurrent layers with one state per sequence, wrapped around any attention backend.

Legend: S spans, T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from strobe.attention.backend import AttentionBackend, AttentionPlan, Batch
from strobe.attention.groups import groups_of
from strobe.attention.mask import LayerMask
from strobe.kernels.kept_rows import rows_fit
from strobe.kernels.reference_recurrent import DeltaSpans, PaddedGroup
from strobe.kv.kv_store import KVStore
from strobe.kv.states import StateStore

Cover: TypeAlias = Callable[[Batch, Tensor, int], tuple[Tensor, Tensor]]
"""Finds the rows that states lack, as `cover` does."""


def cover(batch: Batch, length: Tensor, pending: int) -> tuple[Tensor, Tensor]:
    """A batch of S spans -> accepted rows that the state lacks [S] int64, whether a sequence begins
    [S]. length [N]: positions in each slot's state, updated. pending: maximum rows that are kept
    next to a state. The twin of `strobe.kernels.step_bookkeeping.cover`."""
    start = batch.starts
    sizes = batch.sizes
    starts_fresh = start == 0
    old = length.index_select(0, batch.slots)
    accepted = (start - old).clamp(0, pending).masked_fill(starts_fresh, 0)
    fits = rows_fit(accepted, sizes, starts_fresh, pending)
    written = torch.where(sizes > pending, start + sizes, start)
    length.index_copy_(0, batch.slots, torch.where(fits, old, written))
    return accepted, starts_fresh


class RecurrentBackend:
    """Another backend's attention, and recurrent states for the layers without attention. cover:
    the function of this name, or its kernel."""

    def __init__(self, backend: AttentionBackend, states: StateStore, cover: Cover = cover):
        self.backend = backend
        self.states = states
        self.cover = cover

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> RecurrentPlan:
        attend = self.backend.plan(batch, store, masks)
        return RecurrentPlan(attend, batch, self.states, self.cover)


class RecurrentPlan:
    """One forward's attention plan, and its spans as recurrent layers read them.

    A span's start less the positions in its slot's state is the number of accepted rows whose
    changes the state lacks. A sequence starts from a zero state, whatever the slot held before.
    """

    def __init__(
        self, attend: AttentionPlan, batch: Batch, states: StateStore, cover: Cover = cover
    ):
        self.attend = attend
        self.batch = batch
        self.states = states
        self.accepted, self.starts_fresh = cover(batch, states.length, states.pending)

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
