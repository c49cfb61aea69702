"""The few shapes that batches are padded to, so that one captured graph serves many of them."""

from __future__ import annotations

from bisect import bisect_left

from strobe.runner.batch import Shape

REPLAYED_ROWS = 512
"""Most rows of a step that is captured where its spans differ in length."""


class Shapes:
    """Buckets of spans and rows."""

    def __init__(self, max_spans: int, num_drafts: int):
        """max_spans: most requests at once; num_drafts: the longest draft there is."""
        self.max_spans, self.num_drafts = max_spans, num_drafts
        steps = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_spans, 32)]
        self.spans = [*[s for s in steps if s < max_spans], max_spans]
        # Few where spans differ in length, for there the rows vary too; and one span more than
        # there are requests, for rows that belong to none.
        self.crowds = [*[s for s in (4, 16, 64, 256) if s < max_spans], max_spans + 1]
        self.rows = [16, 32, 64, 128, 192, 256, 384, REPLAYED_ROWS]

    def of(self, spans: int, rows: int, width: int, *, block: bool) -> Shape:
        """The shape for so many spans and rows. width: the longest draft, 0 or more; block: whether
        every span is one token and `width` drafts."""
        if block:
            room = self.spans[bisect_left(self.spans, spans)]
            return Shape(room, room * (1 + width), width)
        if rows > REPLAYED_ROWS:
            width = self.num_drafts if width else 0
            return Shape(self.spans[bisect_left(self.spans, spans)], rows, width)
        padded = self.rows[bisect_left(self.rows, rows)]
        room = self.crowds[bisect_left(self.crowds, spans + (padded > rows))]
        return Shape(room, padded, self.num_drafts)

    def replays(self, shape: Shape) -> bool:
        """Whether batches of that shape come again and again: decoding, and small mixed steps."""
        return shape.rows <= REPLAYED_ROWS or shape.rows == shape.spans * (1 + shape.width)
