"""The operations in compiled C against plain torch, and a row alone against the row in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.compiled import CompiledBackend
from strobe.attention.mask import LayerMask
from strobe.attention.reference import ReferenceBackend
from strobe.kernels import reference_convolution
from strobe.kernels.cpu.calls import CpuCalls, NormFactors
from strobe.kernels.cpu.library import CompilerMissing, load_library
from strobe.kernels.reference_experts import Gate
from strobe.kv.kv_store import KVSpec, KVStore
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.linear import LinearView
from strobe.models.modules import Attention, RMSNorm, RotaryTable
from strobe.models.ops.compiled_ops import CompiledOps
from strobe.models.ops.torch_ops import ContextWeights, ForwardRows, TorchOps

PAGE = 4
FULL = LayerMask()
BLOCK = LayerMask(causal=False)
CLOSE = {"atol": 2e-6, "rtol": 2e-6}
"""Measured 6e-7 at most, for values of unit variance."""


@pytest.fixture(scope="module", autouse=True)
def with_compiler() -> None:
    try:
        load_library()
    except CompilerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def ops() -> CompiledOps:
    return CompiledOps()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of(size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5)
    norm.weight.data = 1 + draw(size, seed=9) / 4
    norm.fold()
    return norm


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 576), (3, 17), (300, 130)])
@torch.no_grad()
def test_norms_match_torch(ops: CompiledOps, threads: int, rows: int, size: int):
    norm = norm_of(size)
    x = draw(rows, size)
    y = draw(rows, size, seed=1)
    torch.testing.assert_close(ops.norm(x, norm), TorchOps().norm(x, norm), **CLOSE)
    for scale in (None, torch.tensor([0.3])):
        plain = TorchOps().residual(x)
        TorchOps().add_norm(plain, y, norm, scale)
        stream = ops.residual(x)
        ops.add_norm(stream, y.clone(), norm, scale)
        torch.testing.assert_close(stream.value, plain.value, **CLOSE)


@torch.no_grad()
def test_sum_holds_the_norm_that_reads_it_next(ops: CompiledOps):
    linear = LinearView(weight=draw(24, 8) / 3)
    after = LinearView(weight=draw(5, 24, seed=3))
    norm = norm_of(24)
    y = draw(7, 8, seed=2)
    results: list[Tensor] = []
    for kind in (TorchOps(), ops):
        stream = kind.residual(draw(7, 24, seed=1), (0, 1))
        stream.begin(1, norm)
        kind.add_linear(stream, y, linear)
        stream.end(1)
        results.append(kind.norm_linear(stream, norm, after))
        features = stream.features()
        assert features is not None
        results.append(features)
        stream.value = stream.value * 2  # what the norm was computed of is gone
        results.append(kind.norm_linear(stream, norm, after))
    for plain, compiled in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 3), (5, 48), (70, 1000)])
@torch.no_grad()
def test_gate_matches_torch(ops: CompiledOps, threads: int, rows: int, size: int, activation: str):
    x = draw(rows, 2 * size) * 4
    x[0, :size] = torch.linspace(-120, 120, size)
    x[-1, 0] = float("nan")
    gelu = activation == "gelu_tanh"
    want = Gate("gelu_tanh" if gelu else "silu")(x)
    actual = ops.calls.gate(x, gelu=gelu)
    torch.testing.assert_close(actual, want, atol=4e-6, rtol=4e-6, equal_nan=True)
    assert actual.isnan().sum() == 1


@pytest.mark.parametrize("onto", [False, True])
@torch.no_grad()
def test_convolution_matches_torch(ops: CompiledOps, threads: int, onto: bool):
    rows, size, taps, groups = 9, 24, 4, 6
    x = draw(rows, size)
    base = draw(2, taps, size, seed=1)
    dynamic = draw(rows, 2 * taps * groups, seed=2)
    offsets = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4])
    residual = draw(rows, size, seed=3) if onto else None
    forward = ForwardRows(offsets, None, [], offsets)
    kernels = ops.block_kernels(base, dynamic)
    for side in (0, 1):
        own = dynamic.view(rows, 2, taps, groups)[:, side]
        want = reference_convolution.convolve(x, base[side], own, offsets, residual)
        actual = ops.convolve(x, kernels, side, forward, onto=residual)
        torch.testing.assert_close(actual, want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_context_is_stored_as_by_torch(ops: CompiledOps, threads: int):
    layers, heads, width, rows = 3, 2, 64, 5
    norms = [norm_of(width) for _ in range(layers)]
    gains, floors = zip(*(norm.folded for norm in norms if norm.folded), strict=True)
    weights = ContextWeights(
        linear=LinearView(weight=draw(1, 1)),
        gains=torch.stack([norm.weight for norm in norms]),
        folded=(torch.stack(gains), floors[0]),
        eps=1e-5,
    )
    positions = torch.tensor([3, 4, 9, 0, 31])
    slots = torch.tensor([1, 7, 6, 2, 0])
    kv = draw(rows, layers * 2 * heads * width)
    forward = ForwardRows(positions, None, [RotaryTable(width, RopeConfig(theta=1e4), 32)])
    stores = [
        KVStore(KVSpec(((heads, width),) * layers, torch.float32), [2], PAGE, torch.device("cpu"))
        for _ in range(2)
    ]
    TorchOps().store_context(kv.clone(), weights, forward, slots, stores[0])
    ops.store_context(kv.clone(), weights, forward, slots, stores[1])
    torch.testing.assert_close(stores[1].data, stores[0].data, **CLOSE)


class Heads(NamedTuple):
    """Shape of a layer's attention."""

    q: int
    kv: int
    width: int
    norms: bool = False
    own_values: bool = True
    value_norm: bool = False


