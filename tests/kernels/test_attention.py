"""The attention kernel against a loop in float64, and against the reference backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from strobe.attention.backend import Batch
from strobe.attention.groups import groups_of
from strobe.attention.mask import LayerMask
from strobe.attention.reference import ReferenceBackend
from strobe.attention.triton import TritonBackend, unsupported_reason
from strobe.kernels.attention import (
    PIECE_KEYS,
    AttentionConfig,
    AttentionWorkspace,
    config_of,
    paged_attention,
)
from strobe.kv.kv_store import NO_SCALE, KVScale, KVSpec, KVStore
from tests.support.full_marks import full_where

FULL = LayerMask()
BLOCK = LayerMask(causal=False)
# Measured with inputs of unit variance: 5e-7 in float32, 6e-4 in float16, and 1.5e-2 in bfloat16,
# to which the interpreter truncates instead of rounding.
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """Arguments with K/V in slots that rows see and NaN in all others, and the expected output."""

    q: Tensor
    kv: Tensor
    args: dict[str, Any]
    want: Tensor
    rows: Tensor


def visible(mask: LayerMask, position: int, end: int) -> range:
    """Return the keys that the row at `position` sees."""
    low, high = 0, min(end, position + 1) if mask.causal else end
    if mask.window is not None:
        low = max(0, position - mask.window + 1)
        if not mask.causal:
            high = min(high, position + mask.window)
    return range(low, high)


def make_case(
    device: torch.device,
    spans: Sequence[tuple[int, int]],
    *,
    mask: LayerMask = FULL,
    dim: int = 64,
    heads: int = 1,
    group: int = 2,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    pad: int = 0,
    scale: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """spans: (start, size) of each. heads: of keys. pad: elements between the rows of q. sinks:
    give each head one, some large and some small."""
    draw = torch.Generator().manual_seed(seed)
    columns = -(-max(start + size for start, size in spans) // page_size) + 1
    pages = torch.randperm(len(spans) * columns, generator=draw).view(-1, columns)
    table = pages * page_size - torch.arange(columns) * page_size
    order = torch.randperm(len(spans), generator=draw)  # the spans' rows in the table
    kv = torch.full((pages.numel() * page_size, 2, heads, dim), float("nan"), dtype=torch.float64)
    sizes = [size for _, size in spans]
    firsts = list(itertools.accumulate(sizes, lambda first, size: first + size + 1, initial=0))
    rows = firsts[-1]  # each span is followed by a row of no span
    extra = torch.linspace(-4, 9, heads * group).to(dtype)
    q = torch.randn(rows, heads * group, dim, generator=draw, dtype=torch.float64).to(dtype)
    want = torch.zeros(rows, heads * group, dim, dtype=torch.float64)
    live: list[int] = []
    stored_dtype = kv_dtype or dtype
    for s, (start, size) in enumerate(spans):
        positions = torch.arange(start + size)
        slots = table[order[s], positions // page_size] + positions
        ranges = [visible(mask, start + i, start + size) for i in range(size)]
        seen = slots[min((r.start for r in ranges), default=0) : start + size]
        drawn = torch.randn(len(seen), 2, heads, dim, generator=draw, dtype=torch.float64)
        kv[seen] = drawn.to(stored_dtype).double()
        for row, keys in enumerate(ranges, firsts[s]):
            live.append(row)
            k, v = kv[slots[keys.start : keys.stop]].repeat_interleave(group, 2).unbind(1)
            scores = torch.einsum("nhd,hd->hn", k, q[row].double()) * (scale or dim**-0.5)
            if sinks:
                scores = torch.cat([scores, extra.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, : len(keys)]
            want[row] = torch.einsum("hn,nhd->hd", weights, v)
    wide = torch.zeros(rows, heads * group * dim + pad, dtype=dtype, device=device)
    args = {
        "starts": torch.tensor([start for start, _ in spans], device=device),
        "sizes": torch.tensor(sizes, device=device),
        "row_starts": torch.tensor(firsts[:-1], device=device),
        "tables": table.to(device),
        "table_rows": order.to(device),
        "page_size": page_size,
        "mask": mask,
        "longest": max(sizes),
        "scale": scale,
        "sinks": extra.to(device) if sinks else None,
    }
    wide[:, : heads * group * dim] = q.flatten(1).to(device)
    view = wide[:, : heads * group * dim].view(rows, heads * group, dim)
    assert view.stride(0) == heads * group * dim + pad
    rectangle = torch.tensor(live, device=device)
    return Case(view, kv.to(stored_dtype).to(device), args, want.flatten(1).to(device), rectangle)


def synchronize(device: torch.device) -> None:
    """Wait for starts, sizes and tables, which the kernel just before may not write."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check(
    case: Case, workspace: AttentionWorkspace, config: AttentionConfig | None = None
) -> Tensor:
    synchronize(case.q.device)
    out = paged_attention(case.q, case.kv, **case.args, workspace=workspace, config=config)
    assert out.shape == case.want.shape
    assert out.dtype == case.q.dtype
    error = (out.double() - case.want)[case.rows].abs().max().item()
    assert error < BOUND[case.q.dtype], error  # False for NaN, too
    return out[case.rows]


