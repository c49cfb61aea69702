"""Lays out spans as one ragged batch, exact on a CPU, padded to a bucket on a GPU.

Legend: S spans, T rows, K maximum drafts of a span, W rows of a span with logits.

    span 0: prefill chunk      span 1: decode     span 2: verify
    [ t t t t t t t t ]        [ tail ]           [ tail d d d d d ]
                    ^             ^                  ^   ^ ^ ^ ^ ^    logits

Logits are a rectangle [S, W]: a span with fewer rows of logits repeats its last one. Where steps
are captured in graphs, spans without rows and rows without a span fill the bucket; both belong to
the spare slot, which has a page of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strobe.host.transfer import upload
from strobe.step import TAIL, Span

Int64Array: TypeAlias = NDArray[np.int64]


class Shape(NamedTuple):
    """Spans S, rows T, K and W of a batch; max_rows: maximum rows of a span."""

    spans: int
    rows: int
    max_rows: int
    max_drafts: int
    max_logits: int


@dataclass(eq=False)
class Layout:
    """The geometry of a batch on the device; unchanged while the same requests decode.

    spans: without padding, as they were laid out first: their starts change from step to step.
    forced: by span, the host's drafts if a grammar has replaced some of the span's own. scored
    [3, A]: rows whose next prompt token is scored, as spans, offsets in them and these tokens.
    packed: all further parts in one int64 tensor, of which they are views.
    """

    shape: Shape
    spans: tuple[Span, ...]
    padded: bool
    scored: Tensor | None
    packed: Tensor
    forced: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    slots: Tensor = field(init=False)
    """[S]"""
    context_rows: Tensor = field(init=False)
    """Rows before the drafts, [S]."""
    drafts: Tensor = field(init=False)
    """Number of drafts, [S]."""
    sizes: Tensor = field(init=False)
    """Number of all rows, [S]."""
    row_starts: Tensor = field(init=False)
    """First row of each span, [S]."""
    active: Tensor = field(init=False)
    """1 for spans with logits, [S]."""
    span_of_row: Tensor = field(init=False)
    """[T]"""
    offset: Tensor = field(init=False)
    """Offset of each row within its span, [T]."""
    tokens: Tensor = field(init=False)
    """The host's tokens, TAIL, or TAIL - 1 - j for the device's draft j, [T]."""
    logits_rows: Tensor | None = field(init=False)
    """Rows with logits, [S * W]; None if every row has logits."""

    def __post_init__(self) -> None:
        spans = self.shape.spans
        rows = self.shape.rows
        per_span = self.packed[: 6 * spans].reshape(6, spans)
        per_row = self.packed[6 * spans : 6 * spans + 3 * rows].reshape(3, rows)
        self.slots, self.context_rows, self.drafts = per_span[:3]
        self.sizes, self.row_starts, self.active = per_span[3:]
        self.span_of_row, self.offset, self.tokens = per_row
        end = 6 * spans + 3 * rows
        self.logits_rows = self.packed[end:] if len(self.packed) > end else None

    def with_packed(self, packed: Tensor) -> Layout:
        """Return the same layout over another packed tensor, such as a graph's input."""
        return self if packed is self.packed else replace(self, packed=packed)

    def narrowed(self, packed: Tensor, shape: Shape) -> Layout:
        """Return the layout of fewer drafts that `StepOps.narrow` packed for that shape."""
        return replace(self, packed=packed, shape=shape)

    @functools.cached_property
    def row_counts(self) -> list[int]:
        """Rows of each of the spans."""
        return [span.num_rows for span in self.spans]

    @functools.cached_property
    def on_host(self) -> HostLayout:
        """The layout over NumPy arrays; on a CPU only."""
        return HostLayout(
            shape=self.shape,
            slots=self.slots.numpy(),
            context_rows=self.context_rows.numpy(),
            drafts=self.drafts.numpy(),
            span_of_row=self.span_of_row.numpy(),
            offset=self.offset.numpy(),
            tokens=self.tokens.numpy(),
        )

    @functools.cached_property
    def slot_of_row(self) -> Tensor:
        """Slot of each row, [T]."""
        return self.slots[self.span_of_row]

    @functools.cached_property
    def draft_of_row(self) -> Tensor:
        """Index of the device draft in each row, [T]; 0 for other rows."""
        return (TAIL - 1 - self.tokens).clip(0)

    @functools.cached_property
    def draft_rows(self) -> Tensor:
        """Rows of each span's drafts, [S, K]; past its last draft, the rows that follow."""
        steps = torch.arange(self.shape.max_drafts, device=self.slots.device)
        first = self.row_starts + self.context_rows
        return (first[:, None] + steps).clip(max=self.shape.rows - 1)

    @property
    def logits_for_all_rows(self) -> bool:
        """Whether computing logits for every row costs no more than gathering: spans of unequal
        length have fewer rows than places for logits."""
        shape = self.shape
        return self.logits_rows is not None and shape.rows <= shape.spans * shape.max_logits

    def select(self, x: Tensor) -> Tensor:
        """Select the rows with logits of x [T, ...]: [S * W, ...]."""
        return x if self.logits_rows is None else x.index_select(0, self.logits_rows)

    @functools.cached_property
    def device_drafts(self) -> Tensor:
        """Number of each span's drafts that the device proposes, [S]: all or none."""
        first = (self.row_starts + self.context_rows).clip(max=self.shape.rows - 1)
        return self.drafts * (self.tokens[first] < TAIL)


