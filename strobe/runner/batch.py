"""A plan as tensors: one ragged layout for prefill, decode and verification.

Legend: S spans, T rows, R rows whose logits are wanted, K the longest draft.

    span 0: prefill chunk      span 1: decode     span 2: verify
    [ t t t t t t t t ]        [ tail ]           [ tail d d d d d ]
                    ^             ^                  ^   ^ ^ ^ ^ ^    wanted
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.attention.base import AttentionInputs, Group
from strobe.step import Span


class Layout:
    """The geometry of a batch, known to the host; the same for every step of steady decoding.

    slots [S]; counts [S], tokens appended for certain; sizes [S], rows per span; span_of_row,
    offset [T]: which span a row belongs to and its place there; source [T]: its token's place in
    (host tokens | tails [S] | drafts [S * K]); wanted [R]: rows with logits; grid [S, K + 1]: each
    span's wanted rows among the R, R itself standing for "none".
    """

    def __init__(self, spans: Sequence[Span], width: int, columns: int, device: torch.device):
        """width: K. columns: of the page table, reserved one included."""
        self.device = device
        num_spans = len(spans)
        counts = [span.num_tokens for span in spans]
        self.row_counts = [span.num_tokens + span.drafts for span in spans]
        num_host = sum(span.num_tokens for span in spans if span.tokens is not None)
        span_of_row: list[int] = []
        offset: list[int] = []
        source: list[int] = []
        wanted: list[int] = []
        wanted_span: list[int] = []
        grid: list[list[int]] = []
        host = 0
        for i, span in enumerate(spans):
            first, size = len(offset), self.row_counts[i]
            span_of_row += [i] * size
            offset += range(size)
            if span.tokens is None:
                source.append(num_host + i)
            else:
                source += range(host, host + len(span.tokens))
                host += len(span.tokens)
            drafts = num_host + num_spans + i * width
            source += range(drafts, drafts + span.drafts)
            seen = len(wanted)
            wanted += range(first + size - span.rows, first + size)
            wanted_span += [i] * span.rows
            grid.append(list(range(seen, seen + span.rows)) + [-1] * (width + 1 - span.rows))
        self.num_rows, self.num_wanted = len(offset), len(wanted)
        grid = [[self.num_wanted if j < 0 else j for j in row] for row in grid]
        self.slots = self._tensor([span.slot for span in spans])
        self.counts, self.sizes = self._tensor(counts), self._tensor(self.row_counts)
        self.span_of_row, self.offset = self._tensor(span_of_row), self._tensor(offset)
        self.table_row = self.span_of_row * columns
        self.source, self.wanted = self._tensor(source), self._tensor(wanted)
        self.wanted_slots = self.slots[self._tensor(wanted_span)]
        regular = all(span.rows == width + 1 for span in spans)
        self.grid = None if regular else self._tensor(grid)
        self.all_wanted = self.num_wanted == self.num_rows
        self.plain_source = source == list(range(num_host + num_spans * (1 + width)))
        self.groups = self._groups()

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _groups(self) -> list[Group]:
        """Spans of like length together, so that short ones are not padded to a prefill chunk."""
        buckets: dict[int, list[int]] = {}
        for i, size in enumerate(self.row_counts):
            buckets.setdefault(max(size - 1, 15).bit_length(), []).append(i)
        firsts = [0]
        for size in self.row_counts:
            firsts.append(firsts[-1] + size)
        groups: list[Group] = []
        for members in buckets.values():
            longest = max(self.row_counts[i] for i in members)
            rows, flat, target = [], [], []
            for g, i in enumerate(members):
                size, first = self.row_counts[i], firsts[i]
                rows.append([first + min(j, size - 1) for j in range(longest)])
                flat += range(g * longest, g * longest + size)
                target += range(first, first + size)
            groups.append(
                Group(
                    spans=self._tensor(members),
                    rows=self._tensor(rows),
                    flat=None if len(flat) == len(members) * longest else self._tensor(flat),
                    target=self._tensor(target),
                    members=tuple(members),
                )
            )
        return groups

    def pick_grid(self, picks: Tensor) -> Tensor:
        """Tokens of the R wanted rows -> [S, K + 1], 0 where a span has no such row."""
        if self.grid is None:
            return picks.view(len(self.row_counts), -1)
        return torch.cat([picks, picks.new_zeros(1)])[self.grid]


@dataclass(frozen=True)
class Batch:
    """One forward's inputs: ids, positions, slots [T]; start [S], positions with K/V before it."""

    layout: Layout
    ids: Tensor
    positions: Tensor
    start: Tensor
    attention: AttentionInputs
