"""An engine that accepts drafts as recorded in traces, whatever its models compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.engine.build import ResolvedConfig
from strobe.engine.engine import Engine
from strobe.host.transfer import upload
from strobe.models.model_config import DraftConfig
from strobe.runner.layout import Layout
from strobe.speculation.dflash import block_sizes
from strobe.speculation.proposer import Drafts, PlacedRows
from strobe.step import Plan, Span
from strobe.tools.bench.draft_traces import Traces


def widths_of(draft: DraftConfig) -> tuple[int, ...]:
    """Return the numbers of drafts of the drafter's block sizes."""
    unused = draft.block_size - draft.block_drafts
    return tuple([rows - unused for rows in block_sizes(draft)])


class ReplayEngine(Engine):
    """Replays traces. A request's seed is the place in the traces where its answer begins; the
    first place follows the last.

    drafter: the real drafter, whose `margins` flag callers may switch. first [slots + 1]: the place
    that corresponds to position 0 of each slot's request.
    """

    def __init__(self, setup: ResolvedConfig, *, traces: Traces, **options: Any):
        """options: of `Engine`. Raises ValueError if the traces' block sizes differ from the
        drafter's."""
        assert setup.draft is not None
        widths = widths_of(setup.draft)
        if traces.widths != widths:
            raise ValueError(
                f"The traces are of blocks of {_words(traces.widths)} drafts, but this drafter's "
                f"have {_words(widths)}; record traces with a drafter of its block size."
            )
        super().__init__(setup, simulated_acceptance=self._num_accepted, **options)
        (method, self.drafter), *_ = self.proposers.on_device.items()
        device = self.state.device
        self.places = len(traces.right)
        self.widths = traces.widths
        self.right = torch.from_numpy(traces.right).long().flatten().to(device)
        self.margins = [torch.from_numpy(rows).float().to(device) for rows in traces.margins]
        self.first = torch.zeros(self.limits.max_num_seqs + 1, dtype=torch.int64, device=device)
        self._width = torch.zeros(1, dtype=torch.int64, device=device)
        self.proposers.on_device[method] = _ReplayingProposer(self)

    def _admit(self, plan: Plan) -> None:
        super()._admit(plan)
        if plan.admitted:
            slots = upload([admission.slot for admission in plan.admitted], self.state.device)
            first = [admission.seed - admission.num_prompt for admission in plan.admitted]
            self.first.index_copy_(0, slots, upload(first, self.state.device))

    def _place_of(self, slots: Tensor, lengths: Tensor) -> Tensor:
        """Return the place in the traces of each span, by its number of positions, [S]."""
        return (self.first[slots] + lengths) % self.places

    def _num_accepted(self, layout: Layout, batch: Batch) -> Tensor:
        place = self._place_of(batch.slots, batch.starts)
        return self.right[place * len(self.widths) + self._width]

    def margins_of(self, spans: Sequence[Span], rows: int, drafts: int) -> Tensor:
        """Return the recorded margins of the spans' next blocks, [rows, drafts]."""
        width = next(i for i, n in enumerate(self.widths) if n >= drafts)
        self._width.fill_(width)
        slots = upload([span.slot for span in spans], self.state.device)
        recorded = self.margins[width][self._place_of(slots, self.state.cursor[slots, 0])]
        margins = torch.zeros(rows, drafts, device=self.state.device)
        margins[: len(spans)] = recorded[:, :drafts]
        return margins


class _ReplayingProposer:
    """Runs the pair's drafter for its cost, ignores its tokens, and returns the traces' margins."""

    def __init__(self, engine: ReplayEngine):
        self.engine = engine
        self.capture = engine.drafter.capture
        self.margins = engine.drafter.margins
        self.widths_for = engine.drafter.widths_for

    def propose(self, spans: Sequence[Span]) -> Drafts:
        drafts = self.engine.drafter.propose(spans)
        assert drafts.tokens is not None
        margins = self.engine.margins_of(spans, *drafts.tokens.shape)
        return drafts if drafts.margins is None else drafts._replace(margins=margins)

    def observe(self, batch: PlacedRows, hidden: Tensor | None) -> None:
        self.engine.drafter.observe(batch, hidden)


def _words(widths: Sequence[int]) -> str:
    *first, last = map(str, widths)
    return f"{', '.join(first)} and {last}" if first else last
