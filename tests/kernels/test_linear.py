"""GEMMs with few rows against their torch twins, in all combinations of fused operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strobe.kernels import gemm_table as tables
from strobe.kernels import reference_linear as reference
from strobe.kernels.gemm_table import Gemm, GemmConfig, GemmTable, Weight, bucket_of, guess, record
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import PLAIN, Epilogue, Input, RowNorm
from strobe.sampling.sampler import best_two

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn

# Bounds on `error`, measured in the interpreter, where sums differ from the twin's in order only.
# The kernel rounds x before dividing it by its root mean square, the twin after it; and it does not
# round gate and up before multiplying them.
BOUNDS = {torch.float32: 5e-6, torch.float16: 2e-3, BF16: 1.5e-2}  # measured 8e-7, 4e-4, 0.006
BOUND_NORM = 4e-2  # 0.016
BOUND_FP8 = {True: 6e-2, False: 0.2}  # x quantized by groups, as in the twin (0.029); rows (0.086)

GATED = Epilogue(activation="silu")


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device


@dataclass
class Fixed:
    """A table with one entry."""

    config: GemmConfig

    def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
        return self.config


def draw(seed: int, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def make(n: int, k: int, dtype: torch.dtype, device: torch.device, fp8: bool = False) -> Weight:
    data = draw(1, n, k, dtype=torch.float32, device=device) / k**0.5
    if not fp8:
        return Weight(data.to(dtype))
    scale = data.abs().amax(1) / 448
    return Weight((data / scale[:, None]).to(FP8), scale)


def integers(seed: int, *shape: int, device: torch.device) -> Tensor:
    """Draw small integers, whose fp32 sums are exact in any order and often equal."""
    return draw(seed, *shape, dtype=torch.float32, device=device).round().clamp(-2, 2).to(BF16)


def error(got: Tensor, want: Tensor) -> float:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    wide = want.double()
    scale = wide.abs() + wide.pow(2).mean().sqrt()
    return float(((got.double() - wide).abs() / scale).max())


def gemms(device: torch.device, dtype: torch.dtype, **fields: object) -> Gemms:
    config = GemmConfig(**{"block_n": 64, "block_k": 32, "stages": 2, **fields})  # type: ignore[arg-type]
    return Gemms(device, dtype, table=Fixed(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize(
    "rows",
    [
        1,
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(16, marks=pytest.mark.full),
        17,
        pytest.param(100, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("split", [1, 3])
def test_any_number_of_rows(
    device: torch.device, dtype: torch.dtype, rows: int, split: int
) -> None:
    """N and K are no multiples of the blocks; the ranges of K have 1, 1 and 2 blocks."""
    x = draw(0, rows, 112, dtype=dtype, device=device)
    weight = make(72, 112, dtype, device)
    got = gemms(device, dtype, split_k=split).linear(Input(x), weight)
    assert error(got, reference.linear(Input(x), weight)) < BOUNDS[dtype]


@pytest.mark.parametrize(
    ("n", "k", "split"),
    [pytest.param(64, 96, 1, marks=pytest.mark.full), (72, 136, 1), (72, 136, 3)],
)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_fusions(
    device: torch.device, n: int, k: int, split: int, norm: bool, gated: bool, residual: bool
) -> None:
    x = draw(0, 5, k, dtype=BF16, device=device) * 3
    weight = make(2 * n if gated else n, k, BF16, device)
    rows = Input(x, RowNorm(draw(2, k, dtype=BF16, device=device), 1e-6) if norm else None)
    epilogue = Epilogue(
        activation="silu" if gated else None,
        residual=draw(3, 5, n, dtype=BF16, device=device) if residual else None,
    )
    got = gemms(device, BF16, split_k=split).linear(rows, weight, epilogue)
    bound = BOUND_NORM if norm else BOUNDS[BF16]
    assert error(got, reference.linear(rows, weight, epilogue)) < bound


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("case", ["plain", "residual", "gated", "cublas"])
def test_bias_is_added_before_the_activation(
    device: torch.device, fp8: bool, gelu: bool, case: str
) -> None:
    x = draw(0, 5, 136, dtype=BF16, device=device)
    weight = make(144, 136, BF16, device, fp8)
    epilogue = Epilogue(bias=draw(4, 144, dtype=BF16, device=device) * 3)
    if gelu or case == "gated":
        epilogue = epilogue._replace(activation="gelu_tanh" if gelu else "silu")
    elif case == "residual":
        epilogue = epilogue._replace(residual=draw(3, 5, 144, dtype=BF16, device=device))
    config = {"kernel": "cublas"} if case == "cublas" else {"split_k": 2, "block_k": 128}
    got = gemms(device, BF16, **config).linear(Input(x), weight, epilogue)
    want = reference.linear(Input(x), weight, epilogue)
    assert error(got, want) < (BOUND_FP8[case != "cublas"] if fp8 else BOUNDS[BF16])


def test_add_with_bias_prepares_the_next_norm(device: torch.device) -> None:
    x, residual = (draw(i, 5, 96, dtype=torch.float32, device=device) for i in (0, 3))
    weight = make(96, 96, torch.float32, device)
    bias, gain = (draw(i, 96, dtype=torch.float32, device=device) for i in (4, 5))
    epilogue = Epilogue(bias=bias, residual=residual, next_norm=gain)
    want = reference.linear(Input(x), weight, epilogue)
    for config in ({}, {"kernel": "cublas"}):
        fused = gemms(device, torch.float32, **config)
        got, scaled = fused.add(Input(x), weight, epilogue)
        assert error(got, want) < BOUNDS[torch.float32]
        assert (scaled is None) is bool(config)
        norm = RowNorm(gain, 1e-6)
        next_got = fused.linear(Input(got, norm, scaled), weight)
        next_want = reference.linear(Input(want, norm), weight)
        assert error(next_got, next_want) < BOUNDS[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fusions_in_half_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    x = draw(0, 5, 96, dtype=dtype, device=device)
    weight = make(128, 96, dtype, device)
    rows = Input(x, RowNorm(draw(2, 96, dtype=dtype, device=device), 1e-6))
    got = gemms(device, dtype, split_k=2).linear(rows, weight, GATED)
    assert error(got, reference.linear(rows, weight, GATED)) < BOUNDS[dtype]


def test_norm_of_large_float16_rows_does_not_overflow(device: torch.device) -> None:
    """x times the norm's weight would overflow fp16."""
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
    weight = make(32, 64, torch.float16, device)
    norm = RowNorm(torch.full((64,), 4.0, dtype=torch.float16, device=device), 1e-6)
    got = gemms(device, torch.float16).linear(Input(x, norm), weight)
    assert error(got, reference.linear(Input(x, norm), weight)) < BOUNDS[torch.float16]


