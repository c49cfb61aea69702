"""The kernels of recurrent layers against plain torch, step after step over the same store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from strobe.attention.base import Batch
from strobe.attention.recurrent import KernelPlan, RecurrentPlan
from strobe.kv.states import StateSpec, StateStore

SPECS = {
    "odd sizes": StateSpec(1, 3, 1, 6, 5, 4),
    "more than a program's values": StateSpec(1, 2, 2, 8, 40, 3),
}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # the interpreter cuts bfloat16 off
PENDING, SLOTS = 4, 4
STEPS = [
    [(0, 0, 7), (2, 0, 1), (SLOTS, 0, 0)],
    [(2, 1, 4), (0, 7, 4), (1, 0, 2)],
    [(0, 9, 4), (2, 5, 1), (1, 2, 9)],
    [(1, 11, 4), (2, 6, 4), (0, 0, 3), (SLOTS, 0, 0), (SLOTS, 0, 0)],
    [(0, 3, 1), (1, 12, 4), (2, 7, 5)],
]
"""Spans of (slot, start, rows), drafts of former steps accepted in part; slot 0 begins anew."""


def batch_of(spans: list[tuple[int, int, int]], fill: int, device: torch.device) -> Batch:
    """fill: rows behind all that belong to no span."""
    slots, starts, sizes = torch.tensor(spans, device=device).T.contiguous().unbind()
    nothing: Any = None
    total = int(sizes.sum()) + fill
    return Batch(
        ids=nothing,
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        kv_slots=nothing,
        slots=slots,
        starts=starts,
        sizes=sizes,
        row_starts=sizes.cumsum(0) - sizes,
        longest=max(int(sizes.max()), PENDING),
        draft_lengths=nothing,
        tables=nothing,
        page_size=1,
    )


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_steps_answer_and_keep_what_plain_torch_does(
    spec: StateSpec, dtype: torch.dtype, device: torch.device
):
    nothing: Any = None
    noise = torch.Generator().manual_seed(8)
    pair = [StateStore(spec, SLOTS, PENDING, dtype, device) for _ in range(2)]
    for held in pair:
        for part in (held.state, held.window, held.gates):
            part.fill_(float("nan"))  # of whoever had the slots before
    weight = torch.randn(spec.channels, spec.kernel, generator=noise).to(device, dtype)
    for spans in STEPS:
        asked = batch_of(spans, 3, device)
        rows = len(asked.positions)
        x = torch.randn(rows, spec.channels, generator=noise).to(device, dtype)
        x[-3:] = float("nan")
        decay = -torch.rand(rows, spec.heads, generator=noise).to(device)
        rate = torch.rand(rows, spec.heads, generator=noise).to(device)
        kinds = (RecurrentPlan, KernelPlan)
        plans = [kind(nothing, asked, held) for kind, held in zip(kinds, pair, strict=True)]
        wanted, found = (plan.mix(0, x, decay, rate, weight) for plan in plans)
        close = {"atol": BOUND[dtype], "rtol": BOUND[dtype]}
        torch.testing.assert_close(found[:-3], wanted[:-3], **close)
        assert not found[-3:].isnan().any()
        for slot, start, size in spans:
            if slot == SLOTS:
                continue
            before = spec.kernel - 1 + (size if size <= PENDING else 0)
            ours, theirs = (held.window[0, slot, :before] for held in pair)
            assert torch.equal(ours, theirs)
            ours, theirs = (held.state[0, slot] for held in pair)
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
            if size <= PENDING:
                assert torch.equal(pair[0].gates[0, slot, :size], pair[1].gates[0, slot, :size])
            ends = start if size <= PENDING else start + size
            assert pair[0].length[slot] == pair[1].length[slot] == ends
