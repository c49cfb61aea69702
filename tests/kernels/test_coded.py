"""Products with weights in codes equal those with the weights' values, in every stored form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_expert_kernels import NEEDS_GPU
from torch import Tensor

from strobe.kernels.coded import CodedWeight, coded_gemm, dequantized
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import PLAIN, Epilogue, Input, RowNorm
from strobe.kernels.workspace import Workspace
from strobe.models.linear import StoredWeight
from strobe.models.quantization.grouped import GridWeight, GroupWeight, joined
from strobe.models.quantization.kernel_weights import codes_of
from tests.support.tested_formats import IN_KERNELS

N = 72
K = 288  # words of a step do not divide it


def _noise() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def grouped(inputs: int, bits: int = 4, group: int = 32) -> GroupWeight:
    """Codes with a scale in bfloat16 per group."""
    noise = _noise()
    codes = torch.randint(0, 256, (N, inputs * bits // 8), generator=noise, dtype=torch.uint8)
    scale = torch.rand(N, inputs // group, generator=noise).bfloat16() / 50
    return GroupWeight(codes=codes, scale=scale, bits=bits, group=group, inputs=inputs)


def with_zeros(weight: GroupWeight) -> GroupWeight:
    zero = torch.randint(0, 2**weight.bits, weight.scale.shape, generator=_noise())
    return replace(weight, zero=zero.to(torch.uint8))


def with_float16_scales(weight: GroupWeight) -> GroupWeight:
    return replace(weight, scale=torch.rand(weight.scale.shape, generator=_noise()).half() / 50)


def with_float32_scales(weight: GroupWeight) -> GroupWeight:
    scale = torch.rand(weight.scale.shape, generator=_noise()) / 50
    return replace(weight, scale=scale * torch.tensor([1.0, -1.0]).repeat(scale.shape[1] // 2))


def nvfp4(inputs: int, *, is_divisor: bool) -> GroupWeight:
    scale = torch.rand(N, inputs // 16, generator=_noise()).to(torch.float8_e4m3fn)
    factor = torch.tensor(23.7 if is_divisor else 1 / 23.7)
    weight = replace(grouped(inputs, group=16), scale=scale, is_float=True)
    return replace(weight, global_scale=factor, is_divisor=is_divisor)


def mxfp4(inputs: int) -> GroupWeight:
    exponents = torch.randint(-9, -3, (N, inputs // 32), generator=_noise())
    return replace(grouped(inputs), scale=2.0 ** exponents.float(), is_float=True)


def by_activations(inputs: int) -> GroupWeight:
    index = torch.arange(inputs) % (inputs // 32)
    return replace(with_zeros(grouped(inputs)), index=index)


def grid(
    inputs: int, block: tuple[int, int], *, dtype: torch.dtype = torch.float8_e4m3fn
) -> GridWeight:
    values = torch.randn(N, inputs, generator=_noise()).mul(30).clamp(-120, 120).to(dtype)
    shape = (-(-N // block[0]), -(-inputs // block[1]))
    return GridWeight(values=values, scale=torch.rand(shape, generator=_noise()) / 99, block=block)


WEIGHTS: dict[str, Callable[[int], StoredWeight]] = {
    "int4": grouped,
    "int4 of 128": lambda inputs: grouped(inputs, group=96 if inputs == K else 128),
    "int4 with zeros": lambda inputs: with_zeros(grouped(inputs)),
    "int4 with scales in float16": lambda inputs: with_float16_scales(with_zeros(grouped(inputs))),
    "int4 by activations": by_activations,
    "int8 with zeros": lambda inputs: with_zeros(grouped(inputs, bits=8)),
    "NVFP4": lambda inputs: nvfp4(inputs, is_divisor=False),
    "NVFP4 with a divisor": lambda inputs: nvfp4(inputs, is_divisor=True),
    "MXFP4": mxfp4,
    "FP8 by rows": lambda inputs: grid(inputs, (1, inputs)),
    "FP8 by blocks": lambda inputs: grid(inputs, (64, 128)),
    "FP8 with one scale": lambda inputs: grid(inputs, (N, inputs)),
    "int8 by rows": lambda inputs: grid(inputs, (1, inputs), dtype=torch.int8),
    "Q3_K": lambda inputs: with_float32_scales(grouped(inputs, group=16)),
    "Q6_K": lambda inputs: with_float32_scales(grouped(inputs, bits=8, group=16)),
    "Q8_0": lambda inputs: with_float16_scales(grouped(inputs, bits=8)),
}
GGUF = ("Q3_K", "Q6_K", "Q8_0")
"""Types of GGUF's tensors in forms that no other format has."""


def on(device: torch.device, weight: StoredWeight) -> StoredWeight:
    values = {n: v.to(device) for n, v in vars(weight).items() if isinstance(v, Tensor)}
    return replace(weight, **values)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.fixture(params=[*IN_KERNELS, *GGUF])
def weight(request: pytest.FixtureRequest, device: torch.device) -> StoredWeight:
    return on(device, WEIGHTS[request.param](K))


def codes(*weights: StoredWeight) -> CodedWeight:
    parts = [codes_of(weight) for weight in weights]
    assert None not in parts
    return CodedWeight(tuple(part for part in parts if part is not None))


def product(x: Tensor, weight: CodedWeight, epilogue: Epilogue = PLAIN) -> Tensor:
    return coded_gemm(x, weight, epilogue, Workspace(x.device))


# Triton's interpreter rounds float32 to bfloat16 towards zero.
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_GPU)],
)
def test_values_are_those_of_plain_torch(weight: StoredWeight, dtype: torch.dtype):
    (part,) = codes(weight).parts
    expected = weight.rows(0, N).to(dtype)
    torch.testing.assert_close(dequantized(part, dtype), expected, rtol=0, atol=0)


