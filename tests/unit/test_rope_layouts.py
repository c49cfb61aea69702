"""Both layouts of rope's pairs, and partly rotated heads, become one order of values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strobe.models.config_readers.rope import RopeConfig
from strobe.models.modules import RotaryTable, rotate

WIDTH = 16


def rotated(x: Tensor, positions: Tensor, width: int, interleaved: bool) -> Tensor:
    """Rotate the first `width` values of each head as complex numbers; x [T, heads, D]."""
    head, rest = x[..., :width].double(), x[..., width:].double()
    if interleaved:
        z = torch.complex(head[..., 0::2], head[..., 1::2])
    else:
        z = torch.complex(*head.chunk(2, -1))
    speed = torch.tensor([100.0 ** (-2 * i / width) for i in range(width // 2)])
    z = z * torch.polar(torch.ones(()).double(), (positions[:, None] * speed).double())[:, None]
    return torch.cat([z.real, z.imag, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_scores_match_published_layout(interleaved: bool, share: float):
    rope = RopeConfig(100.0, share=share, interleaved=interleaved)
    order = rope.order(WIDTH)
    assert (order is None) == (share == 1.0 and not interleaved)
    assert order is None or sorted(order) == list(range(WIDTH))
    noise = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 9, 3, WIDTH, generator=noise)
    positions = torch.arange(9) * 3
    angles = RotaryTable(WIDTH, rope, 30)(positions)
    own = [rotate(x if order is None else x[..., order], angles) for x in (q, k)]
    expected = [rotated(x, positions, int(WIDTH * share), interleaved) for x in (q, k)]
    scores = torch.einsum("qhd,khd->hqk", *own)
    torch.testing.assert_close(
        scores, torch.einsum("qhd,khd->hqk", *expected).float(), atol=1e-4, rtol=1e-4
    )
