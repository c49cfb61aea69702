"""A plan as tensors: one ragged layout for prefill, decode and verification.

Legend: S spans, T rows, R rows whose logits are wanted, K the longest draft.

    span 0: prefill chunk      span 1: decode     span 2: verify
    [ t t t t t t t t ]        [ tail ]           [ tail d d d d d ]
                    ^             ^                  ^   ^ ^ ^ ^ ^    wanted

Where steps are captured in graphs, layouts are padded to a few shapes: spans of no rows, rows of no
span and wanted rows that nobody wants fill them up, all of the spare slot, which leads to page 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.attention.base import AttentionInputs, Group
from strobe.runner.upload import upload
from strobe.step import Proposal, Span

_KEPT = 64
TAIL = -1
"""What stands for a span's tail token among a layout's tokens; its draft j is TAIL - 1 - j."""


DRAFTS = 2
"""From where on the drafts stand among the tensors of a batch's inputs."""


class Shape(NamedTuple):
    """What a layout is padded to: spans S, rows T, and K, the longest draft."""

    spans: int
    rows: int
    width: int


class Layout:
    """The geometry of a batch, known to the host; the same for every step of steady decoding.

    slots [S]; counts [S, 1], tokens appended for certain; drafts [S]; sizes, row_starts [S], rows
    per span and the first one of each; span_of_row, offset [T]: which span a row belongs to and its
    place there; table_row [T]: where its span's page table begins in the flattened tables; tokens
    [T]: a token of the host's, or what stands for the tail or a draft. longest: rows of the longest
    span, or more. scored: rows [A] whose next prompt token is scored, those tokens [A], and how
    many of the most probable to name; None where there are none. packed: all of it in one tensor.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        width: int,
        columns: int,
        device: torch.device,
        *,
        shape: Shape | None = None,
        spare: int = 0,
    ):
        """width: K. columns: of the page table. shape: what to pad to; spare: the slot of padding
        spans."""
        self.device, self.columns = device, columns
        self.row_counts = [span.num_tokens + span.drafts for span in spans]
        self.shape = shape or Shape(len(spans), sum(self.row_counts), width)
        self.padded = shape is not None
        self.num_spans, self.num_rows, self.width = self.shape
        self.uniform = not self.padded and all(
            s.tokens is None and s.drafts == width for s in spans
        )
        longest = max(self.row_counts)
        if self.padded:  # one of few, since it is part of a recorded shape
            longest = self.shape.width + 1 if longest <= self.shape.width + 1 else self.num_rows
        self.longest = longest
        self._split(upload(self._pack(spans, spare), device))
        self._grouped: list[Group] | None = None
        self.scored = self._scored(spans) if any(span.scored for span in spans) else None

    def _pack(self, spans: Sequence[Span], spare: int) -> np.ndarray:
        """Everything the device must know, [5 * S + 3 * T]."""
        fill = self.num_spans - len(spans)
        firsts = [0, *itertools.accumulate(self.row_counts)]
        per_span = [
            [span.slot for span in spans] + [spare] * fill,
            [span.num_tokens for span in spans] + [0] * fill,
            [span.drafts for span in spans] + [0] * fill,
            self.row_counts + [0] * fill,
            firsts[:-1] + [firsts[-1]] * fill,
        ]
        rest = self.num_rows - firsts[-1]
        owner = np.repeat(np.arange(len(spans)), self.row_counts)
        offset = np.arange(firsts[-1]) - np.repeat(firsts[:-1], self.row_counts)
        tokens = TAIL - offset
        for span, first in zip(spans, firsts, strict=False):
            if span.tokens is not None:
                tokens[first : first + len(span.tokens)] = span.tokens
                drafts = slice(first + len(span.tokens), first + len(span.tokens) + span.drafts)
                tokens[drafts] = TAIL - 1 - np.arange(span.drafts)
        assert not rest or fill, "rows of no span need a padding span"
        owner = np.append(owner, np.full(rest, len(spans)))
        offset, tokens = np.append(offset, np.zeros(rest)), np.append(tokens, np.zeros(rest))
        return np.concatenate([np.asarray(per_span).ravel(), owner, offset, tokens]).astype(
            np.int64
        )

    def _split(self, packed: Tensor) -> None:
        """Name the parts of a packed layout."""
        self.packed, size = packed, self.num_spans
        self._table_row: Tensor | None = None
        per_span = packed[: 5 * size].view(5, size)
        self.slots, counts, self.drafts, self.sizes, self.row_starts = per_span.unbind()
        self.counts = counts[:, None]
        self.span_of_row, self.offset, self.tokens = packed[5 * size :].view(3, -1).unbind()

    @property
    def table_row(self) -> Tensor:
        """Where each row's page table begins in the flattened tables, [T]."""
        if self._table_row is None:
            self._table_row = self.slots.index_select(0, self.span_of_row) * self.columns
        return self._table_row

    def over(self, packed: Tensor) -> Layout:
        """The same layout whose tensors are read from elsewhere, where others like it will be."""
        other = object.__new__(Layout)
        other.__dict__.update(self.__dict__)
        other._split(packed)
        return other

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
        return upload(rows, self.device), upload(following, self.device), most

    def positions(self, start: Tensor) -> Tensor:
        """start [S, 1] -> the rows' positions [T]."""
        if self.uniform:
            return (start + self.offset.view(self.num_spans, -1)).view(-1)
        return start[:, 0].index_select(0, self.span_of_row).add_(self.offset)

    def ids(self, tails: Tensor, drafts: Tensor) -> Tensor:
        """The rows' token ids [T], given the tails [S, 1] and the drafts [S, K]."""
        made = torch.cat([tails, drafts], 1)
        if self.uniform:
            return made.view(-1)
        place = (TAIL - self.tokens).clamp_min_(0) + self.span_of_row * made.shape[1]
        return torch.where(self.tokens >= 0, self.tokens, made.view(-1).index_select(0, place))

    @property
    def groups(self) -> list[Group]:
        """Spans of like length together, so that short ones are not padded to a prefill chunk."""
        if self._grouped is None:
            self._grouped = self._groups()
        return self._grouped

    def _groups(self) -> list[Group]:
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
                    spans=upload(members, self.device),
                    rows=upload(rows, self.device),
                    flat=None if len(flat) == len(members) * longest else upload(flat, self.device),
                    target=upload(target, self.device),
                    members=tuple(members),
                )
            )
        return groups


