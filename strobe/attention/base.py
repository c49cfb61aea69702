"""What an attention backend is given, and what it must answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.kv.store import KVStore


@dataclass(frozen=True)
class Group:
    """Spans of like length, laid out as a rectangle of rows.

    spans [G]: which spans. rows [G, Q]: each span's rows in the batch, its last one repeated to
    fill up. flat [T']: where in the flattened rectangle the group's true rows lie; None when all
    do. target [T']: the same rows in the batch. members: the spans as host integers.
    """

    spans: Tensor
    rows: Tensor
    flat: Tensor | None
    target: Tensor
    members: tuple[int, ...]


class AttentionInputs(NamedTuple):
    """One ragged batch over the paged cache; lengths and positions live on the device.

    positions [T]; slots [T], where the rows' K/V go; starts [S, 1] and sizes [S]: a span's rows see
    no key at starts + sizes or beyond; row_starts [S]: each span's first row; longest: no span has
    more rows; tables [N, columns]: what to add to a position in column position // page_size to get
    its slot; table_rows [S], the spans' rows in it. groups, bounds: for backends that gather on the
    host's word; per group, a position that no key of it reaches, as the host knows it.
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    sizes: Tensor
    row_starts: Tensor
    longest: int
    tables: Tensor
    table_rows: Tensor
    page_size: int
    groups: Sequence[Group]
    bounds: Sequence[int]


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
    graph_safe: bool

    def plan(
        self, inputs: AttentionInputs, store: KVStore, masks: Sequence[LayerMask]
    ) -> AttentionPlan:
        """Prepare one forward: what depends on the batch and not on the layer."""
        ...
