"""Grouped GEMMs and routers against plain loops, one row and one expert at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from strobe.kernels import reference_experts
from strobe.kernels.reference_experts import block_rows, blocked_gemm, grouped_gemm
from strobe.models.families.experts import Experts, Router
from strobe.models.linear import Linear
from strobe.models.model_config import ExpertShape
from strobe.models.ops.torch_ops import TorchOps

COUNTS = {
    "even": [3, 3, 3, 3],
    "one expert has all rows": [0, 0, 40, 0],
    "first and last have no rows": [0, 5, 1, 0],
    "one row": [0, 1, 0, 0],
    "every expert its rows, uneven": [17, 1, 64, 30],
}


@pytest.mark.parametrize("gathered", [1, 1 << 20])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_gemm_matches_per_row_gemm(
    counts: list[int], gathered: int, monkeypatch: pytest.MonkeyPatch
):
    """gathered: the limit of weights per GEMM; blocks then run one by one or all at once."""
    monkeypatch.setattr(reference_experts, "GATHERED", gathered)
    noise = torch.Generator().manual_seed(1)
    weights = torch.randn(len(counts), 6, 8, generator=noise)
    x = torch.randn(sum(counts), 8, generator=noise)
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ends = torch.tensor(counts).cumsum(0).int()
    expected = torch.stack([weights[e] @ row for e, row in zip(owner, x, strict=True)])
    for gemm in (blocked_gemm, grouped_gemm):
        torch.testing.assert_close(gemm(x, weights, ends), expected)


def test_block_size_follows_the_rows_per_expert():
    assert [block_rows(n, 8) for n in (1, 8, 15, 16, 40, 10_000)] == [1, 1, 1, 2, 4, 64]


@pytest.mark.parametrize("normalized", [True, False])
def test_router_chooses_most_probable_experts(normalized: bool):
    shape = ExpertShape(6, 2, 4, (True,), normalized=normalized)
    router = Router(5, shape, bias=True)
    noise = torch.Generator().manual_seed(2)
    for parameter in router.parameters():
        parameter.data.normal_(generator=noise)
    x = torch.randn(7, 5, generator=noise)
    weights, chosen = reference_experts.route(router.logits(TorchOps(), x), router.routing)
    probabilities = torch.softmax(F.linear(x, router.weight, router.bias), -1)
    expected, order = probabilities.sort(-1, descending=True)
    expected = expected[:, :2]
    if normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(chosen, order[:, :2])
    torch.testing.assert_close(weights, expected)


def of_expert(linear: Linear, expert: int, x: Tensor) -> Tensor:
    y = linear.weight[expert] @ x
    return y if linear.bias is None else y + linear.bias[expert]


@pytest.mark.parametrize("bias", [True, False])
def test_experts_sum_weighted_outputs(bias: bool):
    shape = ExpertShape(5, 3, 4, (True,))
    module = Experts(8, shape, bias=bias)
    noise = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.normal_(generator=noise)
    x, residual = torch.randn(2, 11, 8, generator=noise)
    chosen = torch.stack([torch.randperm(5, generator=noise)[:3] for _ in range(11)])
    weights = torch.rand(11, 3, generator=noise)
    expected = residual.clone()
    for t in range(11):
        for e, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            both = of_expert(module.gate_up_proj, e, x[t])
            out = of_expert(module.down_proj, e, F.silu(both[:4]) * both[4:])
            expected[t] += weight * out

    def run(rows: slice) -> Tensor:
        linears = (module.gate_up_proj, module.down_proj)
        routed = weights[rows], chosen[rows]
        return reference_experts.experts(x[rows], *routed, *linears, module.gate, residual[rows])

    torch.testing.assert_close(run(slice(0, 11)), expected)
    alone = torch.cat([run(slice(t, t + 1)) for t in range(11)])
    torch.testing.assert_close(alone, expected)
