"""Kernels of experts against their torch twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe.kernels import reference_experts as reference
from strobe.kernels.experts import KernelExperts, Projection, experts, route
from strobe.kernels.experts_table import ExpertsConfig, Tile
from strobe.kernels.gemm_table import Weight
from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.linear import LinearView, apply

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = Tile(block_n=32, block_k=32, warps=4, stages=2)
PAIRS = ExpertsConfig(block_m=16, by_pair=True, gate_up=SMALL, down=SMALL)
SORTED = replace(PAIRS, by_pair=False)


@dataclass
class Problem:
    x: Tensor
    logits: Tensor
    gate_up: Projection
    down: Projection
    extra: Tensor

    def run(self, routing: Routing, activation: Gate, **options: Any) -> Tensor:
        layer = KernelExperts(routing, self.gate_up, self.down, activation)
        return experts(self.x, self.logits, layer, self.extra, **options)

    def twin(self, routing: Routing, activation: Gate) -> Tensor:
        weights, ids = reference.route(self.logits, routing)
        layers = (LinearView(weight.data, bias) for weight, bias in (self.gate_up, self.down))
        complete = routing.held is None
        return reference.experts(
            self.x, weights, ids, *layers, activation, self.extra, complete=complete
        )

    def held(self, first: int, count: int) -> Problem:
        """The same with the weights of some experts only."""
        part = slice(first, first + count)
        layers = [
            Projection(Weight(weight.data[part]), None if bias is None else bias[part])
            for weight, bias in (self.gate_up, self.down)
        ]
        return replace(self, gate_up=layers[0], down=layers[1], extra=torch.zeros_like(self.extra))


def problem(
    rows: int,
    device: torch.device,
    *,
    count: int = 6,
    hidden: int = 40,
    inner: int = 24,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    noise = torch.Generator().manual_seed(rows)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=noise) * scale).to(device, dtype)

    def layer(n: int, k: int) -> Projection:
        weight = Weight(normal(count, n, k, scale=k**-0.5))
        return Projection(weight, normal(count, n) if bias else None)

    x, logits = normal(rows, hidden), normal(rows, count)
    return Problem(x, logits, layer(2 * inner, hidden), layer(hidden, inner), normal(rows, hidden))


@pytest.mark.parametrize("rows", [1, 3, 21])
@pytest.mark.parametrize("config", [PAIRS, SORTED], ids=["pairs", "sorted"])
def test_experts_match_twin(device: torch.device, rows: int, config: ExpertsConfig):
    layer = problem(rows, device)
    routing, activation = Routing(2), Gate("silu")
    actual = layer.run(routing, activation, config=config)
    torch.testing.assert_close(actual, layer.twin(routing, activation), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 21])
@pytest.mark.parametrize("config", [PAIRS, SORTED], ids=["pairs", "sorted"])
def test_all_rows_choose_a_shared_expert(device: torch.device, rows: int, config: ExpertsConfig):
    """Compares with the shared expert's own two linear layers; the last two rows are padding."""
    layer, routing, activation = problem(rows + 2, device), Routing(2, shared=True), Gate("silu")
    sizes = torch.tensor([rows], device=device)
    actual = layer.run(routing, activation, config=config, sizes=sizes)[:rows]
    gate_up, down = (LinearView(weight.data[5]) for weight, _ in (layer.gate_up, layer.down))
    output = apply(down, activation(apply(gate_up, layer.x)))
    extra = layer.extra + output * layer.logits[:, 5:].sigmoid()
    others = replace(layer.held(0, 5), logits=layer.logits[:, :5], extra=extra)
    expected = others.twin(Routing(2), activation)[:rows]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    twin = layer.twin(routing, activation)[:rows]
    torch.testing.assert_close(twin, expected, atol=1e-5, rtol=1e-4)


FAMILIES = pytest.mark.parametrize(
    ("routing", "activation", "bias"),
    [
        (Routing(3, normalized=False), Gate("silu"), False),
        (Routing(2), Gate("clamped", 0.5), True),
        (Routing(2, scale=torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1, 1.5])), Gate("gelu_tanh"), False),
    ],
    ids=["softmax over all", "clamped", "scaled gelu"],
)  # fmt: skip


@FAMILIES
@pytest.mark.parametrize("rows", [5, 90], ids=["kernels", "torch's grouped GEMM"])
def test_families_of_experts_match_twin(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    routing: Routing,
    activation: Gate,
    bias: bool,
    rows: int,
):
    monkeypatch.setattr("strobe.kernels.experts.MAX_ROWS", 64)
    if routing.scale is not None:
        routing = routing._replace(scale=routing.scale.to(device))
    layer = problem(rows, device, bias=bias)
    actual = layer.run(routing, activation, config=SORTED)
    torch.testing.assert_close(actual, layer.twin(routing, activation), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [PAIRS, SORTED, None], ids=["pairs", "sorted", "twin"])
def test_parts_of_the_experts_add_up_to_all(device: torch.device, config: ExpertsConfig | None):
    """Also with experts that no row chose, and rows that chose none of a part's experts."""
    layer, routing, activation = problem(9, device, bias=True), Routing(2), Gate("silu")
    layer.logits[:, 4] = -9.0
    layer.logits[:3, 0] = 9.0
    total = layer.extra.clone()
    for first, count in ((0, 1), (1, 3), (4, 1), (5, 1)):
        part, held = layer.held(first, count), routing._replace(held=(first, count))
        if config is None:
            total += part.twin(held, activation)
        else:
            total += part.run(held, activation, config=config)
    torch.testing.assert_close(total, layer.twin(routing, activation), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [PAIRS, SORTED, None], ids=["pairs", "sorted", "many"])
