"""A GEMM that prepares its result for the next norm, followed by the GEMM with that norm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_linear import BF16, BOUND_FP8, BOUND_NORM, BOUNDS, draw, error, gemms, make
from torch import Tensor

from strobe.kernels import reference_linear as reference
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import Epilogue, Input, RowNorm, Scaled


@dataclass
class Layer:
    """Computes y = residual + x down for x [M, 96], then act(norm(y) up)."""

    rows: int
    device: torch.device
    dtype: torch.dtype = BF16
    gated: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        self.x = draw(0, self.rows, 96, dtype=self.dtype, device=self.device)
        self.residual = draw(3, self.rows, 136, dtype=self.dtype, device=self.device) * 5
        self.down = make(136, 96, self.dtype, self.device)
        self.up = make(144 if self.gated else 72, 136, self.dtype, self.device, self.fp8)
        self.second = Epilogue(activation="silu" if self.gated else None)
        self.norm = RowNorm(draw(2, 136, dtype=self.dtype, device=self.device), 1e-6)
        self.first = Epilogue(residual=self.residual, next_norm=self.norm.weight)

    def want(self) -> tuple[Tensor, Tensor]:
        y = reference.linear(Input(self.x), self.down, self.first)
        return y, reference.linear(Input(y, self.norm), self.up, self.second)

    def run(self, first: Gemms, second: Gemms) -> tuple[Tensor, Tensor, Scaled | None]:
        y, scaled = first.add(Input(self.x), self.down, self.first)
        z = second.linear(Input(y, self.norm, scaled), self.up, self.second)
        return y, z, scaled


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("gated", [False, True])
def test_two_gemms_share_the_norm(device: torch.device, split: int, rows: int, gated: bool) -> None:
    layer = Layer(rows, device, gated=gated)
    fused = gemms(device, BF16, split_k=split)
    y, z, scaled = layer.run(fused, fused)
    want_y, want_z = layer.want()
    assert scaled is not None
    assert error(y, want_y) < BOUNDS[BF16]
    assert error(z, want_z) < BOUND_NORM


def test_chain_matches_fused_norm(device: torch.device) -> None:
    """x is rounded at the same place; only the order of the sum of squares differs."""
    layer = Layer(3, device, torch.float32)
    fused = gemms(device, torch.float32)
    y, z, _ = layer.run(fused, fused)
    want = fused.linear(Input(y, layer.norm), layer.up)
    assert error(z, want) < BOUNDS[torch.float32]


def test_row_is_independent_of_other_rows(device: torch.device) -> None:
    layer = Layer(16, device)
    fused = gemms(device, BF16, split_k=2)
    _, together, _ = layer.run(fused, fused)
    layer.x = layer.x[6:7]
    layer.first = layer.first._replace(residual=layer.residual[6:7])
    _, alone, _ = layer.run(fused, fused)
    assert torch.equal(alone[0], together[6])


@pytest.mark.parametrize("groups", [True, False])
def test_fp8_chain(device: torch.device, groups: bool) -> None:
    layer = Layer(3, device, fp8=True)
    second = gemms(device, BF16, block_k=128, groups=groups)
    _, z, _ = layer.run(gemms(device, BF16), second)
    assert error(z, layer.want()[1]) < BOUND_FP8[groups]


def test_chain_with_cublas_on_one_side(device: torch.device) -> None:
    layer = Layer(3, device)
    triton, library = gemms(device, BF16), gemms(device, BF16, kernel="cublas")
    for first, second in ((triton, library), (library, triton), (library, library)):
        y, z, scaled = layer.run(first, second)
        assert (scaled is None) == (first is library)
        assert error(y, layer.want()[0]) < BOUNDS[BF16]
        assert error(z, layer.want()[1]) < BOUND_NORM


def test_add_does_not_prepare_float16_norms(device: torch.device) -> None:
    layer = Layer(2, device, torch.float16)
    fused = gemms(device, torch.float16)
    _, z, scaled = layer.run(fused, fused)
    assert scaled is None
    assert error(z, layer.want()[1]) < 2 * BOUNDS[torch.float16]


def test_add_writes_into_the_residual(device: torch.device) -> None:
    layer = Layer(3, device)
    want_y, want_z = layer.want()
    residual = layer.residual
    fused = gemms(device, BF16, split_k=2)
    y, scaled = fused.add(Input(layer.x), layer.down, layer.first._replace(out=residual))
    assert y is residual
    assert error(y, want_y) < BOUNDS[BF16]
    z = fused.linear(Input(y, layer.norm, scaled), layer.up)
    assert error(z, want_z) < BOUND_NORM


def test_head_argmax_chain(device: torch.device) -> None:
    layer = Layer(3, device)
    fused = gemms(device, BF16)
    y, scaled = fused.add(Input(layer.x), layer.down, layer.first)
    got = fused.head_argmax(Input(y, layer.norm, scaled), layer.up)
    logits = layer.want()[1].float()
    winners = logits.gather(1, got[:, None])[:, 0]
    assert bool((winners >= logits.amax(1) * (1 - 2**-7)).all())
