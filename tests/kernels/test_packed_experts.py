"""Kernels of experts in MXFP4 and FP8 against the same values in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_expert_kernels import NEEDS_GPU, PAIRS, SORTED, Problem
from torch import Tensor

from strobe.kernels.experts import Projection
from strobe.kernels.experts_table import ExpertsConfig, Tile, choose
from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.linear import LinearView
from strobe.models.ops.torch_ops import ExpertsLayer, TorchOps
from strobe.models.quantization.fp8_formats import FP8_ROWS, Fp8Groups
from strobe.models.quantization.kernel_weights import kernel_weight
from strobe.models.quantization.mxfp4 import Mxfp4, fill_scales, fill_values

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CPU = torch.device("cpu")
Made = tuple[LinearView, Tensor]
"""A layer, and its weight [E, N, K] in float32."""


def mxfp4(shape: tuple[int, int, int], noise: torch.Generator) -> Made:
    """As published: value 2 i of a group is in the low bits of its byte i."""
    count, n, k = shape
    blocks = torch.randint(0, 256, (count, n, k // 32, 16), generator=noise, dtype=torch.uint8)
    scales = torch.randint(118, 126, (count, n, k // 32), generator=noise, dtype=torch.uint8)
    table = torch.tensor([*SIZES, *(-size for size in SIZES)])
    codes = torch.stack([blocks % 16, blocks // 16], -1).flatten(-2).int()
    dense = table[codes] * 2.0 ** (scales[..., None].float() - 127)
    values = torch.empty(count, n, -(-k // 64) * 32, dtype=torch.uint8)
    words = torch.empty(count, -(-k // 128), n, dtype=torch.int32)
    fill_values(values, blocks)
    fill_scales(words, scales)
    return LinearView(values, None, words, Mxfp4(k)), dense.flatten(-2)


def fp8_values(shape: tuple[int, int, int], noise: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=noise).mul(9).to(torch.float8_e4m3fn)


def fp8_rows(shape: tuple[int, int, int], noise: torch.Generator) -> Made:
    values, scale = fp8_values(shape, noise), torch.rand(shape[:2], generator=noise) / 30
    view = LinearView(values.view(torch.uint8), None, scale, FP8_ROWS)
    return view, values.float() * scale[..., None]


def fp8_groups(shape: tuple[int, int, int], noise: torch.Generator, group: int = 32) -> Made:
    (count, n, k), values = shape, fp8_values(shape, noise)
    scale = torch.rand(count, -(-k // group), n, generator=noise) / 30
    dense = values.float()
    for i in range(k):
        dense[:, :, i] *= scale[:, i // group]
    return LinearView(values.view(torch.uint8), None, scale, Fp8Groups(group)), dense


TILE = Tile(block_n=32, block_k=128, warps=4, stages=2)

KINDS: dict[str, Callable[..., Made]] = {
    "mxfp4": mxfp4,
    "fp8 rows": fp8_rows,
    "fp8 groups": fp8_groups,
}


def problem(
    kind: str,
    rows: int,
    device: torch.device,
    *,
    count: int = 6,
    hidden: int = 96,
    inner: int = 32,
    dtype: torch.dtype = torch.float32,
) -> tuple[Problem, ExpertsLayer, ExpertsLayer]:
    """Return inputs and packed weights for kernels, and layers of packed and of dense weights."""
    noise = torch.Generator().manual_seed(rows)
    packed, dense = list[LinearView](), list[LinearView]()
    for n, k in ((2 * inner, hidden), (hidden, inner)):
        view, weight = KINDS[kind]((count, n, k), noise)
        bias = torch.randn(count, n, generator=noise).to(device, dtype)
        scale = None if view.scale is None else view.scale.to(device)
        packed.append(view._replace(weight=view.weight.to(device), bias=bias, scale=scale))
        dense.append(LinearView(weight.to(device, dtype), bias))
    x, extra = torch.randn(2, rows, hidden, generator=noise).to(device, dtype)
    logits = torch.randn(rows, count, generator=noise).to(device, dtype)
    first, second = (Projection(kernel_weight(view), view.bias) for view in packed)
    routing, gate = Routing(2), Gate("clamped", 7.0)
    layers = (ExpertsLayer(routing, *linears, gate) for linears in (packed, dense))
    return Problem(x, logits, first, second, extra), *layers


def twin(values: Problem, layer: ExpertsLayer) -> Tensor:
    rows: Any = None
    return TorchOps().experts(values.x, values.logits, layer, values.extra, rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [PAIRS, SORTED], ids=["pairs", "sorted"])
@pytest.mark.parametrize("inner", [32, 160])
def test_packed_experts_match_dense_ones(
    device: torch.device, kind: str, config: ExpertsConfig, inner: int
):
    """Also where a row ends within a group of 64 or 128 values."""
    if kind == "mxfp4":
        config = replace(config, gate_up=TILE, down=TILE)
    values, packed, dense = problem(kind, 7, device, inner=inner)
    expected = twin(values, dense)
    actual = values.run(packed.routing, packed.gate, config=config)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held_at_once", [1, 1 << 26])
def test_twin_dequantizes_some_experts_at_a_time(
    kind: str, held_at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.kernels.reference_experts.GATHERED", held_at_once)
    values, packed, dense = problem(kind, 5, CPU)
    torch.testing.assert_close(twin(values, packed), twin(values, dense))


@pytest.mark.parametrize("kind", KINDS)
def test_row_of_packed_experts_has_the_same_bits_in_any_batch(device: torch.device, kind: str):
    values, layer, _ = problem(kind, 21, device)
    options = {"config": ExpertsConfig(block_m=16, gate_up=TILE, down=TILE)}
    expected = values.run(layer.routing, layer.gate, **options)
    rows, weights = slice(4, 20), (values.gate_up, values.down)
    part = Problem(values.x[rows], values.logits[rows], *weights, values.extra[rows])
    assert torch.equal(part.run(layer.routing, layer.gate, **options), expected[rows])


def test_tables_of_similar_gpus_complement_each_other(monkeypatch: pytest.MonkeyPatch):
    def entry(stages: int, *kinds: str) -> dict[str, Any]:
        config = asdict(ExpertsConfig(down=Tile(stages=stages)))
        return {"capability": "9.0", **{kind: {"8x64x32": {"16": config}} for kind in kinds}}

    table = {"similar": entry(5, "bfloat16", "bfloat16/e2m1"), "own": entry(6, "bfloat16/e2m1")}
    monkeypatch.setattr("strobe.kernels.experts_table.load", lambda: table)
    own = SimpleNamespace(name="own", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: own)
    for packed, stages in (("", 5), ("e2m1", 6)):
        args = 9, (8, 64, 32), torch.bfloat16, torch.device("cuda"), packed
        assert choose.__wrapped__(*args) == ExpertsConfig(down=Tile(stages=stages))


WIDE: dict[str, Any] = {"count": 32, "hidden": 704, "inner": 352, "dtype": torch.bfloat16}


@NEEDS_GPU
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 16, 100, 512, 1500])
def test_packed_experts_match_dense_ones_in_bf16(device: torch.device, kind: str, rows: int):
    values, layer, dense = problem(kind, rows, device, **WIDE)
    actual, expected = values.run(layer.routing, layer.gate), twin(values, dense)
    assert torch.equal(actual, values.run(layer.routing, layer.gate))
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01
    error = (twin(values, layer).float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01


@NEEDS_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_row_alone_has_the_bits_of_sixteen_with_packed_experts(device: torch.device, kind: str):
    values, layer, _ = problem(kind, 16, device, **WIDE)
    expected, weights = values.run(layer.routing, layer.gate), (values.gate_up, values.down)
    for t in range(16):
        row = slice(t, t + 1)
        alone = Problem(values.x[row], values.logits[row], *weights, values.extra[row])
        assert torch.equal(alone.run(layer.routing, layer.gate), expected[row])
