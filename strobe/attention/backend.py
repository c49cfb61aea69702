"""The interface of attention backends: a batch, and the protocols that a backend implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.kv.kv_store import KVScale, KVStore


class Batch(NamedTuple):
    """A ragged batch of T rows in S spans over the paged cache; lengths and positions live on the
    device.

    ids, positions [T]: each row's token and position; kv_slots: by page group, where its K/V are
    stored [T].
    slots [S]: each span's row in `tables`; starts, sizes [S]: rows of a span see keys below
    starts + sizes; row_starts [S]: each span's first row; longest: maximum rows of a span. offsets
    [T]: each row's offset in its span, 0 for padding.
    draft_lengths [S]: number of a span's drafts within the context. tables [N, columns]: by page
    group, position p is in slot table[n, p // page_size] + p. limit: the end of the context. Rows
    from there on are drafts that cannot be accepted, and no other request may see their keys.
    row_counts, bounds, for backends that gather: host copies of each span's rows and an upper bound
    (exclusive) of its key positions.
    """

    ids: Tensor
    positions: Tensor
    kv_slots: Sequence[Tensor]
    starts: Tensor
    draft_lengths: Tensor
    slots: Tensor
    sizes: Tensor
    row_starts: Tensor
    offsets: Tensor
    longest: int
    tables: Sequence[Tensor]
    page_size: int
    limit: int = 1 << 62
    row_counts: Sequence[int] = ()
    bounds: Sequence[int] = ()


class AttentionPlan(Protocol):
    """Attention of one forward. Training passes a plain function instead."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq * D]: store K/V, then attend.

        sinks [Hq]: one more logit in each row's softmax denominator, without a value.
        """
        ...


class PagedPlan(AttentionPlan, Protocol):
    """A plan that exposes its cache, so that a fused kernel can store keys and values itself.

    kv(layer): the layer's cache [slots, 2, Hkv, D]; slots(layer) [T]: each row's slot in it; sizes
    [S]: rows of each span, after which all rows are padding; None without padding;
    scale(layer): what the layer's keys and values are divided by before they are stored;
    over(layer, q [T, Hq, D], sinks [Hq] or None) -> [T, Hq * D]: attend to K/V stored before, with
    q multiplied by the keys' scale.
    """

    @property
    def sizes(self) -> Tensor | None: ...

    def kv(self, layer: int) -> Tensor: ...

    def slots(self, layer: int) -> Tensor: ...

    def scale(self, layer: int) -> KVScale: ...

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor: ...


def paged_plan(attend: Any) -> PagedPlan | None:
    """Return a plan that exposes its cache, None for another and for a plain function. Looks at one
    attribute, as each forward asks: a check of the whole protocol takes 30 microseconds."""
    return attend if hasattr(attend, "over") else None


class AttentionBackend(Protocol):
    """Makes the plan of each forward."""

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> AttentionPlan:
        """Prepare everything in one forward that depends on the batch but not on the layer."""
        ...