@dataclass(frozen=True, eq=False)
class HostLayout:
    """The parts of a layout that a CPU's steps read, over NumPy arrays that share its memory; see
    `Layout` for their meaning."""

    shape: Shape
    slots: Int64Array
    context_rows: Int64Array
    drafts: Int64Array
    span_of_row: Int64Array
    offset: Int64Array
    tokens: Int64Array

    @functools.cached_property
    def slot_of_row(self) -> Int64Array:
        """Slot of each row, [T]."""
        return self.slots[self.span_of_row]

    @functools.cached_property
    def token_source(self) -> Int64Array:
        """Index of each row's token in the spans' newest tokens, the host's tokens and the
        device's drafts, concatenated, [T]."""
        host = self.shape.spans + np.arange(self.shape.rows)
        draft_of_row = (TAIL - 1 - self.tokens).clip(0)
        drafts = host[-1] + 1 + self.span_of_row * self.shape.max_drafts + draft_of_row
        host_source = np.where(self.tokens == TAIL, self.span_of_row, host)
        return np.where(self.tokens < TAIL, drafts, host_source)


def exact_shape(spans: Sequence[Span]) -> Shape:
    """The spans' shape without any padding."""
    counts = [span.num_rows for span in spans]
    drafts = max([span.num_drafts for span in spans])
    logits = max([span.num_logits for span in spans])
    return Shape(
        spans=len(spans),
        rows=sum(counts),
        max_rows=max(counts),
        max_drafts=drafts,
        max_logits=max(logits, 1),
    )


def lay_out(
    spans: Sequence[Span],
    device: torch.device,
    shape: Shape,
    *,
    padded: bool,
    spare_slot: int,
    forced: Mapping[int, Sequence[int]] | None = None,
) -> Layout:
    """Lay out spans in that shape; spans with more rows than it keep them all, to be narrowed.
    spare_slot: slot of the padding. forced: by span, drafts in place of its own."""
    forced = forced or {}
    counts = [span.num_rows for span in spans]
    shape = shape._replace(rows=max(shape.rows, sum(counts)))
    width = shape.max_logits
    has_logits_rows = padded or any(not s.num_rows == s.num_logits == width for s in spans)
    tokens = [
        (*span.tokens[: span.num_context_rows], *forced[i]) if i in forced else span.tokens
        for i, span in enumerate(spans)
    ]
    packed = _pack(spans, tokens, counts, shape, spare_slot=spare_slot, index=has_logits_rows)
    scored = [(i, j, token) for i, s in enumerate(spans) for j, token in enumerate(s.scored_tokens)]
    return Layout(
        shape=shape,
        spans=tuple(spans),
        padded=padded,
        scored=upload(scored, device).T if scored else None,
        packed=upload(packed, device),
        forced=forced,
    )


def _pack(
    spans: Sequence[Span],
    tokens_of: Sequence[tuple[int, ...]],
    counts: list[int],
    shape: Shape,
    *,
    spare_slot: int,
    index: bool,
) -> Int64Array:
    """Return the parts of a layout in one array. tokens_of: the host's tokens by span. counts: rows
    by span. index: whether logits_rows are part of it."""
    fill = shape.spans - len(spans)
    ends = np.cumsum(counts)
    firsts = ends - counts
    used = int(ends[-1])
    num_padding = shape.rows - used
    assert not num_padding or fill, "rows of no span need a padding span"
    slots, context, drafts, logits = np.array(
        [(s.slot, s.num_context_rows, s.num_drafts, s.num_logits) for s in spans], dtype=np.int64
    ).T
    offset = np.arange(used) - np.repeat(firsts, counts)
    tokens = TAIL - 1 - offset + np.repeat([len(known) for known in tokens_of], counts)
    for known, first in zip(tokens_of, firsts.tolist(), strict=True):
        if known != (TAIL,):
            tokens[first : first + len(known)] = known
    span_of_row = np.repeat(np.arange(len(spans)), counts)
    per_span = [
        (slots, spare_slot),
        (context, 0),
        (drafts, 0),
        (counts, 0),
        (firsts, used),
        (logits > 0, 0),
    ]
    per_row = [(span_of_row, len(spans)), (offset, 0), (tokens, 0)]
    parts = [np.append(part, np.full(fill, filler)) for part, filler in per_span]
    parts += [np.append(part, np.full(num_padding, filler)) for part, filler in per_row]
    if index:
        from_end = (logits[:, None] - np.arange(shape.max_logits)).clip(1)
        parts.append((ends[:, None] - from_end).clip(0).ravel())
        parts.append(np.full(fill * shape.max_logits, shape.rows - 1))
    return np.concatenate(parts).astype(np.int64)
