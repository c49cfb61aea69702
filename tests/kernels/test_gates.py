"""Kernels of gates against their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strobe.kernels import gates
from strobe.kernels import reference_gates as reference
from strobe.kernels.reference_rowwise import rms_norm
from strobe.models.modules import RMSNorm


def normal(device: torch.device, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("columns", [70, 1])
@pytest.mark.parametrize("with_extra", [True, False])
def test_gate_matches_twin(device: torch.device, columns: int, with_extra: bool):
    """The logits are a part of wider rows, as a layer's outputs are."""
    x, logits = normal(device, 3, 70), normal(device, 3, 90, seed=2)[:, :columns] * 9
    extra = normal(device, 3, 70, seed=3) if with_extra else None
    torch.testing.assert_close(gates.gate(x, logits, extra), reference.gate(x, logits, extra))


@pytest.mark.parametrize("scale", [None, 0.37])
def test_add_norm_matches_twin(device: torch.device, scale: float | None):
    x, y, weight = normal(device, 3, 48), normal(device, 3, 48, seed=2), normal(device, 48, seed=3)
    factor = None if scale is None else torch.tensor([scale], device=device)
    expected = (x + rms_norm(y, weight, 1e-6)) * (1.0 if scale is None else scale)
    torch.testing.assert_close(gates.add_norm(x, y, weight, 1e-6, factor), expected)


def test_add_norms_matches_twin(device: torch.device):
    x, y, z = normal(device, 3, 48), normal(device, 3, 60, seed=2)[:, :48], normal(device, 3, 48)
    norms = tuple(RMSNorm(48, eps) for eps in (1e-6, 1e-2, 0.3))
    for i, norm in enumerate(norms):
        norm.weight = torch.nn.Parameter(normal(device, 48, seed=3 + i), requires_grad=False)
    scale = torch.tensor([0.37], device=device)
    expected = reference.add_norms(x, y, z, norms, scale)
    torch.testing.assert_close(gates.add_norms(x, y, z, norms, scale), expected)
    expected = reference.add_norm_twice(x, y, *norms[1:])
    torch.testing.assert_close(gates.add_norm_twice(x, y, *norms[1:]), expected)


def test_softcapped_matches_twin(device: torch.device):
    """Also of logits far above the cap, infinite ones and NaN."""
    logits = normal(device, 3, 2000) * torch.tensor([[0.1], [30.0], [3000.0]], device=device)
    logits[1, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    expected = reference.softcapped(logits, 30.0)
    torch.testing.assert_close(gates.softcapped(logits, 30.0), expected, equal_nan=True)
    assert gates.softcapped(logits, None) is logits
