"""The step's bookkeeping kernels against their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strobe.attention.base import Batch
from strobe.runner.batch import Layout, Shape, lay_out
from strobe.runner.state import DecodeState
from strobe.step import TAIL, Span

SLOTS, PAGE, REACH, LIMIT = 5, 4, 60, 40


def made(slot: int, drafts: int) -> Span:
    """A span whose drafts are made on the device."""
    return Span(slot, 0, 0, (TAIL,), drafts, "dflash" if drafts else None, 1 + drafts)


def known(slot: int, *tokens: int) -> Span:
    """One whose drafts the host knows."""
    return Span(slot, 0, 0, tokens, len(tokens) - 1, None, len(tokens))


def chunk(slot: int, count: int, logits: int) -> Span:
    return Span(slot, 0, 0, tuple(range(10, 10 + count)), num_logits=logits)


def state(device: torch.device, *, kernels: bool) -> DecodeState:
    made = DecodeState(SLOTS, REACH, PAGE, device, limit=LIMIT, spare_page=90, kernels=kernels)
    made.cursor[:SLOTS] = torch.tensor([[0, 9], [3, 8], [12, 7], [35, 6], [38, 5]])
    made.cursor[SLOTS, 1] = 4
    generator = torch.Generator().manual_seed(1)
    made.table[:SLOTS] += PAGE * torch.randint(
        1, 90, (SLOTS, made.table.shape[1]), generator=generator
    ).to(device)
    return made


BATCHES = {
    "verify": ([made(3, 6), made(0, 6), made(4, 6)], Shape(4, 28, 7, 6, 7)),
    "exactly full": ([made(1, 3), made(2, 3)], Shape(2, 8, 4, 3, 4)),
    "plain": ([made(1, 0), made(2, 0)], Shape(2, 2, 1, 0, 1)),
    "prompts alone": ([chunk(1, 9, 0), chunk(2, 3, 1)], Shape(4, 16, 16, 0, 1)),
    "known drafts": ([known(3, 6, 5, 4, 3, 2, 1), known(1, 8), made(0, 0)], Shape(4, 16, 7, 6, 7)),
    "mixed": (
        [chunk(2, 11, 1), made(0, 2), known(4, 5, 11, 12, 13), made(3, 6), made(1, 0)],
        Shape(6, 160, 160, 6, 7),
    ),
}


def laid_out(name: str, device: torch.device) -> tuple[Layout, Tensor | None]:
    """A layout, and the drafts of the device, of which spans that have none have some too."""
    spans, shape = BATCHES[name]
    drafts = (100 + torch.arange(shape.spans * 8, device=device)).view(shape.spans, 8)
    drafts = drafts[:, : shape.max_drafts] if shape.max_drafts else None
    return lay_out(spans, device, shape, True, SLOTS), drafts


def pair(name: str, device: torch.device) -> tuple[list[DecodeState], Layout, list[Batch]]:
    """Two states, by torch and by kernels, and the batch as each of them places it."""
    layout, drafts = laid_out(name, device)
    states = [state(device, kernels=kernels) for kernels in (False, True)]
    return states, layout, [one.make_batch(layout, one.place(layout, drafts)) for one in states]


@pytest.mark.parametrize("name", BATCHES)
def test_rows_are_placed_as_torch_places_them(name: str, device: torch.device):
    _, layout, (true, found) = pair(name, device)
    for field in ("ids", "positions", "kv_slots", "starts", "draft_lengths"):
        assert torch.equal(getattr(found, field), getattr(true, field)), field
        assert getattr(found, field).dtype == torch.int64
    assert found.slots is layout.slots
    cut = found.draft_lengths.tolist() != layout.drafts.tolist()
    assert cut == (name in ("verify", "known drafts", "mixed"))


@pytest.mark.parametrize("name", BATCHES)
def test_rows_after_a_row_with_nan_hold_token_0(name: str, device: torch.device):
    """Its token, and drafts of a drafter that gives NaN, are -1, which no embedding has."""
    layout, drafts = laid_out(name, device)
    drafts = None if drafts is None else torch.full_like(drafts, -1)
    for kernels in (False, True):
        placed = state(device, kernels=kernels)
        placed.cursor[:, 1] = -1
        ids = placed.place(layout, drafts)[0]
        assert torch.equal(ids, layout.tokens.clamp(min=0))


@pytest.mark.parametrize("name", BATCHES)
def test_rows_without_device_drafts_are_placed(name: str, device: torch.device):
    spans, shape = BATCHES[name]
    spans = [span for span in spans if span.method is None]
    if not spans:
        return
    layout = lay_out(spans, device, shape, True, SLOTS)
    states = [state(device, kernels=k) for k in (False, True)]
    true, found = [one.make_batch(layout, one.place(layout, None)) for one in states]
    assert torch.equal(found.ids, true.ids)
    assert torch.equal(found.draft_lengths, true.draft_lengths)


@pytest.mark.parametrize("simulated", [None, 1.0, 3.0, 4.5])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("right", range(8))
def test_drafts_are_accepted_and_the_cursor_moves_as_in_torch(
    right: int, name: str, simulated: float | None, device: torch.device
):
    """Where the target agrees with so many of each span's drafts, the later ones among them."""
    states, layout, batches = pair(name, device)
    shape = layout.shape
    tokens = (1000 + torch.arange(shape.spans * shape.max_logits, device=device)).view(
        shape.spans, -1
    )
    for span in range(shape.spans):
        first = int(layout.row_starts[span]) + int(layout.context_rows[span])
        drafts = batches[0].ids[first : first + shape.max_drafts]
        tokens[span, : len(drafts)] = drafts
        if right < shape.max_logits:
            tokens[span, right] = 999
    found = [
        one.accept(layout, batch, tokens, simulated)
        for one, batch in zip(states, batches, strict=True)
    ]
    assert found[1].tolist() == found[0].tolist()
    assert torch.equal(states[1].cursor[:-1], states[0].cursor[:-1])  # the last is padding's
    if simulated is None:
        kept = [min(right, n) for n in batches[0].draft_lengths.tolist()]
        assert found[1].tolist() == kept
    real = len(BATCHES[name][0])
    moved = batches[0].starts + layout.context_rows + found[1]
    assert torch.equal(states[1].cursor[layout.slots[:real], 0], moved[:real])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_gathered(dtype: torch.dtype, device: torch.device):
    from strobe.kernels.steps import gather_rows

    table = torch.randn(9, 2500, dtype=dtype, device=device)[:, 100:2200]
    index = torch.tensor([8, 0, 3, 3, 5], device=device)
    assert torch.equal(gather_rows(table, index), table[index])
