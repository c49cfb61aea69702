"""The kernels of a step's bookkeeping against their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.config import Limits
from strobe.runner.decode_state import DecodeState
from strobe.runner.layout import Layout, Shape, exact_shape, lay_out
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.runner.step_ops.triton_step_ops import TritonStepOps
from strobe.step import TAIL, Span
from tests.support.full_marks import full_where

SLOTS, PAGE, REACH, LIMIT = 5, 4, 60, 40
FORMS = (StepOps(), TritonStepOps())


def device_span(slot: int, drafts: int) -> Span:
    """Return a span whose drafts come from the device."""
    return Span(slot, 0, 0, (TAIL,), drafts, "dflash" if drafts else None, 1 + drafts)


def host_span(slot: int, *tokens: int) -> Span:
    """Return a span whose drafts come from the host."""
    return Span(slot, 0, 0, tokens, len(tokens) - 1, None, len(tokens))


def chunk(slot: int, count: int, logits: int) -> Span:
    return Span(slot, 0, 0, tuple(range(10, 10 + count)), num_logits=logits)


def make_state(device: torch.device, ops: StepOps, *, groups: int = 1) -> DecodeState:
    limits = Limits(LIMIT, SLOTS, 64, REACH - LIMIT - 2, PAGE)
    state = DecodeState(limits, device, ops, spare_pages=[90, 70][:groups])
    state.cursor[:SLOTS] = torch.tensor([[0, 9], [3, 8], [12, 7], [35, 6], [38, 5]])
    state.cursor[SLOTS, 1] = 4
    generator = torch.Generator().manual_seed(1)
    columns = state.tables.shape[2]
    for table in state.tables:
        pages = torch.randint(1, 90, (SLOTS, columns), generator=generator)
        table[:SLOTS] += PAGE * pages.to(device)
    return state


BATCHES = {
    "verify": ([device_span(3, 6), device_span(0, 6), device_span(4, 6)], Shape(4, 28, 7, 6, 7)),
    "exactly full": ([device_span(1, 3), device_span(2, 3)], Shape(2, 8, 4, 3, 4)),
    "plain": ([device_span(1, 0), device_span(2, 0)], Shape(2, 2, 1, 0, 1)),
    "prompts alone": ([chunk(1, 9, 0), chunk(2, 3, 1)], Shape(4, 16, 16, 0, 1)),
    "host drafts": (
        [host_span(3, 6, 5, 4, 3, 2, 1), host_span(1, 8), device_span(0, 0)],
        Shape(4, 16, 7, 6, 7),
    ),
    "mixed": (
        [
            *(chunk(2, 11, 1), device_span(0, 2), host_span(4, 5, 11, 12, 13)),
            *(device_span(3, 6), device_span(1, 0)),
        ],
        Shape(6, 160, 160, 6, 7),
    ),
}


def make_layout(name: str, device: torch.device) -> tuple[Layout, Tensor | None]:
    """Return a layout and the device's drafts, which have a row for every span."""
    spans, shape = BATCHES[name]
    drafts = (100 + torch.arange(shape.spans * 8, device=device)).view(shape.spans, 8)
    drafts = drafts[:, : shape.max_drafts] if shape.max_drafts else None
    return lay_out(spans, device, shape, padded=True, spare_slot=SLOTS), drafts


