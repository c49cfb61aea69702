"""Dynamic convolutions against their torch twin."""

from __future__ import annotations

import pytest
import torch

from strobe.kernels import convolution
from strobe.kernels import reference_convolution as reference


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("widths", [(4, 1, 4), (9,)])
def test_convolution_matches_twin(
    device: torch.device, taps: int, with_residual: bool, widths: tuple[int, ...]
):
    """Blocks of mixed widths stand behind one another; kernels are a part of wider rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 48, generator=generator).to(device)
    base = torch.randn(2, taps, 48, generator=generator).to(device)[1]
    kernels = torch.randn(9, 2, taps, 12, generator=generator).to(device)[:, 1]
    residual = torch.randn(9, 48, generator=generator).to(device) if with_residual else None
    places = torch.cat([torch.arange(width, device=device) for width in widths])
    got = convolution.convolve(x, base, kernels, places, residual)
    expected = reference.convolve(x, base, kernels, places, residual)
    torch.testing.assert_close(got, expected)
    for row, place in enumerate(places.tolist()):
        y = residual[row].clone() if residual is not None else torch.zeros_like(x[row])
        for tap in range(min(place + 1, taps)):
            y += (base[tap] + kernels[row, tap].repeat_interleave(4)) * x[row - tap]
        torch.testing.assert_close(expected[row], y)


def test_blocks_without_a_number_leave_others_alone():
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(1))
    x[:4] = torch.nan
    kernels = torch.ones(8, 2, 12)
    places = torch.tensor([0, 1, 2, 3] * 2)
    y = reference.convolve(x, torch.zeros(2, 48), kernels, places)
    assert y[:4].isnan().all()
    torch.testing.assert_close(y[4:], x[4:] + torch.cat([torch.zeros(1, 48), x[4:-1]]))
