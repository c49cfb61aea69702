"""What an attention backend is given, a batch, and what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.kv.store import KVStore


class Batch(NamedTuple):
    """One ragged batch over the paged cache, as a forward reads it; lengths and positions live on
    the device. T rows of S spans.

    ids, positions [T]: the rows' tokens and where they stand; kv_slots [T]: where their K/V go.
    slots [S]: the spans' rows in the tables; starts, sizes [S]: a span's rows see no key at starts
    + sizes or beyond; row_starts [S]: each span's first row; longest: no span has more rows.
    draft_lengths [S]: how many of a span's drafts lie within the context. tables [N, columns]: what
    to add to a position in column position // page_size to get its slot. limit: the context's end:
    rows there and beyond are drafts that cannot be accepted, and no other request may see their
    keys. For backends that gather on the host's word, per span: row_counts, and bounds, a position
    that no key of it reaches.
    """

    ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    slots: Tensor
    starts: Tensor
    sizes: Tensor
    row_starts: Tensor
    longest: int
    draft_lengths: Tensor
    tables: Tensor
    page_size: int
    limit: int = 1 << 62
    row_counts: Sequence[int] = ()
    bounds: Sequence[int] = ()


class AttentionPlan(Protocol):
    """One forward's attention. What trains passes a plain function instead."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq * D]: store K/V, then attend.

        sinks [Hq]: logits that each row's softmax has beside its keys', and that weigh nothing.
        """
        ...


class PagedPlan(AttentionPlan, Protocol):
    """A plan whose cache is within reach of a kernel that stores keys and values itself.

    kv(layer): the layer's [slots, 2, Hkv, D]; slots [T]: where the rows go in it; over(layer, q [T,
    Hq, D], sinks [Hq] or None) -> [T, Hq * D]: attend, the rows' K/V being stored already.
    """

    @property
    def slots(self) -> Tensor: ...

    def kv(self, layer: int) -> Tensor: ...

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor: ...


class AttentionBackend(Protocol):
    """What makes the plan of each forward."""

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> AttentionPlan:
        """Prepare one forward: what depends on the batch and not on the layer."""
        ...
