"""The attention kernel against a plain loop in float64, and against the reference backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from strobe.attention.base import Batch
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
from strobe.kv.store import KVSpec, KVStore

FULL = LayerMask()
BLOCK = LayerMask(causal=False)
# Measured with inputs of unit variance: 5e-7 in float32, 6e-4 in float16, and 1.5e-2 in bfloat16,
# which the interpreter cuts off instead of rounding (and computes in float32 in any case).
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


class Case(NamedTuple):
    """Spans with keys and values where a row sees them, NaN everywhere else."""

    q: Tensor
    kv: Tensor
    args: dict[str, Any]
    want: Tensor
    rows: Tensor


def visible(mask: LayerMask, position: int, end: int) -> range:
    """The keys that the row at `position` sees."""
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
    """spans: (start, size) each. heads: of keys. pad: numbers between the rows of q. sinks: whether
    heads have one more logit each, some large and some small."""
    draw = torch.Generator().manual_seed(seed)
    columns = -(-max(start + size for start, size in spans) // page_size) + 1
    pages = torch.randperm(len(spans) * columns, generator=draw).view(-1, columns)
    table = pages * page_size - torch.arange(columns) * page_size
    order = torch.randperm(len(spans), generator=draw)  # of the spans' rows in the table
    kv = torch.full((pages.numel() * page_size, 2, heads, dim), float("nan"), dtype=torch.float64)
    sizes = [size for _, size in spans]
    firsts = list(itertools.accumulate(sizes, lambda first, size: first + size + 1, initial=0))
    rows = firsts[-1]  # one of no span after each
    extra = torch.linspace(-4, 9, heads * group).to(dtype)
    q = torch.randn(rows, heads * group, dim, generator=draw, dtype=torch.float64).to(dtype)
    want = torch.zeros(rows, heads * group, dim, dtype=torch.float64)
    live: list[int] = []
    kept = kv_dtype or dtype
    for s, (start, size) in enumerate(spans):
        positions = torch.arange(start + size)
        slots = table[order[s], positions // page_size] + positions
        ranges = [visible(mask, start + i, start + size) for i in range(size)]
        seen = slots[min((r.start for r in ranges), default=0) : start + size]
        drawn = torch.randn(len(seen), 2, heads, dim, generator=draw, dtype=torch.float64)
        kv[seen] = drawn.to(kept).double()
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
    return Case(view, kv.to(kept).to(device), args, want.flatten(1).to(device), rectangle)


def synchronize(device: torch.device) -> None:
    """Starts, sizes and tables may not come from the kernel just before."""
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
    assert error < BOUND[case.q.dtype], error  # NaN is not
    return out[case.rows]


@pytest.fixture
def one(device: torch.device) -> AttentionWorkspace:
    """A workspace so small that no block is divided."""
    return AttentionWorkspace(device, 512, programs=1)


@pytest.fixture
def many(device: torch.device) -> AttentionWorkspace:
    return AttentionWorkspace(device, 128, programs=24)


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """For configurations that are too large for float32 on a GPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


SPANS = [(0, 3), (30, 1), (0, 0), (16, 5), (47, 16), (0, 0), (9, 1)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dim", "heads", "group"), [(64, 2, 1), (64, 1, 7), (128, 2, 4), (256, 1, 2), (512, 1, 8)]
)
def test_heads(
    device: torch.device, one: AttentionWorkspace, dim: int, heads: int, group: int, causal: bool
) -> None:
    case = make_case(
        device, SPANS, mask=LayerMask(causal), dim=dim, heads=heads, group=group, pad=2 * dim
    )
    check(case, one)


@pytest.mark.parametrize("size", [1, 2, 16, 33])
@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 20), LayerMask(False, 20)])
def test_span_sizes(
    device: torch.device, one: AttentionWorkspace, size: int, mask: LayerMask
) -> None:
    spans = [(0, size), (0, 0), (48, size), (31, max(size // 2, 1))]
    check(make_case(device, spans, mask=mask, group=4), one)


@pytest.mark.parametrize("page_size", [1, 7, 16, 32])
@pytest.mark.parametrize("causal", [True, False])
def test_page_sizes(
    device: torch.device, one: AttentionWorkspace, page_size: int, causal: bool
) -> None:
    spans = [(0, 1), (page_size - 1, 2), (2 * page_size, page_size), (3 * page_size, 1)]
    check(make_case(device, spans, mask=LayerMask(causal), page_size=page_size), one)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 16, 45, 200])
@pytest.mark.parametrize("apart", [False, True])
def test_windows(
    device: torch.device,
    one: AttentionWorkspace,
    dtype: torch.dtype,
    causal: bool,
    window: int,
    apart: bool,
) -> None:
    """45: the whole of a span; 16: from the edge of a page on."""
    spans = [(0, 45), (80, 16), (47, 1), (100, 33)]
    case = make_case(device, spans, mask=LayerMask(causal, window), dtype=dtype)
    check(case, one, AttentionConfig(64, 32, 4, 2, apart))


@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(False, 20)])
def test_long_spans(
    device: torch.device, one: AttentionWorkspace, dtype: torch.dtype, mask: LayerMask
) -> None:
    """More rows than a block has, with a loop that needs no mask and without."""
    case = make_case(device, [(0, 70), (30, 40), (200, 9)], mask=mask, dtype=dtype)
    for apart in (False, True):
        check(case, one, AttentionConfig(32, 32, 4, 2, apart))