class Layer(torch.nn.Module):
    """The fields of `Attention` that operations read."""

    def __init__(self, heads: Heads):
        super().__init__()
        self.layer = 0
        self.eps = 1e-5
        self.q_heads = heads.q
        self.kv_heads = heads.kv
        self.head_dim = heads.width
        self.own_values = heads.own_values
        self.value_norm = heads.value_norm
        self.sinks = None
        self.q_norm = norm_of(heads.width) if heads.norms else None
        self.k_norm = norm_of(heads.width) if heads.norms else None
        self.folded = None

    norms = Attention.norms


def attend(
    ops: TorchOps,
    backend: ReferenceBackend | CompiledBackend,
    spans: Sequence[tuple[int, int]],
    heads: Heads,
    *,
    mask: LayerMask = FULL,
    limit: int = 1 << 62,
    only: int | None = None,
) -> list[Tensor]:
    """Return each span's outputs [size, Hq * D]. spans: (start, size) of each, whose pages are
    interleaved; slots without a key that a span may see hold NaN. only: run one of the spans."""
    columns = -(-max(start + size for start, size in spans) // PAGE)
    pages = torch.arange(1, len(spans) * columns + 1).view(columns, len(spans)).t()
    table = (pages * PAGE - torch.arange(columns) * PAGE).contiguous()
    spec = KVSpec(((heads.kv, heads.width),), torch.float32)
    store = KVStore(spec, [pages.numel() + 1], PAGE, torch.device("cpu"))
    store.layers[0].fill_(float("nan"))
    total = heads.q + heads.kv * (1 + heads.own_values)
    chosen = range(len(spans)) if only is None else [only]
    rows: list[Tensor] = []
    for index, (start, size) in enumerate(spans):
        positions = torch.arange(start)
        slots = table[index, positions // PAGE] + positions
        store.layers[0][slots] = draw(start, 2, heads.kv, heads.width, seed=index)
        rows.append(draw(size, total * heads.width, seed=100 + index))
    starts = torch.tensor([spans[i][0] for i in chosen])
    sizes = [spans[i][1] for i in chosen]
    offsets = torch.cat([torch.arange(size) for size in sizes])
    positions = starts.repeat_interleave(torch.tensor(sizes)) + offsets
    owners = torch.tensor(chosen).repeat_interleave(torch.tensor(sizes))
    kv_slots = table[owners, positions // PAGE] + positions
    kv_slots[positions >= limit] = 0
    firsts = list(itertools.accumulate(sizes, initial=0))
    batch = Batch(
        ids=positions,
        positions=positions,
        kv_slots=[kv_slots],
        starts=starts,
        draft_lengths=torch.zeros_like(starts),
        slots=torch.tensor(chosen),
        sizes=torch.tensor(sizes),
        row_starts=torch.tensor(firsts[:-1]),
        offsets=offsets,
        longest=max(sizes),
        tables=[table],
        page_size=PAGE,
        limit=limit,
        row_counts=sizes,
        bounds=[spans[i][0] + spans[i][1] for i in chosen],
    )
    rotary = RotaryTable(heads.width, RopeConfig(theta=1e4), 512)
    plan = backend.plan(batch, store, [mask])
    forward = ForwardRows(positions, plan, [rotary], offsets)
    qkv = torch.cat([rows[i] for i in chosen])
    out = ops.attention(qkv, Layer(heads), forward)  # pyright: ignore[reportArgumentType]
    return list(out.split(sizes))


SPANS = ((0, 1), (30, 1), (5, 8), (0, 21), (33, 8), (100, 1))
CASES: list[tuple[Heads, LayerMask]] = [
    (Heads(9, 3, 64), FULL),
    (Heads(2, 1, 16, norms=True), FULL),
    (Heads(8, 8, 32), LayerMask(window=6)),
    (Heads(8, 2, 128, norms=True), BLOCK),
    (Heads(3, 1, 80), LayerMask(causal=False, window=7)),
    (Heads(4, 2, 96, norms=True, own_values=False, value_norm=True), FULL),
    (Heads(2, 2, 256), FULL),
]


@pytest.mark.parametrize(("heads", "mask"), CASES)
@torch.no_grad()
def test_attention_matches_torch(ops: CompiledOps, threads: int, heads: Heads, mask: LayerMask):
    spans = [*SPANS, (20, 70)]  # the last one is left to torch
    want = attend(TorchOps(), ReferenceBackend(), spans, heads, mask=mask)
    actual = attend(ops, CompiledBackend(ops.calls), spans, heads, mask=mask)
    for plain, compiled in zip(want, actual, strict=True):
        assert not plain.isnan().any()
        torch.testing.assert_close(compiled, plain, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(("heads", "mask"), CASES[:4])
@torch.no_grad()
def test_row_alone_equals_the_row_in_a_batch(ops: CompiledOps, heads: Heads, mask: LayerMask):
    backend = CompiledBackend(ops.calls)
    together = attend(ops, backend, SPANS, heads, mask=mask)
    torch.set_num_threads(2)
    with_threads = attend(ops, backend, SPANS, heads, mask=mask)
    torch.set_num_threads(1)
    for index, (rows, same) in enumerate(zip(together, with_threads, strict=True)):
        (alone,) = attend(ops, backend, SPANS, heads, mask=mask, only=index)
        assert torch.equal(rows, alone)
        assert torch.equal(rows, same)


@torch.no_grad()
def test_drafts_beyond_the_limit_leave_earlier_rows_as_they_are(ops: CompiledOps):
    spans = [(30, 8), (5, 8)]
    backend = CompiledBackend(ops.calls)
    for mask in (FULL, LayerMask(window=6)):
        whole = attend(ops, backend, spans, CASES[0][0], mask=mask)
        cut = attend(ops, backend, spans, CASES[0][0], mask=mask, limit=34)
        assert torch.equal(whole[0][:4], cut[0][:4])
        assert torch.equal(whole[1], cut[1])
        assert not cut[0].isnan().any()


@torch.no_grad()
def test_rows_of_norms_and_gates_do_not_depend_on_others():
    calls = CpuCalls()
    x = draw(200, 578)
    factors = NormFactors(gain=draw(578, seed=1), floor=0.1)
    whole = calls.norm(x, factors)
    gated = calls.gate(x, gelu=False)
    torch.set_num_threads(2)
    assert torch.equal(calls.norm(x, factors), whole)
    assert torch.equal(calls.gate(x, gelu=False), gated)
    torch.set_num_threads(1)
    assert torch.equal(calls.norm(x[7:8], factors), whole[7:8])
    assert torch.equal(calls.gate(x[7:8], gelu=False), gated[7:8])