def test_norm_fused_or_separate_is_equal(device: torch.device) -> None:
    x = draw(0, 4, 96, dtype=BF16, device=device)
    weight = make(32, 96, BF16, device)
    norm = RowNorm(draw(2, 96, dtype=BF16, device=device), 1e-6)
    want = reference.linear(Input(x, norm), weight)
    for fused in (False, True):
        got = gemms(device, BF16, fused_norm=fused).linear(Input(x, norm), weight)
        assert error(got, want) < BOUND_NORM


def test_linear_writes_into_the_residual(device: torch.device) -> None:
    """Rows of x, of the residual and of the result may be slices of wider rows."""
    x = draw(0, 3, 128, dtype=BF16, device=device)[:, 32:]
    wide = draw(3, 3, 80, dtype=BF16, device=device)
    before, residual = wide.clone(), wide[:, 16:]
    weight = make(64, 96, BF16, device)
    epilogue = Epilogue(residual=residual)
    want = reference.linear(Input(x), weight, epilogue)
    in_place = epilogue._replace(out=residual)
    got = gemms(device, BF16, split_k=3).linear(Input(x), weight, in_place)
    assert got is residual
    assert error(residual, want) < BOUNDS[BF16]
    assert torch.equal(wide[:, :16], before[:, :16])


