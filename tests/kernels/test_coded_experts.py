"""Kernels of experts in codes: each value is that of plain torch, and so are the experts' sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_expert_kernels import NEEDS_GPU, PAIRS, SORTED, Problem
from torch import Tensor

from strobe.kernels.coded import CodedExperts
from strobe.kernels.experts import Projection, grouped, route
from strobe.kernels.experts_table import ExpertsConfig, Tile
from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.linear import Linear, LinearView
from strobe.models.ops.torch_ops import ExpertsLayer, TorchOps
from strobe.models.ops.triton_ops import TritonOps
from strobe.models.quantization.grouped import GridWeight, GroupWeight
from strobe.models.quantization.held_experts import HeldExperts
from strobe.models.quantization.kernel_weights import codes_of

KINDS = (
    "int4", "int4 with zeros", "int4 in groups of 128", "int4 by rows", "int4 in groups of 24",
    "int8 with zeros", "int8 by rows", "NVFP4", "NVFP4 with divisors",
)  # fmt: skip
TILE = Tile(block_n=32, block_k=64, warps=4, stages=2)


def stack(kind: str, shape: tuple[int, int, int], noise: torch.Generator) -> Any:
    """Return weights [E * N, K]."""
    count, n, k = shape
    rows = count * n
    if kind == "int8 by rows":
        values = torch.randint(-127, 128, (rows, k), generator=noise, dtype=torch.int8)
        return GridWeight(values, scale=torch.rand(rows, 1, generator=noise) / 99, block=(1, k))
    bits = 8 if "int8" in kind else 4
    group = 16 if "NVFP4" in kind else 32
    if "groups" in kind:
        group = int(kind.split()[-1])
    if "by rows" in kind:
        group = k
    groups = -(-k // group)
    codes = torch.randint(0, 256, (rows, k * bits // 8), generator=noise, dtype=torch.uint8)
    scale = torch.rand(rows, groups, generator=noise).bfloat16() / 50
    weight = GroupWeight(codes=codes, scale=scale, bits=bits, group=group, inputs=k)
    if "zeros" in kind:
        zero = torch.randint(0, 2**bits, scale.shape, generator=noise, dtype=torch.uint8)
        return replace(weight, zero=zero)
    if "NVFP4" not in kind:
        return weight
    return replace(
        weight,
        scale=torch.rand(rows, groups, generator=noise).to(torch.float8_e4m3fn),
        is_float=True,
        global_scale=torch.rand(2 * count, generator=noise) + (9.0 if "div" in kind else 0.05),
        is_divisor="divisors" in kind,
    )


def moved(weight: Any, device: torch.device) -> Any:
    tensors = {name: v.to(device) for name, v in vars(weight).items() if isinstance(v, Tensor)}
    return replace(weight, **tensors)


def coded(weight: Any, count: int) -> CodedExperts:
    codes = codes_of(weight)
    assert codes is not None
    return CodedExperts(codes, count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [pytest.param(96), pytest.param(192, marks=NEEDS_GPU)])
def test_values_are_those_of_plain_torch(device: torch.device, kind: str, k: int):
    """Rows with one 1 make the product a column of the weight, without rounding."""
    count, n = 3, 48
    weight = moved(stack(kind, (count, n, k), torch.Generator().manual_seed(k)), device)
    x = torch.eye(k, device=device)
    logits = torch.full((k, count), -9.0, device=device)
    chosen = torch.arange(k, device=device) % count
    logits[torch.arange(k, device=device), chosen] = 9.0
    routed = route(logits, Routing(1), None, 16, by_pair=True)
    y = grouped(x, Projection(coded(weight, count)), routed, tile=TILE, block_m=16, activation=None)
    expected = weight.rows(0, count * n).view(count, n, k)[chosen, :, torch.arange(k)]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_some_experts_are_dequantized_exactly(device: torch.device, kind: str, dtype: torch.dtype):
    count, n, k = 4, 48, 96
    weight = moved(stack(kind, (count, n, k), torch.Generator().manual_seed(3)), device)
    values = coded(weight, count).dense_experts(1, 3, dtype)
    expected = weight.rows(n, 3 * n).view(2, n, k).to(dtype)
    torch.testing.assert_close(values, expected, rtol=0, atol=0)


def problem(
    kind: str,
    rows: int,
    device: torch.device,
    *,
    count: int = 5,
    hidden: int = 96,
    inner: int = 48,
    dtype: torch.dtype = torch.float32,
) -> tuple[Problem, ExpertsLayer]:
    """Return inputs and weights for kernels, and a layer of dense weights."""
    noise = torch.Generator().manual_seed(rows)
    projections = list[Projection]()
    dense = list[LinearView]()
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        weight = moved(stack(kind, (count, n, k), noise), device)
        bias = torch.randn(count, n, generator=noise).to(device, dtype)
        projections.append(Projection(coded(weight, count), bias))
        values = weight.rows(0, count * n).view(count, n, k).to(dtype)
        dense.append(LinearView(values, bias))
    x, extra = torch.randn(2, rows, hidden, generator=noise).to(device, dtype)
    logits = torch.randn(rows, count, generator=noise).to(device, dtype)
    layer = ExpertsLayer(Routing(2), dense[0], dense[1], Gate("silu"))
    return Problem(x, logits, projections[0], projections[1], extra), layer


def twin(values: Problem, layer: ExpertsLayer) -> Tensor:
    rows: Any = None
    return TorchOps().experts(values.x, values.logits, layer, values.extra, rows)


@pytest.mark.parametrize("kind", ["int4 with zeros", "int8 by rows", "NVFP4 with divisors"])
@pytest.mark.parametrize("config", [PAIRS, SORTED], ids=["pairs", "sorted"])
def test_experts_match_dense_ones(device: torch.device, kind: str, config: ExpertsConfig):
    values, dense = problem(kind, 7, device)
    actual = values.run(dense.routing, dense.gate, config=config)
    torch.testing.assert_close(actual, twin(values, dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gate", [Gate("clamped", 7.0), Gate("gelu_tanh")], ids=str)
def test_activations_follow_codes(device: torch.device, gate: Gate):
    values, dense = problem("int4 with zeros", 5, device)
    dense = dense._replace(gate=gate)
    actual = values.run(dense.routing, gate, config=SORTED)
    torch.testing.assert_close(actual, twin(values, dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "NVFP4"])
def test_row_has_the_same_bits_in_any_batch(device: torch.device, kind: str):
    values, layer = problem(kind, 21, device)
    options = {"config": ExpertsConfig(block_m=16, gate_up=TILE, down=TILE)}
    expected = values.run(layer.routing, layer.gate, **options)
    rows = slice(4, 20)
    part = replace(values, x=values.x[rows], logits=values.logits[rows], extra=values.extra[rows])
    assert torch.equal(part.run(layer.routing, layer.gate, **options), expected[rows])


@pytest.mark.parametrize(("rows", "at_once"), [(7, 64), (90, 64), (7, 2048)])
def test_operations_take_held_experts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, at_once: int
):
    """By kernels, and for many rows by torch's products with values that a kernel makes."""
    monkeypatch.setattr("strobe.kernels.experts.MAX_ROWS", at_once)
    values, dense = problem("NVFP4", rows, device)
    noise = torch.Generator().manual_seed(rows)
    linears = list[Linear]()
    for projection in (values.gate_up, values.down):
        count, n, k = projection.weight.shape
        linear = Linear(k, n, bias=True, experts=count)
        linear.bias = torch.nn.Parameter(projection.bias)
        linear.held_experts = HeldExperts((count, n, k), 0)
        linear.held_experts.stack = moved(stack("NVFP4", (count, n, k), noise), device)
        linear.weight = torch.nn.Parameter(torch.empty(count, 0, 0))
        linears.append(linear)
        torch.randn(count, n, generator=noise)  # the bias
    layer = dense._replace(gate_up=linears[0], down=linears[1])
    spans: Any = SimpleNamespace(paged=None)
    ops = TritonOps(device, torch.float32)
    actual = ops.experts(values.x, values.logits, layer, values.extra, spans)
    torch.testing.assert_close(actual, twin(values, dense), atol=1e-4, rtol=1e-4)


WIDE: dict[str, Any] = {"count": 32, "hidden": 768, "inner": 384, "dtype": torch.bfloat16}


@NEEDS_GPU
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "24" not in kind])
@pytest.mark.parametrize("rows", [1, 4, 16, 100, 512, 1500])
def test_experts_match_dense_ones_in_bf16(device: torch.device, kind: str, rows: int):
    values, dense = problem(kind, rows, device, **WIDE)
    actual = values.run(dense.routing, dense.gate)
    expected = twin(values, dense)
    assert torch.equal(actual, values.run(dense.routing, dense.gate))
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01
