"""Spans as one ragged batch: what the host lays out, exact on a CPU, padded to a bucket on a GPU.

Legend: S spans, T rows, K drafts of a span at most, W rows of a span with logits.

    span 0: prefill chunk      span 1: decode     span 2: verify
    [ t t t t t t t t ]        [ tail ]           [ tail d d d d d ]
                    ^             ^                  ^   ^ ^ ^ ^ ^    logits

Logits are a rectangle [S, W]: a span with fewer rows of them has its last row repeated. Where steps
are captured in graphs, spans of no rows and rows of no span fill a bucket up; both belong to the
spare slot, which has a page of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.step import TAIL, Span
from strobe.transfer import upload

FIELDS = (
    ("slots", "context_rows", "drafts", "sizes", "row_starts", "active"),
    ("span_of_row", "offset", "tokens"),
)
"""The parts of a packed layout, those per span and those per row; `logits_rows` follow."""


class Shape(NamedTuple):
    """Spans S, rows T, K and W of a batch; max_rows: no span has more rows."""

    spans: int
    rows: int
    max_rows: int
    max_drafts: int
    max_logits: int


class ScoredRows(NamedTuple):
    """Rows whose next prompt token is scored, as spans [A] and offsets [A] within them, which stay
    the same when a layout is narrowed; tokens [A]: the next ones; top: the number of most probable
    tokens to report for each."""

    spans: Tensor
    offsets: Tensor
    tokens: Tensor
    top: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The geometry of a batch; the same for every step while the same requests decode.

    spans: those that are no padding; where they start differs from step to step. Per span [S]:
    slots; certain, rows that are no drafts; drafts; sizes, all rows; row_starts, the first row;
    active, 1 where logits are wanted. Per row [T]: span_of_row; offset, its place in the span;
    tokens: the host's, TAIL, or TAIL - 1 - j for draft j of the device. logits_rows [S * W]; None
    where each row is one. packed: all of these in one int64 tensor.
    """

    shape: Shape
    spans: tuple[Span, ...]
    padded: bool
    scored: ScoredRows | None
    packed: Tensor
    slots: Any
    context_rows: Any
    drafts: Any
    sizes: Any
    row_starts: Any
    active: Any
    span_of_row: Any
    offset: Any
    tokens: Any
    logits_rows: Any

    def with_packed(self, packed: Tensor) -> Layout:
        """The same layout read from elsewhere, where others of its shape will be."""
        if packed is self.packed:
            return self
        return replace(self, packed=packed, **unpack(packed, self.shape))

    @functools.cached_property
    def row_counts(self) -> list[int]:
        """Rows of each of the spans."""
        return [span.num_rows for span in self.spans]

    @functools.cached_property
    def arrays(self) -> Layout:
        """The same over NumPy arrays, of a layout on a CPU."""
        return replace(self, **unpack(self.packed.numpy(), self.shape))

    @functools.cached_property
    def token_source(self) -> Any:
        """[T], of `arrays`: where a row's token stands among the spans' newest ones, the host's and
        the device's drafts, one behind the other."""
        host = self.shape.spans + np.arange(self.shape.rows)
        drafts = host[-1] + 1 + self.span_of_row * self.shape.max_drafts + self.draft_of_row
        host_source = np.where(self.tokens == TAIL, self.span_of_row, host)
        return np.where(self.tokens < TAIL, drafts, host_source)

    @functools.cached_property
    def slot_of_row(self) -> Any:
        """[T]"""
        return self.slots[self.span_of_row]

    @functools.cached_property
    def draft_of_row(self) -> Any:
        """[T]: which of the device's drafts a row holds; 0 where it holds none."""
        return (TAIL - 1 - self.tokens).clip(0)

    @functools.cached_property
    def draft_rows(self) -> Tensor:
        """[S, K]: the rows behind each span's certain ones, its drafts and whatever follows."""
        steps = torch.arange(self.shape.max_drafts, device=self.slots.device)
        first = self.row_starts + self.context_rows
        return (first[:, None] + steps).clip(max=self.shape.rows - 1)

    @property
    def logits_for_all_rows(self) -> bool:
        """Whether it has fewer rows than places for rows with logits: where spans differ in
        length, every row is one, or takes less to compute than to leave out."""
        shape = self.shape
        return self.logits_rows is not None and shape.rows <= shape.spans * shape.max_logits

    @property
    def scored_rows(self) -> Tensor:
        """Rows [A] whose next prompt token is scored."""
        assert self.scored is not None
        return self.row_starts.index_select(0, self.scored.spans) + self.scored.offsets

    def select(self, x: Tensor) -> Tensor:
        """Rows [T, ...] -> those with logits, [S * W, ...]."""
        return x if self.logits_rows is None else x.index_select(0, self.logits_rows)

    @functools.cached_property
    def device_drafts(self) -> Tensor:
        """[S]: of each span's drafts those that the device makes, which are all or none."""
        first = (self.row_starts + self.context_rows).clip(max=self.shape.rows - 1)
        return self.drafts * (self.tokens[first] < TAIL)

    def narrow(self, drafts: Tensor, shape: Shape, *, kernels: bool = False) -> Layout:
        """The same spans, padded to that shape, with drafts [S] of theirs, of each the first."""
        if kernels:
            from strobe.kernels.narrow import narrow

            packed = narrow(self, drafts, shape)
            return replace(self, shape=shape, packed=packed, **unpack(packed, shape))
        sizes = self.context_rows + drafts
        ends = sizes.cumsum(0)
        row_starts = ends - sizes
        rows = torch.arange(shape.rows, device=drafts.device)
        # Rows of no span are a padding span's, as `lay_out` has them.
        span_of_row = torch.searchsorted(ends, rows, right=True).clip(max=shape.spans - 1)
        used = rows < ends[-1]
        offset = torch.where(used, rows - row_starts[span_of_row], 0)
        source = (self.row_starts[span_of_row] + offset).clip(max=self.shape.rows - 1)
        tokens = torch.where(used, self.tokens[source], 0)
        from_end = (1 + drafts)[:, None] - torch.arange(shape.max_logits, device=drafts.device)
        logits_rows = (ends[:, None] - from_end.clip(min=1)).clip(0, shape.rows - 1)
        logits_rows = torch.where(sizes[:, None] > 0, logits_rows, shape.rows - 1)
        spans = [self.slots, self.context_rows, drafts, sizes, row_starts, self.active]
        packed = torch.cat([*spans, span_of_row, offset, tokens, logits_rows.flatten()])
        return replace(self, shape=shape, packed=packed, **unpack(packed, shape))