DIVIDED = [(2400, 3), (0, 0), (255, 1), (700, 7), (256, 2)]


@pytest.mark.parametrize(
    ("mask", "apart"),
    [
        (FULL, False),
        (BLOCK, True),
        (LayerMask(True, 600), True),
        (LayerMask(False, 600), False),
        (LayerMask(True, 256), True),
    ],
)
def test_divided_blocks(
    device: torch.device, dtype: torch.dtype, mask: LayerMask, apart: bool
) -> None:
    """Up to ten pieces, so sums in one round and in two; twice, over what the first run left."""
    many = AttentionWorkspace(device, 64, programs=50)
    case = make_case(device, DIVIDED, mask=mask, dtype=dtype)
    config = AttentionConfig(16, 128, 4, 2, apart)
    first = check(case, many, config)
    many.partials.fill_(float("nan"))
    many.stats.fill_(float("nan"))
    assert torch.equal(check(case, many, config), first)


@pytest.mark.parametrize(("dim", "pairs"), [(128, 128), (64, 64), (128, 16), (512, 16)])
def test_divided_blocks_of_every_size(
    device: torch.device, dtype: torch.dtype, dim: int, pairs: int
) -> None:
    """Blocks whose results are added up in parts, or fewer pieces than the workspace has room."""
    workspace = AttentionWorkspace(device, dim, programs=48)
    spans = [(300, 9)] if dim == 512 else [(900, 17), (300, 20)]
    case = make_case(device, spans, dim=dim, group=3, dtype=dtype)
    check(case, workspace, AttentionConfig(pairs, 32 if dim == 512 else 128, 8, 2, True))


def test_workspace_serves_every_shape(device: torch.device, many: AttentionWorkspace) -> None:
    for dim, heads, spans in [(64, 1, [(600, 4)]), (128, 2, [(520, 1), (0, 1)]), (64, 3, [(2, 2)])]:
        check(make_case(device, spans, dim=dim, heads=heads), many)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_half_precision(
    device: torch.device, many: AttentionWorkspace, dtype: torch.dtype, causal: bool
) -> None:
    spans = [(0, 3), (47, 8), (300, 2)]
    check(make_case(device, spans, mask=LayerMask(causal), dtype=dtype), many)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_wide_heads(
    device: torch.device, one: AttentionWorkspace, size: int, kv_dtype: torch.dtype
) -> None:
    """Every configuration of the widest heads there are, in two dtypes of keys and values."""
    spans = [(0, size), (47, size)]
    case = make_case(device, spans, dim=512, group=8, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    check(case, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_cache(device: torch.device, one: AttentionWorkspace, dtype: torch.dtype) -> None:
    case = make_case(
        device, [(0, 3), (47, 16)], dtype=dtype, kv_dtype=torch.float8_e4m3fn, dim=128, group=2
    )
    check(case, one)


def test_scale(device: torch.device, one: AttentionWorkspace) -> None:
    check(make_case(device, [(20, 4)], scale=0.3), one)


@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 20)])
@pytest.mark.parametrize(("dim", "heads", "group"), [(64, 2, 8), (128, 1, 3)])
def test_sinks(
    device: torch.device, one: AttentionWorkspace, dim: int, heads: int, group: int, mask: LayerMask
) -> None:
    """One more logit per query head; among the heads it takes nearly nothing and nearly all."""
    case = make_case(device, SPANS, mask=mask, dim=dim, heads=heads, group=group, sinks=True)
    out = check(case, one).view(len(case.rows), heads * group, dim)
    sizes = out.abs().mean((0, 2))
    assert sizes[0] > 50 * sizes[-1]


@pytest.mark.parametrize("window", [None, 900])
def test_sinks_join_once_where_a_block_is_divided(
    device: torch.device, many: AttentionWorkspace, dtype: torch.dtype, window: int | None
) -> None:
    mask = LayerMask(True, window)
    case = make_case(device, [(1200, 3), (0, 1), (40, 2)], mask=mask, dtype=dtype, sinks=True)
    check(case, many)


def test_fully_masked_row_with_sink_is_zero(device: torch.device, one: AttentionWorkspace) -> None:
    case = make_case(device, [(20, 4)], page_size=8, sinks=True)
    args = case.args | {"tables": case.args["tables"][:, :3].contiguous()}
    args["starts"] = args["starts"] + 2
    args["mask"] = LayerMask(True, 1)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **args, workspace=one)
    assert out[:2].isfinite().all()
    assert not out[2:4].any()


