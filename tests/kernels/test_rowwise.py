"""Row-wise kernels against their torch twins and the models' own operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.kernels import reference_rowwise as twin
from strobe.kernels import rowwise
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.modules import RotaryTable, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn
EPS = 1e-6

# Kernel and twin add in different orders and round once, so a value halfway between two neighbours
# may round to either one: a bound of one unit in the last place, relative to the value.
# Measured in the interpreter: fp32 4.9e-7, bf16 5.9e-3, fp16 7.1e-4, fp8 0.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10, FP8: 2**-3}
# The share of values that may differ at all in lower precisions (measured 0.0007).
SHARE = 0.01


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    step, differ = STEP[got.dtype], (got != want).float().mean().item()
    floor = 2**-9 if got.dtype == FP8 else 1e-6
    torch.testing.assert_close(got.float(), want.float(), rtol=step, atol=floor)
    assert got.dtype == torch.float32 or differ <= SHARE


@pytest.fixture
def draw(device: torch.device):
    """Return a function that draws normal values with a row stride larger than the width."""
    generator = torch.Generator().manual_seed(0)

    def values(rows: int, width: int, dtype: torch.dtype, spare: int = 16) -> Tensor:
        wide = torch.randn(rows, width + spare, generator=generator) * 2
        return wide.to(device, dtype)[:, :width]

    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 1000), (3, 4096)])
def test_norms(draw, device, dtype, rows, size) -> None:
    x, weight = draw(rows, size, dtype), draw(1, size, dtype)[0]
    close(rowwise.rms_norm(x, weight, EPS), twin.rms_norm(x, weight, EPS))
    close(rowwise.rms_norm(x, weight, EPS), F.rms_norm(x, (size,), weight, EPS))


def test_norm_of_zeros_is_zero(device) -> None:
    x = torch.zeros(2, 128, device=device)
    assert torch.equal(rowwise.rms_norm(x, torch.ones(128, device=device), EPS), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (3, 1024), (2, 5000)])
@pytest.mark.parametrize("few", [0, 512])
def test_silu_mul(draw, monkeypatch, dtype, rows, size, few) -> None:
    monkeypatch.setattr(rowwise, "FEW_ROWS", few)
    x = draw(rows, 2 * size, dtype)
    for gelu in (False, True):
        close(rowwise.silu_mul(x, gelu=gelu), twin.silu_mul(x, gelu=gelu))


@pytest.mark.filterwarnings("ignore:overflow")
def test_silu_mul_of_extreme_gates(device) -> None:
    """Gates whose exponentials overflow or underflow give 0 or the gate itself."""
    gate = torch.tensor([[-1000.0, 1000.0, 0.0, -88.8]], device=device)
    out = rowwise.silu_mul(torch.cat([gate, torch.full_like(gate, 2.0)], 1))
    close(out, F.silu(gate) * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (4, 1000), (2, 4096)])
def test_quantize_rows(draw, dtype, rows, size) -> None:
    x = draw(rows, size, dtype)
    x[0, 0] = 60.0
    got, scale = rowwise.quantize_rows(x)
    # Computed on a CPU, where the division by 448 is rounded once; torch's on a GPU is not.
    want, want_scale = twin.quantize_rows(x.cpu())
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(got.float().cpu(), want.float())
    assert got.float().abs().amax(-1).tolist() == [448.0] * rows
    # Half a step of a 3-bit mantissa, or of the subnormals below 2^-6.
    error = (got.float() * scale[:, None] - x.float()).abs()
    assert (error <= x.float().abs() * 2**-4 + scale[:, None] * 2**-10 * 1.01).all()


def test_quantize_rows_of_zeros_and_extremes(device) -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    x[1, 3], x[2, 5] = 1e-38, -3e38
    got, scale = rowwise.quantize_rows(x)
    assert scale[0] == 1
    assert (got[0].float() == 0).all()
    assert got.float().isfinite().all()
    assert scale.isfinite().all()
    assert got[2, 5].float() == -448


# --- rotary embedding and the store -------------------------------------------------------------


def tables(form: str, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = RotaryTable(width, RopeConfig(1e4), 300)
    cos, sin = table.cos.to(device), table.sin.to(device)
    if form == "half":
        return cos[:, : width // 2].contiguous(), sin[:, width // 2 :].contiguous()
    return (cos.bfloat16(), sin.bfloat16()) if form == "bfloat16" else (cos, sin)


SHAPES = [
    # rows, Hq, Hkv, D, dtype, kv dtype, norms, table
    (3, 4, 2, 64, torch.float32, torch.float32, "qk", "full"),
    (3, 8, 2, 128, torch.bfloat16, torch.bfloat16, "qk", "half"),
    (2, 3, 1, 256, torch.float16, torch.float16, "qk", "full"),
    (2, 5, 1, 64, torch.bfloat16, FP8, "qk", "bfloat16"),
    (2, 4, 4, 64, torch.float32, torch.float32, "", "half"),
    (2, 4, 2, 64, torch.float32, torch.bfloat16, "q", "full"),
    (2, 4, 2, 64, torch.float32, FP8, "k", "full"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("few", [0, 512])
def test_qk_norm_rope_store(draw, device, monkeypatch, shape, few) -> None:
    monkeypatch.setattr(rowwise, "FEW_ROWS", few)
    rows, q_heads, kv_heads, width, dtype, kv_dtype, norms, form = shape
    qkv = draw(rows, (q_heads + 2 * kv_heads) * width, dtype)
    q_weight = draw(1, width, dtype)[0] if "q" in norms else None
    k_weight = draw(1, width, dtype)[0] if "k" in norms else None
    cos, sin = tables(form, width, device)
    positions = torch.arange(rows, device=device) * 7 % 300
    slots = torch.arange(rows, device=device) * 2 + 1
    kv = torch.zeros(2 * rows + 3, 2, kv_heads, width, device=device).to(kv_dtype)
    other = kv.clone()
    before = qkv.clone()

    def arguments(qkv: Tensor, kv: Tensor):
        return qkv, q_weight, k_weight, EPS, cos, sin, positions, slots, kv, q_heads, kv_heads

    want = twin.qk_norm_rope_store(*arguments(before.clone(), other))
    q = rowwise.qk_norm_rope_store(*arguments(qkv, kv))
    close(q, want)
    close(kv[slots].float().to(kv_dtype), other[slots].float().to(kv_dtype))
    assert q.data_ptr() == qkv.data_ptr()
    assert torch.equal(qkv[:, q_heads * width :], before[:, q_heads * width :])
    untouched = torch.ones(kv.shape[0], dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert (kv.float()[untouched.to(device)] == 0).all()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float32, FP8), (torch.bfloat16,) * 2])
def test_normed_values_and_values_equal_to_keys(
    draw, device, own: bool, normed: bool, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Rows are slices of wider rows, and norm weights have another dtype than the rows."""
    rows, q_heads, kv_heads, width = 3, 3, 2, 64
    wide = draw(rows, (1 + q_heads + (1 + own) * kv_heads) * width, dtype, spare=0)
    weights = draw(2, width, torch.float32)
    cos, sin = tables("full", width, device)
    positions, slots = torch.tensor([3, 9, 4], device=device), torch.arange(rows, device=device)
    results: list[tuple[Tensor, Tensor]] = []
    for kernels in (twin, rowwise):
        own_rows = wide.clone()
        kv = torch.zeros(rows, 2, kv_heads, width, device=device).to(kv_dtype)
        q = kernels.qk_norm_rope_store(
            own_rows[:, width:], *weights, EPS, cos, sin, positions, slots, kv, q_heads, kv_heads,
            own_values=own, value_norm=normed,
        )  # fmt: skip
        assert torch.equal(own_rows[:, :width], wide[:, :width])
        results.append((q, kv.float().to(kv_dtype)))
    for got, want in zip(*results, strict=True):
        close(got, want)