def unpack(packed: Any, shape: Shape) -> dict[str, Any]:
    """The parts of a packed layout, as views."""
    fields: dict[str, Any] = {}
    first = 0
    for names, count in zip(FIELDS, (shape.spans, shape.rows), strict=True):
        for name in names:
            fields[name] = packed[first : first + count]
            first += count
    fields["logits_rows"] = packed[first:] if len(packed) > first else None
    return fields


def exact_shape(spans: Sequence[Span]) -> Shape:
    """The spans' shape without any padding."""
    counts = [span.num_rows for span in spans]
    drafts = max([span.num_drafts for span in spans])
    logits = max([span.num_logits for span in spans])
    return Shape(len(spans), sum(counts), max(counts), drafts, max(logits, 1))


def lay_out(
    spans: Sequence[Span], device: torch.device, shape: Shape, padded: bool, spare_slot: int
) -> Layout:
    """spare_slot: the slot of what pads the spans to the shape; where they have more rows than it,
    it is all of theirs, to be narrowed."""
    counts = [span.num_rows for span in spans]
    shape = shape._replace(rows=max(shape.rows, sum(counts)))
    width = shape.max_logits
    has_logits_rows = padded or any(not s.num_rows == s.num_logits == width for s in spans)
    packed = upload(_pack(spans, counts, shape, spare_slot, index=has_logits_rows), device)
    scored = _scored_rows(spans, device) if any(span.scored_tokens for span in spans) else None
    parts = unpack(packed, shape)
    return Layout(shape, tuple(spans), padded, scored, packed, **parts)


def _pack(
    spans: Sequence[Span], counts: list[int], shape: Shape, spare_slot: int, *, index: bool
) -> np.ndarray:
    """index: whether logits_rows are part of it."""
    fill = shape.spans - len(spans)
    ends = np.cumsum(counts)
    firsts, used = ends - counts, int(ends[-1])
    num_padding = shape.rows - used
    assert not num_padding or fill, "rows of no span need a padding span"
    slots, context, drafts, logits, known = np.array(
        [(s.slot, s.num_context_rows, s.num_drafts, s.num_logits, len(s.tokens)) for s in spans],
        dtype=np.int64,
    ).T
    per_span = [
        (slots, spare_slot), (context, 0), (drafts, 0), (counts, 0), (firsts, used),
        (logits > 0, 0),
    ]  # fmt: skip
    offset = np.arange(used) - np.repeat(firsts, counts)
    tokens = TAIL - 1 - offset + np.repeat(known, counts)
    for span, first in zip(spans, firsts.tolist(), strict=True):
        if span.tokens != (TAIL,):
            tokens[first : first + len(span.tokens)] = span.tokens
    per_row = [(np.repeat(np.arange(len(spans)), counts), len(spans)), (offset, 0), (tokens, 0)]
    parts = [np.append(part, np.full(fill, filler)) for part, filler in per_span]
    parts += [np.append(part, np.full(num_padding, filler)) for part, filler in per_row]
    if index:
        from_end = (logits[:, None] - np.arange(shape.max_logits)).clip(1)
        parts.append((ends[:, None] - from_end).clip(0).ravel())
        parts.append(np.full(fill * shape.max_logits, shape.rows - 1))
    return np.concatenate(parts).astype(np.int64)


def _scored_rows(spans: Sequence[Span], device: torch.device) -> ScoredRows:
    rows = [(i, j, token) for i, s in enumerate(spans) for j, token in enumerate(s.scored_tokens)]
    top = max([span.top_logprobs for span in spans])
    owners, offsets, tokens = upload(rows, device).unbind(1)
    return ScoredRows(owners, offsets, tokens, top)
