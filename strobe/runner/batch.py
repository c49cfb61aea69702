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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.step import TAIL, Span
from strobe.transfer import upload


class Shape(NamedTuple):
    """Spans S, rows T, K and W of a batch; max_rows: maximum rows of a span."""

    spans: int
    rows: int
    max_rows: int
    max_drafts: int
    max_logits: int


@dataclass(eq=False)
class Layout:
    """The geometry of a batch; unchanged while the same requests decode.

    spans: without padding; their starts change from step to step. scored [3, A]: rows whose next
    prompt token is scored, as spans, offsets in them and these tokens. Per span [S]: slots;
    context_rows, rows before the drafts; drafts; sizes, all rows; row_starts, the first row;
    active, 1 if logits are needed. Per row [T]: span_of_row; offset within the span; tokens: the
    host's, TAIL, or TAIL - 1 - j for the device's draft j. logits_rows [S * W], None if every row
    has logits. packed: all of these in one int64 tensor.
    """

    shape: Shape
    spans: tuple[Span, ...]
    padded: bool
    scored: Tensor | None
    packed: Any

    def __post_init__(self) -> None:
        """Make the parts, in the order of the class docstring, as views of `packed`."""
        spans = self.shape.spans
        rows = self.shape.rows
        first = 6 * spans
        end = 6 * spans + 3 * rows
        self.slots, self.context_rows, self.drafts, *others = self.packed[:first].reshape(6, spans)
        self.sizes, self.row_starts, self.active = others
        self.span_of_row, self.offset, self.tokens = self.packed[first:end].reshape(3, rows)
        self.logits_rows = self.packed[end:] if len(self.packed) > end else None

    def with_packed(self, packed: Tensor) -> Layout:
        """Return the same layout over another packed tensor, such as a graph's input."""
        return self if packed is self.packed else replace(self, packed=packed)

    @functools.cached_property
    def row_counts(self) -> list[int]:
        """Rows of each of the spans."""
        return [span.num_rows for span in self.spans]

    @functools.cached_property
    def arrays(self) -> Layout:
        """The layout over NumPy arrays; on a CPU only."""
        return replace(self, packed=self.packed.numpy())

    @functools.cached_property
    def token_source(self) -> Any:
        """[T], of `arrays`: index of a row's token in the spans' newest tokens, the host's tokens
        and the device's drafts, concatenated."""
        host = self.shape.spans + np.arange(self.shape.rows)
        drafts = host[-1] + 1 + self.span_of_row * self.shape.max_drafts + self.draft_of_row
        host_source = np.where(self.tokens == TAIL, self.span_of_row, host)
        return np.where(self.tokens < TAIL, drafts, host_source)

    @functools.cached_property
    def slot_of_row(self) -> Any:
        """Slot of each row, [T]."""
        return self.slots[self.span_of_row]

    @functools.cached_property
    def draft_of_row(self) -> Any:
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

    def narrow(self, drafts: Tensor, shape: Shape, *, kernels: bool = False) -> Layout:
        """Keep the first `drafts` [S] drafts of each span, padded to that shape."""
        if kernels:
            from strobe.kernels.narrow import narrow

            return replace(self, shape=shape, packed=narrow(self, drafts, shape))
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
        return replace(self, shape=shape, packed=packed)


def exact_shape(spans: Sequence[Span]) -> Shape:
    """The spans' shape without any padding."""
    counts = [span.num_rows for span in spans]
    drafts = max([span.num_drafts for span in spans])
    logits = max([span.num_logits for span in spans])
    return Shape(len(spans), sum(counts), max(counts), drafts, max(logits, 1))


def lay_out(
    spans: Sequence[Span], device: torch.device, shape: Shape, padded: bool, spare_slot: int
) -> Layout:
    """Lay out spans in that shape; spans with more rows than it keep them all, to be narrowed.
    spare_slot: slot of the padding."""
    counts = [span.num_rows for span in spans]
    shape = shape._replace(rows=max(shape.rows, sum(counts)))
    width = shape.max_logits
    has_logits_rows = padded or any(not s.num_rows == s.num_logits == width for s in spans)
    packed = upload(_pack(spans, counts, shape, spare_slot, index=has_logits_rows), device)
    scored = [(i, j, token) for i, s in enumerate(spans) for j, token in enumerate(s.scored_tokens)]
    scored_rows = upload(scored, device).T if scored else None
    return Layout(shape, tuple(spans), padded, scored_rows, packed)


def _pack(
    spans: Sequence[Span], counts: list[int], shape: Shape, spare_slot: int, *, index: bool
) -> np.ndarray:
    """index: whether logits_rows are part of it."""
    fill = shape.spans - len(spans)
    ends = np.cumsum(counts)
    firsts = ends - counts
    used = int(ends[-1])
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
