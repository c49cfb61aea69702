"""The kernels of recurrent layers against plain torch, step after step over the same store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from strobe.attention.backend import Batch
from strobe.attention.recurrent_backend import RecurrentPlan, cover
from strobe.kernels import recurrent, reference_recurrent, step_bookkeeping
from strobe.kv.states import StateSpec, StateStore
from tests.support.full_marks import full_where

SPECS = {
    "odd sizes": StateSpec(1, 3, 1, 6, 5, 4),
    "more than a program's values": StateSpec(1, 2, 2, 8, 40, 3),
}
BOUND = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # the interpreter truncates to bfloat16
TF32 = 5e-3
"""On a GPU, products with 10-bit factors make up the states of bfloat16 models."""
PENDING, SLOTS = 4, 4
STEPS = [
    [(0, 0, 7), (2, 0, 1), (SLOTS, 0, 0)],
    [(2, 1, 4), (0, 7, 4), (1, 0, 2)],
    [(0, 9, 4), (2, 5, 1), (1, 2, 9)],
    [(1, 11, 4), (2, 6, 4), (0, 0, 3), (SLOTS, 0, 0), (SLOTS, 0, 0)],
    [(0, 3, 1), (1, 12, 4), (2, 7, 5)],
    [(0, 4, 2), (1, 13, 2), (2, 12, 1)],
    [(0, 5, 2), (1, 14, 1), (2, 13, 3)],
]
"""Spans of (slot, start, rows): earlier steps' drafts are partly accepted; slot 0 starts over."""


def batch_of(
    spans: list[tuple[int, int, int]], fill: int, device: torch.device, longest: int = PENDING
) -> Batch:
    """Return a batch of (slot, start, rows) spans.

    fill: rows at the end that belong to no span. longest: minimum of the batch's `longest`."""
    slots, starts, sizes = torch.tensor(spans, device=device).T.contiguous().unbind()
    nothing: Any = None
    total = int(sizes.sum()) + fill
    return Batch(
        ids=nothing,
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        kv_slots=[nothing],
        slots=slots,
        starts=starts,
        sizes=sizes,
        row_starts=sizes.cumsum(0) - sizes,
        offsets=nothing,
        longest=max(int(sizes.max()), longest),
        draft_lengths=nothing,
        tables=nothing,
        page_size=1,
    )