def test_codes_with_offsets_have_no_kernel():
    weight = grouped(K)
    assert codes_of(weight) is not None
    assert codes_of(replace(weight, offset=weight.scale)) is None


@pytest.mark.parametrize("rows", [1, 5, 129])
def test_products_equal_those_with_the_values(weight: StoredWeight, rows: int):
    device = weight.scales[0].device
    x = torch.randn(rows, K, generator=_noise()).to(device)
    y = product(x, codes(weight, weight))
    expected = torch.cat([x @ weight.rows(0, N).t()] * 2, 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=NEEDS_GPU)])
def test_a_value_is_rounded_once_before_it_is_multiplied(weight: StoredWeight, dtype: torch.dtype):
    device = weight.scales[0].device
    one_each = torch.eye(K, dtype=dtype, device=device)[:40]
    expected = weight.rows(0, N).to(dtype)[:, :40].t()
    torch.testing.assert_close(product(one_each, codes(weight)), expected, rtol=0, atol=0)


@NEEDS_GPU
@pytest.mark.parametrize("rows", [1, 9, 17, 40, 100, 200])
@pytest.mark.parametrize("form", WEIGHTS)
def test_products_over_several_ranges_equal_those_with_the_values(
    form: str, rows: int, device: torch.device
):
    weight = on(device, WEIGHTS[form](4096))
    x = torch.randn(rows, 4096, generator=_noise()).to(device, torch.bfloat16)
    expected = x.float() @ weight.rows(0, N).bfloat16().float().t()
    y = product(x, codes(weight)).float()
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("form", [form for form in WEIGHTS if form != "int4 by activations"])
def test_joined_weights_have_the_values_of_their_parts(form: str, device: torch.device):
    weight = on(device, WEIGHTS[form](K))
    expected = torch.cat([weight.rows(0, N)] * 2)
    whole = joined([weight, weight])
    assert whole is not None
    assert torch.equal(whole.rows(0, 2 * N), expected)
    assert codes_of(whole) is not None
    x = torch.randn(2, K, generator=_noise()).to(device)
    y = product(x, codes(whole))
    torch.testing.assert_close(y, product(x, codes(weight, weight)), rtol=1e-5, atol=1e-5)


def test_parts_with_global_scales_of_their_own_are_joined(device: torch.device):
    parts = [on(device, nvfp4(K, is_divisor=False)) for _ in range(3)]
    parts[0] = replace(parts[0], codes=parts[0].codes[:24], scale=parts[0].scale[:24])
    parts[1] = replace(parts[1], global_scale=torch.tensor(0.3, device=device))
    whole = joined(parts)
    assert whole is not None
    values = torch.cat([part.rows(0, part.shape[0]) for part in parts])
    assert torch.equal(whole.rows(0, len(values)), values)
    y = product(torch.eye(K, device=device)[:40], codes(whole))
    torch.testing.assert_close(y, values[:, :40].t(), rtol=1e-6, atol=0)


def test_blocks_and_single_scales_of_unequal_parts_are_joined():
    whole = grid(K, (8, 32))
    parts = [whole, replace(whole, values=whole.values[:32], scale=whole.scale[:4])]
    one = grid(K, (N, K))
    for members in (parts, [one, replace(one, values=one.values[:16], block=(16, K))]):
        both = joined(members)
        assert both is not None
        values = torch.cat([part.rows(0, part.shape[0]) for part in members])
        assert torch.equal(both.rows(0, len(values)), values)


def test_parts_of_other_forms_are_not_joined():
    weight = grouped(K)
    assert joined([weight, with_zeros(weight)]) is None
    assert joined([weight, with_float16_scales(weight)]) is None
    assert joined([weight, grid(K, (1, K))]) is None
    assert joined([by_activations(K)] * 2) is None


@NEEDS_GPU
@pytest.mark.parametrize("rows", [3, 12, 30, 60, 130])
@pytest.mark.parametrize("form", ["int4", "int4 with zeros", "NVFP4", "FP8 by blocks"])
def test_epilogues_go_around_products_over_several_ranges(
    form: str, rows: int, device: torch.device
):
    weight = on(device, WEIGHTS[form](1024))
    x = torch.randn(rows, 1024, generator=_noise()).to(device, torch.bfloat16)
    bias = torch.randn(N, generator=_noise()).to(device, torch.bfloat16)
    residual = torch.randn(rows, N // 2, generator=_noise()).to(device, torch.bfloat16)
    gate, up = (x.float() @ weight.rows(0, N).t() + bias).chunk(2, 1)
    expected = residual + torch.nn.functional.silu(gate) * up
    epilogue = Epilogue(bias=bias, activation="silu", residual=residual)
    y = product(x, codes(weight), epilogue).float()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device):
    weight = codes(on(device, grouped(K)))
    x = torch.randn(9, K, generator=_noise()).to(device)
    assert torch.equal(product(x, weight)[3:4], product(x[3:4].contiguous(), weight))


def test_norm_bias_gate_and_residual_go_around_the_product(device: torch.device):
    stored = on(device, grouped(K))
    dense = stored.rows(0, N)
    x = torch.randn(3, K, generator=_noise()).to(device)
    gain = torch.rand(K, generator=_noise()).to(device)
    residual = torch.randn(3, N // 2, generator=_noise()).to(device)
    bias = torch.randn(N, generator=_noise()).to(device)
    y = Gemms(device, torch.float32).linear(
        Input(rows=x, norm=RowNorm(gain, 1e-6)),
        codes(stored),
        Epilogue(bias=bias, activation="silu", residual=residual),
    )
    normed = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * gain
    gate, up = (normed @ dense.t() + bias).chunk(2, 1)
    expected = residual + torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