def test_longest_is_only_a_bound(device: torch.device, one: AttentionWorkspace) -> None:
    """As in a captured step: more blocks and spans than there is work for."""
    case = make_case(device, [(20, 4), (0, 0), (3, 33), (0, 0)])
    case.args["longest"] = 90
    check(case, one)


def test_two_runs_agree_to_the_bit(
    device: torch.device, many: AttentionWorkspace, dtype: torch.dtype
) -> None:
    case = make_case(device, [(600, 3), (0, 1)], dtype=dtype, group=4)
    first, second = check(case, many), check(case, many)
    assert torch.equal(first, second)


def test_rows_beyond_the_table_are_finite(device: torch.device, one: AttentionWorkspace) -> None:
    """Drafts past the longest context: their rows see what the table reaches, or nothing."""
    case = make_case(device, [(20, 4)], page_size=8)
    args = case.args | {"tables": case.args["tables"][:, :3].contiguous()}
    args["starts"] = args["starts"] + 2
    args["mask"] = LayerMask(True, 1)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **args, workspace=one)
    assert out[:4].isfinite().all()
    assert not out[2:4].any()


@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 24), LayerMask(False, 24)])
@pytest.mark.parametrize("start", [20, 500])
def test_nan_at_the_limit_and_beyond_reaches_no_row(
    device: torch.device, many: AttentionWorkspace, mask: LayerMask, start: int
) -> None:
    """Drafts past the context's end, which all requests write to one page."""
    size, limit = 6, start + 2
    case = make_case(device, [(start, size)], mask=mask, page_size=8)
    within = make_case(device, [(start, size)], mask=mask, page_size=8)
    tables, row = within.args["tables"], within.args["table_rows"][0]
    beyond = torch.arange(limit, start + size, device=device)
    case.kv[tables[row, beyond // 8] + beyond] = float("nan")
    within.args["sizes"] = within.args["sizes"] - (size - 2)
    synchronize(device)
    out = paged_attention(case.q, case.kv, **case.args, limit=limit, workspace=many)
    assert out[case.rows].isfinite().all()
    wanted = paged_attention(within.q, within.kv, **within.args, workspace=many)
    assert torch.allclose(out[:2], wanted[:2], atol=1e-6)


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


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", [FULL, BLOCK, LayerMask(True, 24), LayerMask(False, 24)])
def test_backend_agrees_with_the_reference(
    device: torch.device, mask: LayerMask, sinks: bool
) -> None:
    """A layer of a ragged batch: three spans in two groups, by both backends."""
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
        kv_slots=t(slots),
        slots=t(rows),
        starts=t(starts),
        sizes=t(sizes),
        row_starts=t(firsts),
        longest=20,
        draft_lengths=t([0, 0, 0]),
        tables=tables.to(device),
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
        store = KVStore(spec, 4 * columns, page_size, device)
        store.data.copy_(history)
        plan = backend.plan(batch, store, [FULL, mask])
        plans.append(plan)
        outs.append(plan(1, q, k, v, extra))
    # Measured 1e-6; the reference's own error in float32 is as large.
    assert torch.allclose(*outs, atol=1e-5)
    plan = TritonBackend(device, dim).plan(batch, store, [FULL, mask])
    assert torch.equal(plan.over(1, q, extra), outs[1])
    assert plan.kv(1).data_ptr() == store.data[1].data_ptr()
    assert plan.slots is batch.kv_slots


@pytest.mark.parametrize("sizes", [(1,), (4, 4, 4), (1, 16, 17, 2), (40, 3, 33, 64, 1), (5, 2)])
def test_groups_hold_each_row_once_by_length(
    sizes: tuple[int, ...],
) -> None:
    groups = groups_of(sizes, torch.device("cpu"))
    firsts = list(itertools.accumulate(sizes, initial=0))
    assert sorted(i for group in groups for i in group.members) == list(range(len(sizes)))
    placed: list[int] = []
    for group in groups:
        of = [sizes[i] for i in group.members]
        assert max(of) <= max(16, 2 * min(of)), "a short span is padded to a long one"
        assert group.rows.shape == (len(of), max(of))
        assert group.spans.tolist() == list(group.members)
        for line, i in zip(group.rows.tolist(), group.members, strict=True):
            own = list(range(firsts[i], firsts[i + 1]))
            assert line == own + own[-1:] * (max(of) - sizes[i])
        cells = group.rows.flatten()
        assert (group.flat is None) == (len(set(of)) == 1)
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
    assert "9.0 and 10.x, the device has 7.5" in str(unsupported_reason(128, torch.bfloat16, cuda))


def test_many_spans_with_a_long_one_fit_the_grid(device: torch.device) -> None:
    """Blocks of all spans together pass 65,535, the limit of a grid's later axes."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    case = make_case(device, [(3, 1)] * 300, dim=64, heads=1, group=8, dtype=torch.bfloat16)
    case = case._replace(args={**case.args, "longest": 8192})
    check(case, AttentionWorkspace(device, 64))