def test_gemms_reset_the_workspace(device: torch.device) -> None:
    """GEMMs of different shapes share one set of counters."""
    fused = gemms(device, BF16, split_k=3)
    weights = [Weight(integers(n, n, 96, device=device)) for n in (160, 64)]
    for rows in (2, 17):
        x = Input(integers(rows, rows, 96, device=device))
        for weight in weights:
            first = fused.linear(x, weight)
            assert torch.equal(first, reference.linear(x, weight))
            assert torch.equal(fused.head_argmax(x, weight), reference.head_argmax(x, weight))
            assert torch.equal(fused.linear(x, weight), first)
    assert not fused.workspace.arrived.any()
    assert bool((fused.workspace.best == -(2**63)).all())


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_row_is_independent_of_other_rows(device: torch.device, split: int, fp8: bool) -> None:
    x = draw(0, 16, 384, dtype=BF16, device=device)
    weight = make(64, 384, BF16, device, fp8)
    norm = RowNorm(draw(2, 384, dtype=BF16, device=device), 1e-6)
    fused = gemms(device, BF16, split_k=split, block_k=128)
    together = fused.linear(Input(x, norm), weight, GATED)
    for row in (0, 7, 15):
        alone = fused.linear(Input(x[row : row + 1], norm), weight, GATED)
        assert torch.equal(alone[0], together[row])
    changed = torch.cat([x[:5], 9 * x[5:].flip(0)])
    others = fused.linear(Input(changed, norm), weight, GATED)
    assert torch.equal(others[:5], together[:5])


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("fusion", ["plain", "norm", "gated", "residual", "norm gated residual"])
def test_fp8(device: torch.device, groups: bool, split: int, fusion: str) -> None:
    x = draw(0, 3, 272, dtype=BF16, device=device)
    weight = make(96, 272, BF16, device, fp8=True)
    rows = Input(x)
    if "norm" in fusion:
        rows = Input(x, RowNorm(draw(2, 272, dtype=BF16, device=device), 1e-6))
    epilogue = GATED if "gated" in fusion else PLAIN
    if "residual" in fusion:
        columns = 48 if epilogue.gated else 96
        epilogue = epilogue._replace(residual=draw(3, 3, columns, dtype=BF16, device=device))
    kernel = gemms(device, BF16, block_k=128, split_k=split, groups=groups)
    got = kernel.linear(rows, weight, epilogue)
    assert error(got, reference.linear(rows, weight, epilogue)) < BOUND_FP8[groups]


def test_fp8_groups_of_zeros_and_extremes(device: torch.device) -> None:
    x = draw(0, 4, 256, dtype=BF16, device=device)
    x[0] = 0
    x[1, :128] = 0
    x[2] *= 1e-20
    x[3] *= 1e20
    weight = make(32, 256, BF16, device, fp8=True)
    got = gemms(device, BF16, block_k=128).linear(Input(x), weight)
    want = reference.linear(Input(x), weight)
    assert torch.equal(got[0], torch.zeros_like(got[0]))
    for row in (1, 3):
        assert error(got[row], want[row]) < BOUND_FP8[True]


@pytest.mark.parametrize("rows", [1, 17])
def test_head_argmax(device: torch.device, rows: int) -> None:
    x, weight = integers(0, rows, 96, device=device), Weight(integers(1, 200, 96, device=device))
    got = gemms(device, BF16).head_argmax(Input(x), weight)
    assert got.dtype == torch.int64
    assert torch.equal(got, reference.head_argmax(Input(x), weight))


@pytest.mark.parametrize("kernel", ["triton", "cublas"])
@pytest.mark.parametrize("rows", [1, 17])
def test_head_argmax_with_margins(device: torch.device, rows: int, kernel: str) -> None:
    x, weight = integers(0, rows, 96, device=device), Weight(integers(1, 200, 96, device=device))
    x[-1] = 0.0  # all logits are equal
    margins = torch.full((rows,), -1.0, device=device)
    config = {"kernel": "cublas"} if kernel == "cublas" else {}
    fused = gemms(device, BF16, **config)
    for _ in range(2):  # the first call resets the workspace
        got = fused.head_argmax(Input(x), weight, margins=margins)
        ids, want_margins = best_two(reference.linear(Input(x), weight))
        assert torch.equal(got, ids)
        assert torch.equal(margins, want_margins)
        assert margins[-1] == 0
        assert rows == 1 or margins.max() > 0
        assert torch.equal(fused.head_argmax(Input(x), weight), ids)


