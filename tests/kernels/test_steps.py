"""The step's bookkeeping kernels against their torch twins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strobe.runner.batch import Batch, Layout, Shape
from strobe.runner.state import DecodeState
from strobe.spec.verify import match_prefix, simulate
from strobe.step import Proposal, Span, Verdict

SLOTS, PAGE, REACH, LIMIT = 5, 4, 60, 40


def span(slot: int, tokens: tuple[int, ...] | None, drafts: int) -> Span:
    return Span(None, slot, 0, 0, tokens, drafts, 1 + drafts)  # type: ignore[arg-type]


def state(device: torch.device) -> DecodeState:
    made = DecodeState(SLOTS, REACH, PAGE, device)
    made.cursor[:SLOTS] = torch.tensor([[0, 9], [3, 8], [12, 7], [35, 6], [38, 5]])
    generator = torch.Generator().manual_seed(1)
    made.table[:SLOTS] += PAGE * torch.randint(
        1, 90, (SLOTS, made.table.shape[1]), generator=generator
    ).to(device)
    return made


BATCHES = {
    "verify": ([span(3, None, 6), span(0, None, 6), span(4, None, 6)], 6, Shape(4, 28, 6)),
    "exactly full": ([span(1, None, 3), span(2, None, 3)], 3, Shape(2, 8, 3)),
    "plain": ([span(1, None, 0), span(2, None, 0)], 0, Shape(2, 2, 0)),
    "mixed": (
        [span(2, tuple(range(10, 21)), 0), span(0, None, 2), span(4, None, 6), span(1, None, 0)],
        6,
        Shape(6, 160, 6),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows_are_placed_as_the_state_places_them(name: str, device: torch.device):
    from strobe.kernels.steps import place

    spans, width, shape = BATCHES[name]
    made = state(device)
    layout = Layout(spans, width, made.table.shape[1], device, shape=shape, spare=made.spare)
    drafts = (100 + torch.arange(shape.spans * 8, device=device)).view(shape.spans, 8)[:, :width]
    true = made.locate(layout)
    rows = layout.span_of_row, layout.offset, layout.tokens
    start, lengths, positions, slots, ids = place(
        made.cursor,
        made.table,
        layout.slots,
        rows,
        drafts,
        layout.drafts,
        LIMIT,
        PAGE,
    )
    assert torch.equal(start, true.start[:, 0])
    assert torch.equal(positions, true.positions)
    assert torch.equal(slots, true.slots)
    assert torch.equal(ids, layout.ids(true.tails, drafts))
    if width:
        room = (LIMIT - 1 - start).clamp_min(0)
        assert torch.equal(lengths, torch.minimum(layout.drafts, room))
        assert lengths.tolist() != layout.drafts.tolist() or name == "exactly full"


@pytest.mark.parametrize("simulated", [None, 1.0, 3.0, 4.5])
@pytest.mark.parametrize("width", [0, 1, 5, 7])
def test_drafts_are_accepted_and_the_cursor_moves_as_in_torch(
    width: int, simulated: float | None, device: torch.device
):
    from strobe.kernels.steps import accept

    made, own = state(device), state(device)
    slots = torch.tensor([2, 0, 4, 1], device=device)
    counts = torch.tensor([1, 1, 1, 7], device=device)
    start = made.cursor[slots, 0].clone()
    picks = torch.arange(4 * (width + 1), device=device).view(4, -1)
    drafts = picks[:, :-1].clone()
    if width > 1:
        drafts[1, width // 2] = -1
        drafts[3, 0] = -1
    lengths = torch.tensor([width, width, max(width - 2, 0), width], device=device)
    proposal = Proposal(drafts, lengths)
    verdict = match_prefix(picks, proposal)
    if simulated is not None and width:
        verdict = Verdict(picks, simulate(simulated, start, lengths))
    batch: Any = SimpleNamespace(
        places=SimpleNamespace(start=start[:, None]),
        layout=SimpleNamespace(counts=counts[:, None], slots=slots),
    )
    made.advance(cast_batch(batch), verdict)
    accepted = accept(picks, drafts, lengths, start, counts, slots, own.cursor, simulated)
    assert accepted.tolist() == verdict.accepted.tolist()
    assert torch.equal(own.cursor, made.cursor)


def cast_batch(batch: Any) -> Batch:
    return batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_gathered(dtype: torch.dtype, device: torch.device):
    from strobe.kernels.steps import gather_rows

    table = torch.randn(9, 2500, dtype=dtype, device=device)[:, 100:2200]
    index = torch.tensor([8, 0, 3, 3, 5], device=device)
    assert torch.equal(gather_rows(table, index), table[index])