def test_padding_rows_choose_no_experts(
    device: torch.device, config: ExpertsConfig | None, monkeypatch: pytest.MonkeyPatch
):
    """Their logits are NaN, and they change nothing."""
    if config is None:
        monkeypatch.setattr("strobe.kernels.experts.MAX_ROWS", 4)
    layer, routing, activation = problem(7, device), Routing(2), Gate("silu")
    expected = layer.twin(routing, activation)
    sizes = torch.tensor([3, 2, 0], device=device)
    layer.logits[5:] = torch.nan
    layer.x[5:] = torch.nan
    actual = layer.run(routing, activation, config=config, sizes=sizes)
    torch.testing.assert_close(actual[:5], expected[:5], atol=1e-5, rtol=1e-4)
    assert torch.equal(actual[5:], layer.extra[5:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_prefers_nan_and_the_first_of_equal_logits(
    device: torch.device, dtype: torch.dtype
):
    low, nan = -torch.inf, torch.nan
    rows = [[-0.0, 0.0, 0.0, -2.0], [1.0, nan, 2.0, nan], [low, low, low, low], [-3.0, -1, -2, 0]]
    logits = torch.tensor(rows, device=device, dtype=dtype)
    routed = route(logits, Routing(3), None, 16, by_pair=True)
    assert routed.ids.tolist() == [[0, 1, 2], [1, 3, 2], [0, 1, 2], [3, 1, 2]]
    assert routed.weights[0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("rows", "padding", "experts"), [(5, 2, 5), (5, 1, 40), (21, 2, 5), (32, 0, 40), (70, 2, 5)]
)
@pytest.mark.parametrize("chunk", [4096, 16])
@pytest.mark.parametrize(
    "routing",
    [Routing(3), Routing(2, shared=True), Routing(2, held=(0, 3)), Routing(2, held=(1, 2))],
    ids=["all", "shared", "first", "middle"],
)
def test_sorting_lists_each_pair_once_and_cuts_blocks(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    padding: int,
    experts: int,
    chunk: int,
    routing: Routing,
):
    """Every row chooses expert 1. With 40 experts and 5 rows, pairs are fewer than experts."""
    monkeypatch.setattr("strobe.kernels.routing._CHUNK", chunk)
    noise = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts + routing.shared, generator=noise)
    logits[:, 1] = 9.0
    sizes = torch.tensor([3, rows - 3 - padding], device=device)
    routed = route(logits.to(device), routing, sizes, 16, by_pair=False)
    assert routed.pairs is not None
    assert routed.blocks is not None
    _, ids = reference.route(logits, routing)
    count = routing.held[1] if routing.held else logits.shape[1]
    ids[rows - padding :] = count
    assert torch.equal(routed.ids.cpu(), ids.int())
    chosen = ids.flatten().tolist()
    used = [pair for pair in range(len(chosen)) if chosen[pair] < count]
    expected = sorted(used, key=lambda pair: (chosen[pair], pair))
    assert routed.pairs[: len(used)].tolist() == expected
    blocks = [block for block in routed.blocks.tolist() if block[2]]
    listed = [chosen[pair] for _, first, n in blocks for pair in expected[first : first + n]]
    assert listed == [expert for expert, _, n in blocks for _ in range(n)]
    assert sum(n for _, _, n in blocks) == len(used)
    assert len(blocks) == sum(-(-listed.count(expert) // 16) for expert in range(count))


def test_row_has_the_same_bits_in_any_batch_of_its_bucket(device: torch.device):
    layer, routing, activation = problem(21, device), Routing(2), Gate("silu")
    expected = layer.run(routing, activation, config=SORTED)
    for rows in (slice(0, 9), slice(4, 20)):
        part = Problem(
            layer.x[rows], layer.logits[rows], layer.gate_up, layer.down, layer.extra[rows]
        )
        assert torch.equal(part.run(routing, activation, config=SORTED), expected[rows])


@NEEDS_GPU
def test_row_alone_has_the_bits_it_has_among_sixteen(device: torch.device):
    layer = problem(16, device, count=32, hidden=512, inner=192, dtype=torch.bfloat16)
    routing, gate = Routing(4), Gate("silu")
    expected = layer.run(routing, gate)
    for t in range(16):
        row, layers = slice(t, t + 1), (layer.gate_up, layer.down)
        alone = Problem(layer.x[row], layer.logits[row], *layers, layer.extra[row])
        assert torch.equal(alone.run(routing, gate), expected[row])


@NEEDS_GPU
@pytest.mark.parametrize("rows", [1, 4, 16, 100, 512, 1500])
def test_experts_match_twin_in_bf16(device: torch.device, rows: int):
    sizes: dict[str, Any] = {"count": 32, "hidden": 512, "inner": 192, "dtype": torch.bfloat16}
    layer, routing, activation = problem(rows, device, **sizes), Routing(4), Gate("silu")
    actual, expected = layer.run(routing, activation), layer.twin(routing, activation)
    assert torch.equal(actual, layer.run(routing, activation))
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.01