def test_head_argmax_with_norm(device: torch.device) -> None:
    x = draw(0, 4, 96, dtype=BF16, device=device)
    weight = make(200, 96, BF16, device)
    norm = RowNorm(draw(2, 96, dtype=BF16, device=device), 1e-6)
    got = gemms(device, BF16).head_argmax(Input(x, norm), weight)
    # The twin rounds at other places, so the winner here may be second there by one rounding.
    logits = reference.linear(Input(x, norm), weight).float()
    winners = logits.gather(1, got[:, None])[:, 0]
    assert bool((winners >= logits.amax(1) * (1 - 2**-7)).all())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_head_argmax_ties_and_nan(device: torch.device) -> None:
    """The weight's only used column holds the logits."""
    logits = torch.zeros(6, 150)
    logits[0, [40, 41, 140]] = 2.0
    logits[1] = -3.0
    logits[2, 70] = float("inf")
    logits[2, 99] = float("nan")
    logits[3, :] = float("-inf")
    logits[3, 149] = -1e30
    logits[4, :] = -0.0
    logits[4, 80] = 0.0
    # Equal in bf16: the lower id wins.
    logits[5, 30], logits[5, 100] = 1.0, 1.001
    x = torch.eye(6, 32).to(BF16).to(device)
    for row in range(6):  # one at a time: 0 * inf is NaN
        weight = torch.zeros(150, 32)
        weight[:, row] = logits[row]
        head, margins = Weight(weight.to(BF16).to(device)), torch.empty(1, device=device)
        for config in ({}, {"kernel": "cublas"}):
            fused = gemms(device, BF16, **config)
            got = fused.head_argmax(Input(x[row : row + 1]), head, margins=margins)
            ids, want_margin = best_two(logits[row : row + 1].to(BF16))
            assert got.item() == ids == (-1 if row == 2 else int(logits[row].to(BF16).argmax()))
            assert margins.item() == want_margin


def test_logits_tie_after_rounding(device: torch.device) -> None:
    """1 + 2^-9 and 1 are equal in bf16, so the lower id wins although its sum is smaller."""
    x = torch.ones(1, 32, dtype=BF16, device=device)
    weight = torch.zeros(64, 32)
    weight[10, 0] = 1.0
    weight[50, 0], weight[50, 1] = 1.0, 2.0**-9
    head = Weight(weight.to(BF16).to(device))
    assert gemms(device, BF16).head_argmax(Input(x), head).item() == 10


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_cublas_between_row_wise_kernels(
    device: torch.device, fp8: bool, norm: bool, gated: bool, residual: bool
) -> None:
    """By the table, and for more rows than max_rows."""
    x = draw(0, 4, 64, dtype=BF16, device=device)
    weight = make(64, 64, BF16, device, fp8)
    columns = 32 if gated else 64
    rows = Input(x, RowNorm(draw(2, 64, dtype=BF16, device=device), 1e-6) if norm else None)
    epilogue = Epilogue(
        activation="silu" if gated else None,
        residual=draw(3, 4, columns, dtype=BF16, device=device) if residual else None,
    )
    want = reference.linear(rows, weight, epilogue)
    bound = BOUND_FP8[False] if fp8 else BOUND_NORM
    library = gemms(device, BF16, kernel="cublas")
    for gemms_ in (library, Gemms(device, BF16, max_rows=3)):
        assert error(gemms_.linear(rows, weight, epilogue), want) < bound
    out = torch.empty_like(want)
    assert library.linear(rows, weight, epilogue._replace(out=out)) is out
    assert error(out, want) < bound


def test_head_argmax_of_more_than_max_rows(device: torch.device) -> None:
    x, weight = integers(0, 7, 64, device=device), Weight(integers(1, 100, 64, device=device))
    want = reference.head_argmax(Input(x), weight)
    for layers in (Gemms(device, BF16, max_rows=3), gemms(device, BF16, kernel="cublas")):
        assert torch.equal(layers.head_argmax(Input(x), weight), want)