def stores(spec: StateSpec, pending: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return two equal stores, full of NaN."""
    pair = [StateStore(spec, SLOTS, pending, dtype, device) for _ in range(2)]
    for store in pair:
        for tensor in store.tensors:
            tensor.fill_(float("nan"))
    return pair


def weights_of(spec: StateSpec, dtype: torch.dtype, noise: torch.Generator, device: Any) -> Any:
    """Return random weights, with an empty input."""
    conv = torch.randn(spec.channels, spec.kernel, generator=noise)
    a_log, dt_bias, gain = (
        torch.randn(size, generator=noise) for size in (spec.heads, spec.heads, spec.value_dim)
    )
    parts = (part.to(device, dtype) for part in (conv, a_log - 1, dt_bias, 1 + gain / 4))
    return reference_recurrent.DeltaInput(conv, conv, conv, *parts, eps=1e-2)


def project(spec: StateSpec, rows: int, weights: Any, noise: torch.Generator) -> Any:
    """Return the weights with rows of one linear layer."""
    sizes = [spec.channels, spec.heads * spec.value_dim, 2 * spec.heads]
    y = torch.randn(rows, sum(sizes), generator=noise).to(weights.conv)
    qkv, z, ba = y.split(sizes, 1)
    return weights._replace(qkv=qkv, z=z, ba=ba)


def mix_both(pair: Any, batch: Batch, x: Any) -> Any:
    """Return the outputs of plain torch and of the kernels, each with its own store."""
    nothing: Any = None
    plain, fused = (
        RecurrentPlan(nothing, batch, store, form)
        for store, form in zip(pair, (cover, step_bookkeeping.cover), strict=True)
    )
    assert torch.equal(plain.accepted, fused.accepted)
    assert torch.equal(plain.starts_fresh, fused.starts_fresh)
    spec = plain.states.spec
    return (
        reference_recurrent.gated_mix(x, plain.groups, plain.stored(0), spec),
        recurrent.mix(x, fused.spans, fused.stored(0), batch.longest, spec),
    )


@full_where(lambda spec, dtype: (spec is SPECS["odd sizes"]) is (dtype is torch.float32))
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_steps_match_plain_torch(spec: StateSpec, dtype: torch.dtype, device: torch.device):
    noise = torch.Generator().manual_seed(8)
    pair = stores(spec, PENDING, dtype, device)
    weights, states_end = weights_of(spec, dtype, noise, device), [0] * SLOTS
    for spans in STEPS:
        batch = batch_of(spans, 3, device)
        x = project(spec, len(batch.positions), weights, noise)
        for part in (x.qkv, x.z, x.ba):
            part[-3:] = float("nan")
        expected, actual = mix_both(pair, batch, x)
        close = {"atol": BOUND[dtype], "rtol": BOUND[dtype]}
        torch.testing.assert_close(actual[:-3], expected[:-3], **close)
        assert not actual[-3:].any()
        for slot, start, size in spans:
            if slot == SLOTS:
                continue
            kept = start - states_end[slot] + size if start else PENDING + 1
            if kept > PENDING:  # the accepted rows go into the state
                states_end[slot], kept = (start, size) if size <= PENDING else (start + size, 0)
            ours, theirs = (store.window[0, slot, : spec.kernel - 1 + kept] for store in pair)
            assert torch.equal(ours, theirs)
            ours, theirs = (store.state[0, slot] for store in pair)
            tf32 = dtype == torch.bfloat16 and device.type == "cuda"
            torch.testing.assert_close(ours, theirs, atol=TF32 if tf32 else 2e-5, rtol=1e-4)
            ours, theirs = (store.gates[0, slot, :kept] for store in pair)
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
            for name in ("keys", "changes"):
                ours, theirs = (getattr(store, name)[0, slot, :kept] for store in pair)
                torch.testing.assert_close(ours, theirs, atol=TF32 if tf32 else 2e-5, rtol=1e-4)
            assert pair[0].length[slot] == pair[1].length[slot] == states_end[slot]


@pytest.mark.parametrize("similar", [False, True], ids=["", "similar keys"])
def test_blocks_of_16_rows_match_across_prefill_and_decode(similar: bool, device: torch.device):
    """With similar keys and rates near 1, the rows' changes to the state nearly cancel."""
    spec, pending = StateSpec(1, 2, 1, 16, 16, 4), 20
    noise = torch.Generator().manual_seed(5)
    pair = stores(spec, pending, torch.float32, device)
    weights = weights_of(spec, torch.float32, noise, device)
    if similar:
        weights = weights._replace(dt_bias=weights.dt_bias - 7)
    steps = [
        [(0, 0, 50), (1, 0, 16)],  # a prompt, and a block
        [(0, 50, 20), (1, 16, 20)],  # whose rows are all accepted; blocks of more than 16 rows
        [(0, 70, 1), (1, 33, 1)],  # of which 20 and 17 are accepted, and both decode
        [(0, 71, 1), (1, 34, 1)],
        [(0, 72, 20), (1, 34, 3)],
        [(0, 75, 1), (1, 37, 1)],
    ]
    for spans in steps:
        batch = batch_of(spans, 0, device, longest=1)
        x = project(spec, len(batch.positions), weights, noise)
        if similar:
            x = x._replace(qkv=x.qkv[:1] + 0.01 * x.qkv)
            x.ba[:, : spec.heads] += 5
        expected, actual = mix_both(pair, batch, x)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        for slot in (0, 1):
            ours, theirs = (store.state[0, slot] for store in pair)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_gates_match_plain_torch_at_any_size(device: torch.device):
    spec = StateSpec(1, 6, 1, 8, 8, 4)
    noise = torch.Generator().manual_seed(1)
    pair = stores(spec, 5, torch.float32, device)
    x = project(spec, 5, weights_of(spec, torch.float32, noise, device), noise)
    x.ba.mul_(torch.tensor([0.1, 1, 10, 50, 200], device=device)[:, None])
    mix_both(pair, batch_of([(0, 0, 5)], 0, device), x)
    ours, theirs = (store.gates[0, 0] for store in pair)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
