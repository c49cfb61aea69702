"""The few shapes that batches are padded to, so that one captured graph serves many of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from strobe.runner.batch import Shape
from strobe.step import TAIL, Span, num_rows

MAX_CAPTURED_ROWS = 512  # most rows of a step that is captured where its spans differ in length
NARROW_DRAFTS = (3, 7)  # most drafts of a span, beside all there are, where some are chosen


class Buckets:
    """Sizes of spans and rows."""

    def __init__(self, max_spans: int, num_drafts: int, block: int = 0, *, narrow: bool = True):
        """max_spans: most requests at once; num_drafts: the longest draft there is; block: rows of
        a drafter's block; narrow: whether requests often differ in their drafts. max_rows: no step
        of more is captured."""
        self.max_spans = max_spans
        self.num_drafts = num_drafts
        self.narrow = narrow
        self.block = max(1 + num_drafts, block)
        self.max_rows = max(MAX_CAPTURED_ROWS, max_spans * self.block)
        steps = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_spans, 32)]
        self.spans = [*[s for s in steps if s < max_spans], max_spans]
        # Few where spans differ in length, for there the rows vary too; and one span more than
        # there are requests, for rows that belong to none.
        self.mixed_spans = [*[s for s in (4, 16, 64, 256) if s < max_spans], max_spans + 1]
        self.rows = [16, 32, 64, 128, 192, 256, 384, MAX_CAPTURED_ROWS]
        more = [*range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, self.max_rows, 512)]
        self.narrow_rows = [*self.rows, *[n for n in more if n < self.max_rows], self.max_rows]
        self.narrow_drafts = [*[n for n in NARROW_DRAFTS if n < num_drafts], num_drafts]

    def shape_of(self, spans: Sequence[Span], num_verified: int | None = None) -> Shape:
        """The shape for these spans: of its own for a block, where all decode with equally many
        rows. num_verified: how many of the drafts that the device makes are verified; None: all."""
        count = len(spans)
        longest = max([span.num_rows for span in spans])
        rows = num_rows(spans, num_verified)
        drafts = max([s.num_drafts for s in spans])
        decoding = all(span.tokens[0] == TAIL for span in spans)
        if decoding and rows == count * longest:
            num_spans = _round_up(self.spans, count)
            logits = max([span.num_logits for span in spans])
            return Shape(num_spans, num_spans * longest, longest, drafts, logits)
        if ((decoding and self.narrow) or num_verified is not None) and longest <= self.block:
            padded = _round_up(self.narrow_rows, rows)
            num_spans = _round_up(self.mixed_spans, count + (padded > rows))
            drafts = _round_up(self.narrow_drafts, drafts)
            return Shape(num_spans, padded, max(longest, 1 + drafts), drafts, 1 + drafts)
        if rows > MAX_CAPTURED_ROWS:
            drafts = self.num_drafts if drafts else 0
            return Shape(_round_up(self.spans, count), rows, rows, drafts, 1 + drafts)
        padded = _round_up(self.rows, rows)
        block = 1 + self.num_drafts
        num_spans = _round_up(self.mixed_spans, count + (padded > rows))
        return Shape(num_spans, padded, block if longest <= block else padded, block - 1, block)

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
