"""A plan as tensors: one ragged layout for prefill, decode and verification.

Legend: S spans, T rows, R rows whose logits are wanted, K the longest draft.

    span 0: prefill chunk      span 1: decode     span 2: verify
    [ t t t t t t t t ]        [ tail ]           [ tail d d d d d ]
                    ^             ^                  ^   ^ ^ ^ ^ ^    wanted
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.attention.base import AttentionInputs, Group
from strobe.step import Span

_KEPT = 64


class Layout:
    """The geometry of a batch, known to the host; the same for every step of steady decoding.

    slots [S]; counts [S, 1], tokens appended for certain; sizes [S], rows per span; span_of_row,
    offset [T]: which span a row belongs to and its place there; table_row [T]: where its span's
    page table begins in the flattened tables; source [T]: its token's place in (host tokens |
    tails [S] | drafts [S * K]). scored: rows [A] whose next prompt token is scored, those tokens
    [A], and how many of the most probable to name; None where there are none.
    """

    def __init__(self, spans: Sequence[Span], width: int, columns: int, device: torch.device):
        """width: K. columns: of the page table."""
        self.device = device
        self.num_spans = len(spans)
        self.row_counts = [span.num_tokens + span.drafts for span in spans]
        num_host = sum(span.num_tokens for span in spans if span.tokens is not None)
        span_of_row: list[int] = []
        offset: list[int] = []
        source: list[int] = []
        host = 0
        for i, span in enumerate(spans):
            size = self.row_counts[i]
            span_of_row += [i] * size
            offset += range(size)
            if span.tokens is None:
                source.append(num_host + i)
            else:
                source += range(host, host + len(span.tokens))
                host += len(span.tokens)
            drafts = num_host + self.num_spans + i * width
            source += range(drafts, drafts + span.drafts)
        self.num_rows = len(offset)
        self.uniform = all(s.tokens is None and s.drafts == width for s in spans)
        self.slots = self.tensor([span.slot for span in spans])
        self.counts = self.tensor([span.num_tokens for span in spans])[:, None]
        self.sizes = self.tensor(self.row_counts)
        self.span_of_row, self.offset = self.tensor(span_of_row), self.tensor(offset)
        self.table_row = self.slots[self.span_of_row] * columns
        self.source = self.tensor(source)
        self.groups = self._groups()
        self.scored = self._scored(spans) if any(span.scored for span in spans) else None

    def _scored(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor, int]:
        rows: list[int] = []
        following: list[int] = []
        first, most = 0, 0
        for span, size in zip(spans, self.row_counts, strict=True):
            if span.scored:
                rows += range(first, first + span.scored)
                following += span.request.tokens[span.start + 1 : span.start + 1 + span.scored]
                most = max(most, span.request.sampling.prompt_logprobs or 0)
            first += size
        return self.tensor(rows), self.tensor(following), most

    def positions(self, start: Tensor) -> Tensor:
        """start [S, 1] -> the rows' positions [T]."""
        if self.uniform:
            return (start + self.offset.view(self.num_spans, -1)).view(-1)
        return start[:, 0].index_select(0, self.span_of_row).add_(self.offset)

    def tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
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
            rows: list[list[int]] = []
            flat: list[int] = []
            target: list[int] = []
            for g, i in enumerate(members):
                size, first = self.row_counts[i], firsts[i]
                rows.append([first + min(j, size - 1) for j in range(longest)])
                flat += range(g * longest, g * longest + size)
                target += range(first, first + size)
            groups.append(
                Group(
                    spans=self.tensor(members),
                    rows=self.tensor(rows),
                    flat=None if len(flat) == len(members) * longest else self.tensor(flat),
                    target=self.tensor(target),
                    members=tuple(members),
                )
            )
        return groups


class WantedRows:
    """Which rows of a layout give logits: each span's last `rows`.

    rows: how many of each span; index [R], None where every row is wanted; slots [R]; grid
    [S, K + 1]: each span's wanted rows among the R, R itself standing for "none"; None where they
    are a plain rectangle.
    """

    def __init__(self, layout: Layout, rows: Sequence[int], width: int):
        index: list[int] = []
        owner: list[int] = []
        grid: list[list[int]] = []
        total, first = sum(rows), 0
        for i, (size, count) in enumerate(zip(layout.row_counts, rows, strict=True)):
            seen = len(index)
            index += range(first + size - count, first + size)
            owner += [i] * count
            grid.append([*range(seen, seen + count), *[total] * (width + 1 - count)])
            first += size
        self.num_spans, self.rows = layout.num_spans, tuple(rows)
        self.device = layout.device
        self.index = None if total == layout.num_rows else layout.tensor(index)
        self.slots = layout.slots[layout.tensor(owner)]
        self.grid = None if total and min(rows) == width + 1 else layout.tensor(grid)

    def places(self, spans: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """For all wanted rows of some spans: which of the R they are, their span, and their place
        in it; [A] each."""
        firsts = [0, *itertools.accumulate(self.rows)]
        found = [(firsts[i] + rank, i, rank) for i in spans for rank in range(self.rows[i])]
        columns = torch.tensor(found, dtype=torch.int64, device=self.device).view(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def of(self, rows: Tensor) -> Tensor:
        """The wanted ones of T rows."""
        return rows if self.index is None else rows.index_select(0, self.index)

    def by_span(self, picks: Tensor) -> Tensor:
        """Tokens of the R wanted rows -> [S, K + 1], 0 where a span has no such row."""
        if self.grid is None:
            return picks.view(self.num_spans, -1)
        return torch.cat([picks, picks.new_zeros(1)])[self.grid]


class Places(NamedTuple):
    """Where a layout's rows stand now: start [S, 1], positions with K/V before the batch; tails
    [S, 1], the spans' newest tokens; positions, slots [T]."""

    start: Tensor
    tails: Tensor
    positions: Tensor
    slots: Tensor


class Kept:
    """A few values by key, the oldest dropped first: layouts repeat while requests decode."""

    def __init__(self) -> None:
        self._values: dict[Hashable, object] = {}

    def get(self, key: Hashable) -> object | None:
        return self._values.get(key)

    def put(self, key: Hashable, value: object) -> None:
        if len(self._values) >= _KEPT:
            self._values.pop(next(iter(self._values)))
        self._values[key] = value


class Batch(NamedTuple):
    """One forward's inputs: ids [T] at their places, and the rows that give logits."""

    layout: Layout
    places: Places
    wanted: WantedRows
    ids: Tensor
    attention: AttentionInputs