@pytest.fixture
def unsplit(device: torch.device) -> AttentionWorkspace:
    """A workspace too small to split blocks."""
    return AttentionWorkspace(device, 512, programs=1)


@pytest.fixture
def workspace(device: torch.device) -> AttentionWorkspace:
    return AttentionWorkspace(device, 128, programs=24)


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """The dtype for configurations that are too large for float32 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


SPANS = [(0, 3), (30, 1), (0, 0), (16, 5), (47, 16), (0, 0), (9, 1)]


@full_where(lambda heads, group, causal: (heads, group) != (2, 1) and not causal)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "heads", "group"), [(64, 2, 1), (64, 1, 7), (128, 2, 4), (256, 1, 2), (512, 1, 8)]
)
def test_heads(
    device: torch.device,
    unsplit: AttentionWorkspace,
    dim: int,
    heads: int,
    group: int,
    causal: bool,
) -> None:
    case = make_case(
        device, SPANS, mask=LayerMask(causal), dim=dim, heads=heads, group=group, pad=2 * dim
    )
    check(case, unsplit)


@full_where(lambda size, mask: size in (2, 16) and mask in (FULL, LayerMask(False, 20)))
@pytest.mark.parametrize("size", [1, 2, 16, 33])
@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 20), LayerMask(False, 20)])
def test_span_sizes(
    device: torch.device, unsplit: AttentionWorkspace, size: int, mask: LayerMask
) -> None:
    spans = [(0, size), (0, 0), (48, size), (31, max(size // 2, 1))]
    check(make_case(device, spans, mask=mask, group=4), unsplit)


@pytest.mark.parametrize("page_size", [1, 7, 16, 32])
@pytest.mark.parametrize("causal", [True, False])
def test_page_sizes(
    device: torch.device, unsplit: AttentionWorkspace, page_size: int, causal: bool
) -> None:
    spans = [(0, 1), (page_size - 1, 2), (2 * page_size, page_size), (3 * page_size, 1)]
    check(make_case(device, spans, mask=LayerMask(causal), page_size=page_size), unsplit)


@full_where(lambda window, unmasked_loop: unmasked_loop is (window not in (1, 45)))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 16, 45, 200])
@pytest.mark.parametrize("unmasked_loop", [False, True])
def test_windows(
    device: torch.device,
    unsplit: AttentionWorkspace,
    dtype: torch.dtype,
    causal: bool,
    window: int,
    unmasked_loop: bool,
) -> None:
    """A window of 45 covers a whole span; one of 16 starts at a page boundary."""
    spans = [(0, 45), (80, 16), (47, 1), (100, 33)]
    case = make_case(device, spans, mask=LayerMask(causal, window), dtype=dtype)
    check(case, unsplit, AttentionConfig(64, 32, 4, 2, unmasked_loop))


@pytest.mark.parametrize(
    "mask", [FULL, pytest.param(BLOCK, marks=pytest.mark.full), LayerMask(False, 20)]
)
def test_long_spans(
    device: torch.device, unsplit: AttentionWorkspace, dtype: torch.dtype, mask: LayerMask
) -> None:
    """More rows than in a block, with and without an unmasked loop."""
    case = make_case(device, [(0, 70), (30, 40), (200, 9)], mask=mask, dtype=dtype)
    for unmasked_loop in (False, True):
        check(case, unsplit, AttentionConfig(32, 32, 4, 2, unmasked_loop))


SPLIT = [(2400, 3), (0, 0), (255, 1), (700, 7), (256, 2)]


@pytest.mark.parametrize(
    ("mask", "unmasked_loop"),
    [
        (FULL, False),
        pytest.param(BLOCK, True, marks=pytest.mark.full),
        (LayerMask(True, 600), True),
        pytest.param(LayerMask(False, 600), False, marks=pytest.mark.full),
        pytest.param(LayerMask(True, 256), True, marks=pytest.mark.full),
    ],
)
def test_split_blocks(
    device: torch.device, dtype: torch.dtype, mask: LayerMask, unmasked_loop: bool
) -> None:
    """Up to ten pieces, combined in one or two rounds; twice, since workspaces are reused."""
    workspace = AttentionWorkspace(device, 64, programs=50)
    case = make_case(device, SPLIT, mask=mask, dtype=dtype)
    config = AttentionConfig(16, 128, 4, 2, unmasked_loop)
    first = check(case, workspace, config)
    workspace.partials.fill_(float("nan"))
    workspace.stats.fill_(float("nan"))
    assert torch.equal(check(case, workspace, config), first)


@pytest.mark.parametrize(
    ("dim", "pairs"),
    [
        pytest.param(128, 128, marks=pytest.mark.full),
        pytest.param(64, 64, marks=pytest.mark.full),
        (128, 16),
        (512, 16),
    ],
)
def test_split_blocks_of_every_size(
    device: torch.device, dtype: torch.dtype, dim: int, pairs: int
) -> None:
    """Blocks combined by several programs, and fewer pieces than fit into the workspace."""
    workspace = AttentionWorkspace(device, dim, programs=48)
    spans = [(300, 9)] if dim == 512 else [(900, 17), (300, 20)]
    case = make_case(device, spans, dim=dim, group=3, dtype=dtype)
    check(case, workspace, AttentionConfig(pairs, 32 if dim == 512 else 128, 8, 2, True))


def test_workspace_serves_every_shape(device: torch.device, workspace: AttentionWorkspace) -> None:
    for dim, heads, spans in [(64, 1, [(600, 4)]), (128, 2, [(520, 1), (0, 1)]), (64, 3, [(2, 2)])]:
        check(make_case(device, spans, dim=dim, heads=heads), workspace)


@full_where(lambda dtype, causal: dtype == torch.float16 and causal)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision(
    device: torch.device, workspace: AttentionWorkspace, dtype: torch.dtype, causal: bool
) -> None:
    spans = [(0, 3), (47, 8), (300, 2)]
    check(make_case(device, spans, mask=LayerMask(causal), dtype=dtype), workspace)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.full),
        3,
        pytest.param(8, marks=pytest.mark.full),
        40,
    ],
)
def test_wide_heads(
    device: torch.device, unsplit: AttentionWorkspace, size: int, kv_dtype: torch.dtype
) -> None:
    """Every configuration of the widest heads, with two dtypes of keys and values."""
    spans = [(0, size), (47, size)]
    case = make_case(device, spans, dim=512, group=8, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    check(case, unsplit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_cache(
    device: torch.device, unsplit: AttentionWorkspace, dtype: torch.dtype
) -> None:
    case = make_case(
        device, [(0, 3), (47, 16)], dtype=dtype, kv_dtype=torch.float8_e4m3fn, dim=128, group=2
    )
    check(case, unsplit)


def test_scale(device: torch.device, unsplit: AttentionWorkspace) -> None:
    check(make_case(device, [(20, 4)], scale=0.3), unsplit)


@full_where(lambda mask, dim: mask != BLOCK and dim == 64)
@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 20)])
@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 2, 8), (128, 1, 3)])
def test_sinks(
    device: torch.device,
    unsplit: AttentionWorkspace,
    dim: int,
    heads: int,
    group: int,
    mask: LayerMask,
) -> None:
    """From the first to the last head, sinks take from nearly none to nearly all of the weight."""
    case = make_case(device, SPANS, mask=mask, dim=dim, heads=heads, group=group, sinks=True)
    out = check(case, unsplit).view(len(case.rows), heads * group, dim)
    sizes = out.abs().mean((0, 2))
    assert sizes[0] > 50 * sizes[-1]


@pytest.mark.parametrize("window", [None, 900])
def test_split_blocks_count_sinks_once(
    device: torch.device, workspace: AttentionWorkspace, dtype: torch.dtype, window: int | None
) -> None:
    mask = LayerMask(True, window)
    case = make_case(device, [(1200, 3), (0, 1), (40, 2)], mask=mask, dtype=dtype, sinks=True)
    check(case, workspace)


def test_fully_masked_row_with_sink_is_zero(
    device: torch.device, unsplit: AttentionWorkspace
) -> None:
    case = make_case(device, [(20, 4)], page_size=8, sinks=True)
    args = case.args | {"tables": case.args["tables"][:, :3].contiguous()}
    args["starts"] = args["starts"] + 2
    args["mask"] = LayerMask(True, 1)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **args, workspace=unsplit)
    assert out[:2].isfinite().all()
    assert not out[2:4].any()


def test_longest_is_only_a_bound(device: torch.device, unsplit: AttentionWorkspace) -> None:
    """Padding in captured steps has blocks and spans without work."""
    case = make_case(device, [(20, 4), (0, 0), (3, 33), (0, 0)])
    case.args["longest"] = 90
    check(case, unsplit)


def test_two_runs_are_bitwise_equal(
    device: torch.device, workspace: AttentionWorkspace, dtype: torch.dtype
) -> None:
    case = make_case(device, [(600, 3), (0, 1)], dtype=dtype, group=4)
    first, second = check(case, workspace), check(case, workspace)
    assert torch.equal(first, second)


def test_rows_beyond_the_table_are_finite(
    device: torch.device, unsplit: AttentionWorkspace
) -> None:
    """Rows of drafts beyond the context see the keys within the table, or none."""
    case = make_case(device, [(20, 4)], page_size=8)
    args = case.args | {"tables": case.args["tables"][:, :3].contiguous()}
    args["starts"] = args["starts"] + 2
    args["mask"] = LayerMask(True, 1)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **args, workspace=unsplit)
    assert out[:4].isfinite().all()
    assert not out[2:4].any()


@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 24), LayerMask(False, 24)])
@pytest.mark.parametrize("start", [20, 500])
def test_nan_beyond_the_limit_reaches_no_row(
    device: torch.device, workspace: AttentionWorkspace, mask: LayerMask, start: int
) -> None:
    """All requests write drafts beyond the context to one page."""
    size, limit = 6, start + 2
    case = make_case(device, [(start, size)], mask=mask, page_size=8)
    within = make_case(device, [(start, size)], mask=mask, page_size=8)
    tables, row = within.args["tables"], within.args["table_rows"][0]
    beyond = torch.arange(limit, start + size, device=device)
    case.kv[tables[row, beyond // 8] + beyond] = float("nan")
    within.args["sizes"] = within.args["sizes"] - (size - 2)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **case.args, limit=limit, workspace=workspace)
    assert out[case.rows].isfinite().all()
    expected = paged_attention(within.q, within.kv, **within.args, workspace=workspace)
    assert torch.allclose(out[:2], expected[:2], atol=1e-6)


def test_every_head_size_has_configurations() -> None:
    for dim, pairs in itertools.product((64, 128, 256, 512), (1, 16, 17, 64, 65, 5000)):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kv_dtype in (dtype, torch.float8_e4m3fn):
                for spans in (1, 4, 100):
                    config = config_of(dim, pairs, spans, 8, dtype, kv_dtype, 132)
                    assert config.pairs <= 128
                    assert PIECE_KEYS % config.keys == 0


def test_workspace_allocates_stated_size(device: torch.device) -> None:
    workspace = AttentionWorkspace(device, 128, programs=10)
    tensors = (workspace.partials, workspace.stats)
    assert sum(t.nbytes for t in tensors) == AttentionWorkspace.nbytes(128, 10)


@full_where(lambda sinks, mask: not sinks and mask in (FULL, LayerMask(True, 24)))
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 24), LayerMask(False, 24)])
def test_backend_agrees_with_the_reference(
    device: torch.device, mask: LayerMask, sinks: bool
) -> None:
    """Run a layer of a ragged batch, three spans in two groups, by both backends."""
    draw = torch.Generator().manual_seed(1)
    page_size, columns, heads, dim = 16, 5, 2, 64
    starts, sizes = [37, 0, 48], [2, 20, 1]
    pages = torch.randperm(4 * columns, generator=draw).view(4, columns)
    tables = (pages - torch.arange(columns)) * page_size
    rows = [2, 0, 3]
    firsts = [0, 2, 22]
    positions = [p for s, n in zip(starts, sizes, strict=True) for p in range(s, s + n)]
    owner = [s for s, n in enumerate(sizes) for _ in range(n)]
    slots = [
        int(tables[rows[s], p // page_size]) + p for s, p in zip(owner, positions, strict=True)
    ]

    def t(values: Any) -> Tensor:
        return torch.tensor(values, device=device)

    batch = Batch(
        ids=t(positions),
        positions=t(positions),
        kv_slots=[t(slots)],
        slots=t(rows),
        starts=t(starts),
        sizes=t(sizes),
        row_starts=t(firsts),
        offsets=t([i for n in sizes for i in range(n)]),
        longest=20,
        draft_lengths=t([0, 0, 0]),
        tables=[tables.to(device)],
        page_size=page_size,
        row_counts=sizes,
        bounds=[50, 20, 49],
    )
    assert [group.members for group in groups_of(tuple(sizes), device)] == [(0, 2), (1,)]
    spec = KVSpec(((heads, dim),) * 2, torch.float32)
    history = torch.randn(2, 4 * columns * page_size, 2, heads, dim, generator=draw)
    q = torch.randn(23, heads * 2, dim, generator=draw).to(device)
    k, v = torch.randn(2, 23, heads, dim, generator=draw).to(device)
    extra = torch.linspace(-3, 5, heads * 2, device=device) if sinks else None
    outs: list[Tensor] = []
    plans: list[Callable[..., Tensor]] = []
    for backend in (ReferenceBackend(), TritonBackend(device, dim)):
        store = KVStore(spec, [4 * columns], page_size, device)
        store.data.copy_(history)
        plan = backend.plan(batch, store, [FULL, mask])
        plans.append(plan)
        outs.append(plan(1, q, k, v, extra))
    # Measured 1e-6; the reference's own error in float32 is as large.
    assert torch.allclose(*outs, atol=1e-5)
    scaled: list[Tensor] = []
    for backend in (ReferenceBackend(), TritonBackend(device, dim)):
        in_fp8 = KVSpec(((heads, dim),) * 2, torch.float8_e4m3fn)
        other = KVStore(in_fp8, [4 * columns], page_size, device)
        other.data.copy_(history)
        other.scales = [NO_SCALE, KVScale(keys=0.3, values=0.2)]
        scaled.append(backend.plan(batch, other, [FULL, mask])(1, q, k, v, extra))
    assert torch.allclose(*scaled, atol=1e-5)
    plan = TritonBackend(device, dim).plan(batch, store, [FULL, mask])
    assert torch.equal(plan.over(1, q, extra), outs[1])
    assert plan.kv(1).data_ptr() == store.data[1].data_ptr()
    assert plan.slots(1) is batch.kv_slots[0]
    # Keys before a span's window may be another sequence's by now.
    for s, start in enumerate(starts):
        for p in range(0 if mask.window is None else max(start - mask.window + 1, 0)):
            history[1, int(tables[rows[s], p // page_size]) + p] = torch.nan
    for backend, out in zip((ReferenceBackend(), TritonBackend(device, dim)), outs, strict=True):
        store = KVStore(spec, [4 * columns], page_size, device)
        store.data.copy_(history)
        assert torch.equal(backend.plan(batch, store, [FULL, mask])(1, q, k, v, extra), out)


@pytest.mark.parametrize("sizes", [(1,), (4, 4, 4), (1, 16, 17, 2), (40, 3, 33, 64, 1), (5, 2)])
def test_groups_hold_each_row_once_by_length(
    sizes: tuple[int, ...],
) -> None:
    groups = groups_of(sizes, torch.device("cpu"))
    firsts = list(itertools.accumulate(sizes, initial=0))
    assert sorted(i for group in groups for i in group.members) == list(range(len(sizes)))
    placed: list[int] = []
    for group in groups:
        counts = [sizes[i] for i in group.members]
        assert max(counts) <= max(16, 2 * min(counts)), "a short span is padded to a long one"
        assert group.rows.shape == (len(counts), max(counts))
        assert group.spans.tolist() == list(group.members)
        for line, i in zip(group.rows.tolist(), group.members, strict=True):
            rows = list(range(firsts[i], firsts[i + 1]))
            assert line == rows + rows[-1:] * (max(counts) - sizes[i])
        cells = group.rows.flatten()
        assert (group.flat is None) == (len(set(counts)) == 1)
        assert torch.equal(cells if group.flat is None else cells[group.flat], group.target)
        placed += group.target.tolist()
    assert sorted(placed) == list(range(sum(sizes)))


def test_unsupported_reason_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert "CUDA device" in str(unsupported_reason(128, torch.bfloat16, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert unsupported_reason(128, torch.bfloat16, cuda) is None
    assert "head size 96" in str(unsupported_reason(96, torch.bfloat16, cuda))
    assert "float64" in str(unsupported_reason(128, torch.float64, cuda))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = str(unsupported_reason(128, torch.bfloat16, cuda))
    assert "8.0 or above, but the device has 7.5" in reason


def test_many_spans_with_a_long_one_fit_the_grid(device: torch.device) -> None:
    """All spans together have more than 65,535 blocks, the limit of a grid's later axes."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    case = make_case(device, [(3, 1)] * 300, dim=64, heads=1, group=8, dtype=torch.bfloat16)
    case = case._replace(args={**case.args, "longest": 8192})
    check(case, AttentionWorkspace(device, 64))
