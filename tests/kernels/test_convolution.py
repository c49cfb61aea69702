"""Dynamic convolutions against their torch twin."""

from __future__ import annotations

import pytest
import torch

from strobe.kernels import convolution
from strobe.kernels import reference_convolution as reference


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("with_residual", [True, False])
def test_convolution_matches_twin(device: torch.device, taps: int, with_residual: bool):
    """Blocks of mixed widths stand behind one another; kernels are a part of wider rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 48, generator=generator).to(device)
    base = torch.randn(2, taps, 48, generator=generator).to(device)[1]
    kernels = torch.randn(9, 2, taps, 12, generator=generator).to(device)[:, 1]
    residual = torch.randn(9, 48, generator=generator).to(device) if with_residual else None
    places = torch.tensor([0, 1, 2, 3, 0, 0, 1, 2, 3], device=device)
    got = convolution.convolve(x, base, kernels, places, residual)
    expected = reference.convolve(x, base, kernels, places, residual)
    torch.testing.assert_close(got, expected)
    y = (base[0] + kernels[4, 0].repeat_interleave(4)) * x[4]
    torch.testing.assert_close(expected[4], y if residual is None else residual[4] + y)
