"""The few shapes that batches are padded to, so that one captured graph serves many of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from strobe.runner.layout import Shape
from strobe.step import TAIL, Span, num_rows

MAX_CAPTURED_ROWS = 512
"""Maximum rows of a captured step whose spans differ in length."""

NARROW_DRAFTS = (3, 7)
"""Maximum drafts of a span in captured steps that verify a choice of drafts, besides all drafts."""


class Buckets:
    """Sizes of spans and rows."""

    def __init__(self, max_spans: int, num_drafts: int, block: int = 0, *, narrow: bool = True):
        """max_spans: maximum requests of a step; num_drafts: maximum drafts of a request; block:
        rows of a drafter's block; narrow: whether requests often differ in their drafts. No step of
        more than `max_rows` rows is captured."""
        self.max_spans = max_spans
        self.num_drafts = num_drafts
        self.narrow = narrow
        self.block = max(1 + num_drafts, block)
        self.max_rows = max(MAX_CAPTURED_ROWS, max_spans * self.block)
        steps = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_spans, 32)]
        self.spans = [*[s for s in steps if s < max_spans], max_spans]
        # Few if spans differ in length, since their rows vary too; and one span more than there
        # are requests, for the padding's rows.
        self.mixed_spans = [*[s for s in (4, 16, 64, 256) if s < max_spans], max_spans + 1]
        self.rows = [16, 32, 64, 128, 192, 256, 384, MAX_CAPTURED_ROWS]
        more = [*range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, self.max_rows, 512)]
        self.narrow_rows = [*self.rows, *[n for n in more if n < self.max_rows], self.max_rows]
        self.narrow_drafts = [*[n for n in NARROW_DRAFTS if n < num_drafts], num_drafts]

    def shape_of(self, spans: Sequence[Span], num_verified: int | None = None) -> Shape:
        """Return the shape that the spans are padded to. num_verified: number of device drafts to
        verify; None: all."""
        count = len(spans)
        longest = max([span.num_rows for span in spans])
        rows = num_rows(spans, num_verified)
        decoding = all(span.tokens[0] == TAIL for span in spans)
        if decoding and rows == count * longest:
            return self._equal_spans(spans, longest)
        drafts = max([span.num_drafts for span in spans])
        chosen = num_verified is not None or (decoding and self.narrow)
        if chosen and longest <= self.block:
            return self._chosen_drafts(count, rows, longest, drafts)
        if rows > MAX_CAPTURED_ROWS:
            return self._eager(count, rows, drafts)
        return self._mixed(count, rows, longest)

    def _equal_spans(self, spans: Sequence[Span], size: int) -> Shape:
        """All requests decode with the same number of rows."""
        count = _round_up(self.spans, len(spans))
        return Shape(
            spans=count,
            rows=count * size,
            max_rows=size,
            max_drafts=max([span.num_drafts for span in spans]),
            max_logits=max([span.num_logits for span in spans]),
        )

    def _chosen_drafts(self, count: int, rows: int, longest: int, drafts: int) -> Shape:
        """Requests decode with different numbers of drafts."""
        padded = _round_up(self.narrow_rows, rows)
        drafts = _round_up(self.narrow_drafts, drafts)
        return Shape(
            spans=_round_up(self.mixed_spans, count + (padded > rows)),
            rows=padded,
            max_rows=max(longest, 1 + drafts),
            max_drafts=drafts,
            max_logits=1 + drafts,
        )

    def _eager(self, count: int, rows: int, drafts: int) -> Shape:
        """Too many rows, with prompts among them, to be captured: no row is padding."""
        drafts = self.num_drafts if drafts else 0
        return Shape(
            spans=_round_up(self.spans, count),
            rows=rows,
            max_rows=rows,
            max_drafts=drafts,
            max_logits=1 + drafts,
        )

    def _mixed(self, count: int, rows: int, longest: int) -> Shape:
        """Prompts and decoding requests, few rows."""
        padded = _round_up(self.rows, rows)
        block = 1 + self.num_drafts
        return Shape(
            spans=_round_up(self.mixed_spans, count + (padded > rows)),
            rows=padded,
            max_rows=block if longest <= block else padded,
            max_drafts=block - 1,
            max_logits=block,
        )

    def is_captured(self, shape: Shape) -> bool:
        """Whether batches of that shape come again and again: decoding, and small mixed steps."""
        return shape.rows <= MAX_CAPTURED_ROWS or shape.max_rows <= self.block


def verified_rows(
    buckets: Buckets | None, count: int, drafting: int, max_drafts: int
) -> list[tuple[int, int]]:
    """List the steps of `count` requests in which `drafting` of them verify up to `max_drafts`
    drafts each, as (drafts of all together, rows), ascending. Without buckets, in eighths of all
    drafts."""
    all_drafts = drafting * max_drafts
    if buckets is None:
        counts = sorted({-(-all_drafts * i // 8) for i in range(1, 9)})
        return [(drafts, count + drafts) for drafts in counts]
    rows = [rows for rows in buckets.narrow_rows if count < rows < count + all_drafts]
    padded = _round_up(buckets.spans, count) * (1 + max_drafts)
    if drafting < count:
        padded = _round_up(buckets.narrow_rows, count + all_drafts)
    return [*[(n - count, n) for n in rows], (all_drafts, padded)]


def _round_up(sizes: Sequence[int], size: int) -> int:
    return sizes[bisect_left(sizes, size)]