def test_tma_loads(device: torch.device) -> None:
    x = draw(0, 3, 96, dtype=BF16, device=device)
    for gated in (False, True):
        weight = make(144 if gated else 72, 96, BF16, device)
        fused = gemms(device, BF16, tma=True, split_k=2, block_n=64)
        epilogue = GATED if gated else PLAIN
        want = reference.linear(Input(x), weight, epilogue)
        assert error(fused.linear(Input(x), weight, epilogue), want) < BOUNDS[BF16]


@pytest.mark.parametrize("tma", [False, True])
def test_overlapping_launches_in_a_graph(gpu: torch.device, tma: bool) -> None:
    """A chain of GEMMs, each launched before the previous one has ended."""
    down, up = make(1024, 2048, BF16, gpu), make(4096, 1024, BF16, gpu)
    norm = RowNorm(draw(2, 1024, dtype=BF16, device=gpu), 1e-6)
    x = draw(0, 16, 1024, dtype=BF16, device=gpu)

    def chain(fused: Gemms) -> Tensor:
        residual = x
        for _ in range(6):
            wide = fused.linear(Input(residual, norm), up, GATED)
            residual = fused.linear(Input(wide), down, Epilogue(residual=residual))
        return residual

    plain = chain(gemms(gpu, BF16, split_k=4, block_k=64))
    fused = gemms(gpu, BF16, split_k=4, block_k=64, tma=tma, prefetch=256)
    chain(fused)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(fused)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, plain)


def test_workspace_does_not_grow_during_capture(gpu: torch.device) -> None:
    x, weight = integers(0, 2, 96, device=gpu), Weight(integers(1, 128, 96, device=gpu))
    gemms(gpu, BF16).linear(Input(x), weight)
    torch.cuda.synchronize()
    fused = gemms(gpu, BF16, split_k=3)
    graph = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(ValueError, match="run each GEMM once"), graph:
        fused.linear(Input(x), weight)


def test_buckets() -> None:
    assert [bucket_of(rows) for rows in (1, 2, 16, 17, 64, 65, 128)] == [
        1,
        16,
        16,
        32,
        64,
        128,
        128,
    ]


def test_table_holds_measured_entries() -> None:
    gemm = Gemm(6144, 4096, BF16, norm=True)
    config = GemmConfig(block_n=32, split_k=2, prefetch=512)
    data: dict[str, object] = {}
    record(data, "NVIDIA H200", "9.0", gemm, 16, config)
    assert GemmTable(data, "NVIDIA H200", "9.0").choose(gemm, 16) == config
    assert GemmTable(data, "NVIDIA H100", "9.0").choose(gemm, 16) == config
    for table in (GemmTable(data, "NVIDIA B200", "10.0"), GemmTable({})):
        assert table.choose(gemm, 16) == guess(gemm, 16)
    table = GemmTable(data, "NVIDIA H200", "9.0")
    assert table.choose(gemm, 32) == guess(gemm, 32)
    similar, different = replace(gemm, norm=False, residual=True), replace(gemm, gated=True)
    assert table.choose(similar, 16) == config
    assert table.choose(different, 16) == guess(different, 16)


def test_table_round_trips_through_json(tmp_path: Path) -> None:
    tables.save(tables.load(), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == tables.PATH.read_text()
    for entry in tables.load().values():
        for sizes in (s for kind in entry["gemms"].values() for s in kind.values()):
            for buckets in sizes.values():
                for bucket, fields in buckets.items():
                    assert int(bucket) in (*tables.BUCKETS, *tables.LARGE)
                    GemmConfig(**fields)


@pytest.mark.parametrize("bucket", tables.BUCKETS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("fp8", [False, True])
def test_guesses_fit_into_shared_memory(bucket: int, dtype: torch.dtype, fp8: bool) -> None:
    """They also split K into ranges of four or more blocks."""
    for n, k, gated in ((6144, 4096, False), (24576, 4096, True), (1000, 136, False)):
        gemm = Gemm(n, k, dtype, fp8=fp8, gated=gated)
        config = guess(gemm, bucket)
        rows = config.block_n + max(bucket, 16)
        item = 1 if fp8 else dtype.itemsize
        assert config.stages * rows * config.block_k * item <= 227 * 1024
        assert config.split_k == 1 or -(-k // config.block_k) // config.split_k >= 4