class WantedRows:
    """Which rows of a layout give logits: each span's last `rows`.

    rows: how many of each span; index [R], None where every row is wanted; grid [S, W]: each span's
    wanted rows among the R, R itself standing for "none"; None where they are a plain rectangle, as
    they always are in a padded layout, where a span's last row fills up.
    """

    def __init__(self, layout: Layout, rows: Sequence[int], width: int):
        """width: W, the most wanted rows of a span."""
        self.num_spans, self.rows, self.device = layout.num_spans, tuple(rows), layout.device
        starts = [0, *itertools.accumulate(layout.row_counts)]
        if layout.padded:
            self._firsts = [i * width for i in range(len(rows))]
            index = [
                [max(end - max(count - j, 1), 0) for j in range(width)]
                for count, end in zip(rows, starts[1:], strict=True)
            ]
            index += [[layout.num_rows - 1] * width] * (self.num_spans - len(rows))
            self.index: Tensor | None = upload(index, self.device).view(-1)
            self.grid: Tensor | None = None
            self._slots: Tensor | None = None
            self._layout = layout
            return
        total = sum(rows)
        self._firsts = [0, *itertools.accumulate(rows)]
        owner = [i for i, count in enumerate(rows) for _ in range(count)]
        self.index = self.grid = None
        if total != layout.num_rows:
            ends = zip(rows, starts[1:], strict=True)
            self.index = upload([r for n, end in ends for r in range(end - n, end)], self.device)
        self._slots = layout.slots[upload(owner, self.device)]
        if not total or min(rows) != width:
            grid = [
                [*range(first, first + n), *[total] * (width - n)]
                for n, first in zip(rows, self._firsts, strict=False)
            ]
            self.grid = upload(grid, self.device)

    def over(self, layout: Layout, index: Tensor) -> WantedRows:
        """The same rows of a padded layout, read from elsewhere."""
        other = object.__new__(WantedRows)
        other.__dict__.update(self.__dict__)
        other.index, other._layout, other._slots = index, layout, None
        return other

    @property
    def slots(self) -> Tensor:
        """The slots of the wanted rows' spans, [R]."""
        if self._slots is None:
            assert self.index is not None
            size = self.index.shape[0]
            spans = self._layout.slots
            self._slots = spans.repeat_interleave(size // self.num_spans, output_size=size)
        return self._slots

    def places(self, spans: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """For all wanted rows of some spans: which of the R they are, their span, and their place
        in it; [A] each."""
        found = [(self._firsts[i] + rank, i, rank) for i in spans for rank in range(self.rows[i])]
        columns = upload(found, self.device).view(-1, 3)
        return columns[:, 0], columns[:, 1], columns[:, 2]

    def of(self, rows: Tensor, *, kernels: bool = False) -> Tensor:
        """The wanted ones of T rows; kernels: by triton's gather, for rows of some width."""
        if kernels and self.index is not None:
            from strobe.kernels.steps import gather_rows

            return gather_rows(rows, self.index)
        return rows if self.index is None else rows.index_select(0, self.index)

    def by_span(self, picks: Tensor) -> Tensor:
        """Tokens of the R wanted rows -> [S, W], 0 where a span has no such row."""
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


class Inputs(NamedTuple):
    """What a forward is made of: which rows there are, which give logits, and the drafts, if they
    come from elsewhere. bounds: see AttentionInputs."""

    layout: Layout
    wanted: WantedRows
    proposal: Proposal | None
    bounds: Sequence[int]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What varies between padded inputs of one shape: their geometry, then the drafts and what
        they were drawn by."""
        assert self.layout.padded
        assert self.wanted.index is not None
        drafts = self.proposal and (self.proposal.tokens, self.proposal.probs)
        geometry = self.layout.packed, self.wanted.index
        return (*geometry, *[tensor for tensor in drafts or () if tensor is not None])

    def over(self, tensors: Sequence[Tensor]) -> Inputs:
        """The same inputs whose tensors are read from elsewhere."""
        packed, index, *drafts = tensors
        layout = self.layout.over(packed)
        wanted = self.wanted.over(layout, index)
        own = dict(zip(("tokens", "probs"), drafts, strict=False))
        proposal = self.proposal and self.proposal._replace(**own)
        return Inputs(layout, wanted, proposal, self.bounds)


class Batch(NamedTuple):
    """One forward's inputs: ids [T] at their places, and the rows that give logits."""

    layout: Layout
    places: Places
    wanted: WantedRows
    ids: Tensor
    attention: AttentionInputs
    proposal: Proposal