def pair(
    name: str, device: torch.device, *, groups: int = 1
) -> tuple[list[DecodeState], Layout, list[Batch]]:
    """Return states by torch and by kernels, a layout, and each state's batch."""
    layout, drafts = make_layout(name, device)
    states = [make_state(device, ops, groups=groups) for ops in FORMS]
    return (
        states,
        layout,
        [state.make_batch(layout, state.place(layout, drafts)) for state in states],
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_batch_matches_torch(name: str, groups: int, device: torch.device):
    _, layout, (expected, actual) = pair(name, device, groups=groups)
    for field in ("ids", "positions", "starts", "draft_lengths"):
        assert torch.equal(getattr(actual, field), getattr(expected, field)), field
        assert getattr(actual, field).dtype == torch.int64
    assert len(actual.kv_slots) == len(expected.kv_slots) == groups
    for ours, theirs in zip(actual.kv_slots, expected.kv_slots, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == torch.int64
    assert actual.slots is layout.slots
    truncated = actual.draft_lengths.tolist() != layout.drafts.tolist()
    assert truncated == (name in ("verify", "host drafts", "mixed"))


@pytest.mark.parametrize("name", BATCHES)
def test_rows_after_a_nan_row_have_token_0(name: str, device: torch.device):
    """Tokens and drafts of NaN logits are -1, which has no embedding."""
    layout, drafts = make_layout(name, device)
    drafts = None if drafts is None else torch.full_like(drafts, -1)
    for ops in FORMS:
        state = make_state(device, ops)
        state.cursor[:, 1] = -1
        ids = state.place(layout, drafts)[0]
        assert torch.equal(ids, layout.tokens.clamp(min=0))


@pytest.mark.parametrize("name", BATCHES)
def test_batch_without_device_drafts_matches_torch(name: str, device: torch.device):
    spans, shape = BATCHES[name]
    spans = [span for span in spans if span.method is None]
    if not spans:
        return
    layout = lay_out(spans, device, shape, padded=True, spare_slot=SLOTS)
    states = [make_state(device, ops) for ops in FORMS]
    expected, actual = [state.make_batch(layout, state.place(layout, None)) for state in states]
    assert torch.equal(actual.ids, expected.ids)
    assert torch.equal(actual.draft_lengths, expected.draft_lengths)


@full_where(lambda simulated, num_correct: simulated is not None and num_correct not in (0, 3, 7))
@pytest.mark.parametrize("simulated", [None, 1.0, 3.0, 4.5])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("num_correct", range(8))
def test_accept_moves_cursors_as_torch_does(
    num_correct: int, name: str, simulated: float | None, device: torch.device
):
    """The target rejects the draft after `num_correct`, and agrees with all others."""
    states, layout, batches = pair(name, device)
    shape = layout.shape
    tokens = (1000 + torch.arange(shape.spans * shape.max_logits, device=device)).view(
        shape.spans, -1
    )
    for span in range(shape.spans):
        first = int(layout.row_starts[span]) + int(layout.context_rows[span])
        drafts = batches[0].ids[first : first + shape.max_drafts]
        tokens[span, : len(drafts)] = drafts
        if num_correct < shape.max_logits:
            tokens[span, num_correct] = 999
    expected, accepted = (
        state.accept(layout, batch, tokens, simulated)
        for state, batch in zip(states, batches, strict=True)
    )
    assert accepted.tolist() == expected.tolist()
    assert torch.equal(states[1].cursor[:-1], states[0].cursor[:-1])  # the last is for padding
    if simulated is None:
        assert accepted.tolist() == [min(num_correct, n) for n in batches[0].draft_lengths.tolist()]
    num_spans = len(BATCHES[name][0])
    lengths = batches[0].starts + layout.context_rows + accepted
    assert torch.equal(states[1].cursor[layout.slots[:num_spans], 0], lengths[:num_spans])


def test_triton_form_leaves_exact_layouts_to_torch(device: torch.device):
    """Each of their many shapes would compile a kernel of its own."""
    spans = [device_span(3, 6), host_span(1, 8), device_span(0, 0)]
    layout = lay_out(spans, device, exact_shape(spans), padded=False, spare_slot=SLOTS)
    drafts = (100 + torch.arange(18, device=device)).view(3, 6)
    expected, actual = [make_state(device, ops) for ops in FORMS]
    placed = actual.place(layout, drafts)
    for by_torch, by_triton in zip(expected.place(layout, drafts), placed, strict=True):
        assert torch.equal(by_triton, by_torch)
    batch = actual.make_batch(layout, placed)
    tokens = torch.tensor([[100, 101, 9, 9, 9, 9, 9]] * 3, device=device)
    accepted = [state.accept(layout, batch, tokens, None).tolist() for state in (expected, actual)]
    assert accepted == [[2, 0, 0]] * 2
    assert torch.equal(actual.cursor, expected.cursor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather_rows(dtype: torch.dtype, device: torch.device):
    from strobe.kernels.step_bookkeeping import gather_rows

    table = torch.randn(9, 2500, dtype=dtype, device=device)[:, 100:2200]
    index = torch.tensor([8, 0, 3, 3, 5], device=device)
    assert torch.equal(gather_rows(table, index), table[index])