def test_keys_and_values_are_divided_by_their_scales(draw, device) -> None:
    """And queries multiplied by the keys'."""
    rows, q_heads, kv_heads, width = 3, 3, 2, 64
    wide = draw(rows, (q_heads + 2 * kv_heads) * width, torch.float32, spare=0)
    weights = draw(2, width, torch.float32)
    cos, sin = tables("full", width, device)
    positions, slots = torch.tensor([3, 9, 4], device=device), torch.arange(rows, device=device)
    results: list[tuple[Tensor, Tensor]] = []
    for kernels in (twin, rowwise):
        kv = torch.zeros(rows, 2, kv_heads, width, device=device).to(FP8)
        q = kernels.qk_norm_rope_store(
            wide.clone(), *weights, EPS, cos, sin, positions, slots, kv, q_heads, kv_heads,
            k_scale=0.03, v_scale=0.2,
        )  # fmt: skip
        results.append((q, kv.float().to(FP8)))
    for got, want in zip(*results, strict=True):
        close(got, want)
    values = wide.unflatten(1, (-1, width))[:, -kv_heads:] / 0.2
    close(results[1][1][:, 1], values.clamp(-448, 448).to(FP8))


def test_queries_and_keys_match_model_operations(draw, device) -> None:
    """In fp32 (measured 2.6e-7 of 1 + |x|)."""
    rows, q_heads, kv_heads, width = 4, 4, 2, 64
    qkv = draw(rows, (q_heads + 2 * kv_heads) * width, torch.float32, spare=0)
    weights = draw(2, width, torch.float32)
    table = RotaryTable(width, RopeConfig(1e4), 300).to(device)
    positions = torch.tensor([0, 5, 299, 7], device=device)
    heads = qkv.view(rows, -1, width)
    scale = torch.cat([weights[0].expand(q_heads, -1), weights[1].expand(kv_heads, -1)])
    normed = F.rms_norm(heads[:, : q_heads + kv_heads], (width,), None, EPS) * scale
    rotated = rotate(normed, table(positions))
    kv = torch.zeros(rows, 2, kv_heads, width, device=device)
    slots = torch.arange(rows, device=device)
    values = heads[:, q_heads + kv_heads :].clone()
    q = rowwise.qk_norm_rope_store(
        qkv, weights[0], weights[1], EPS, table.cos, table.sin, positions, slots, kv, q_heads,
        kv_heads,
    )  # fmt: skip
    torch.testing.assert_close(q, rotated[:, :q_heads], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(kv[:, 0], rotated[:, q_heads:], rtol=2e-6, atol=2e-6)
    assert torch.equal(kv[:, 1], values)


def test_fp8_store_saturates(device) -> None:
    qkv = torch.tensor([1000.0, -1000.0, 448.0, 3.0], device=device).repeat_interleave(48)[None]
    kv = torch.zeros(1, 2, 1, 64, device=device).to(FP8)
    cos, sin = torch.ones(1, 64, device=device), torch.zeros(1, 64, device=device)
    zero = torch.tensor([0], device=device)
    rowwise.qk_norm_rope_store(qkv, None, None, EPS, cos, sin, zero, zero, kv, 1, 1)
    assert kv.float()[0, 0, 0].tolist() == [-448.0] * 32 + [448.0] * 32
    assert kv.float()[0, 1, 0].tolist() == [448.0] * 16 + [3.0] * 48


def test_rows_sharing_a_slot(draw, device) -> None:
    """Padding is stored in slots of page 0, where any row may win; other rows are unaffected."""
    qkv = draw(6, 4 * 64, torch.float32)
    cos, sin = tables("full", 64, device)
    positions = torch.tensor([3, 4, 0, 0, 0, 0], device=device)
    slots = torch.tensor([20, 21, 0, 0, 0, 0], device=device)
    kv = torch.zeros(32, 2, 1, 64, device=device)
    other = kv.clone()
    twin.qk_norm_rope_store(qkv.clone(), None, None, EPS, cos, sin, positions, slots, other, 2, 1)
    rowwise.qk_norm_rope_store(qkv, None, None, EPS, cos, sin, positions, slots, kv, 2, 1)
    close(kv[16:], other[16:])
    assert kv.isfinite().all()


@pytest.mark.parametrize(
    ("rows", "layers", "kv_heads", "width", "dtype", "kv_dtype", "norm"),
    [
        (3, 3, 2, 64, torch.float32, torch.float32, True),
        (2, 2, 8, 128, torch.bfloat16, torch.bfloat16, True),
        (2, 2, 1, 256, torch.bfloat16, FP8, True),
        (2, 1, 3, 64, torch.float16, torch.float16, False),
    ],
)
@pytest.mark.parametrize("few", [0, 512])
def test_context_store(
    draw, device, monkeypatch, rows, layers, kv_heads, width, dtype, kv_dtype, norm, few
) -> None:
    monkeypatch.setattr(rowwise, "FEW_ROWS", few)
    kv_rows = draw(rows, layers * 2 * kv_heads * width, dtype)
    weight = draw(layers, width, dtype, spare=0) if norm else None
    cos, sin = tables("full", width, device)
    positions = torch.arange(rows, device=device) * 11 % 300
    slots = torch.arange(rows, device=device).flip(0) * 2
    data = torch.zeros(layers, 2 * rows, 2, kv_heads, width, device=device).to(kv_dtype)
    other = data.clone()
    twin.context_store(kv_rows, weight, EPS, cos, sin, positions, slots, other)
    rowwise.context_store(kv_rows, weight, EPS, cos, sin, positions, slots, data)
    close(data.float().to(kv_dtype), other.float().to(kv_dtype))


def test_no_rows(device) -> None:
    x = torch.zeros(0, 128, device=device)
    assert rowwise.rms_norm(x, torch.ones(128, device=device), EPS).shape == (0, 128)
    assert rowwise.silu_mul(x).shape == (0, 64)
    assert rowwise.quantize_rows(x)[1].shape == (0,)
