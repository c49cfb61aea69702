"""GEMMs of quack-kernels: by the library on a GPU that has it, by a double elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_linear import BF16, BOUNDS, Fixed, draw, error, make
from torch import Tensor

from scripts.candidates import by_quack, first_round
from scripts.tuning import Problem
from strobe.kernels import quack_gemm
from strobe.kernels import reference_linear as reference
from strobe.kernels.gemm_table import Gemm, GemmConfig
from strobe.kernels.linear import Gemms
from strobe.kernels.operands import PLAIN, Epilogue, Input, RowNorm

TILE = (64, 192, 2, 1)
CONFIG = GemmConfig(kernel="cublas", quack=TILE)


@dataclass
class Double:
    """What `gemm_act` of quack-kernels does."""

    fails: bool = False
    calls: int = 0
    configs: list[SimpleNamespace] = field(default_factory=list)

    def __call__(self, x: Tensor, w: Tensor, **options: Any) -> tuple[None, Tensor]:
        self.calls += 1
        if self.fails:
            raise TypeError("no such argument")
        self.configs.append(options["config"])
        y = x.float() @ w.float()
        if options["activation"] == "swiglu":
            assert options["concat_layout"] == ("B",)
            gate, up = y.chunk(2, 1)
            y = torch.nn.functional.silu(gate) * up
        elif options["C"] is not None:
            y = y + options["C"].float()
        return None, options["postact_out"].copy_(y)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    for name, content in {
        "quack": {},
        "quack.gemm_config": {"GemmConfig": SimpleNamespace},
        "quack.gemm_interface": {"gemm_act": double},
    }.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return double


def gemms(device: torch.device, config: GemmConfig = CONFIG) -> Gemms:
    layers = Gemms(device, BF16, table=Fixed(config))
    layers.quack = quack_gemm.load()
    return layers


def check(gemms: Gemms, device: torch.device, rows: int = 100) -> None:
    """Compare all kinds of products with the twin."""
    x, weight = draw(0, rows, 64, dtype=BF16, device=device), make(192, 64, BF16, device)
    stream = draw(2, rows, 192, dtype=BF16, device=device)
    normed = Input(x, RowNorm(draw(3, 64, dtype=BF16, device=device), 1e-6))
    add = Epilogue(residual=stream)
    for operand, epilogue in (
        (Input(x), PLAIN),
        (normed, PLAIN),
        (Input(x), Epilogue(activation="silu")),
        (Input(x), add),
    ):
        expected = reference.linear(operand, weight, epilogue)
        assert error(gemms.linear(operand, weight, epilogue), expected) < BOUNDS[BF16]
    expected = reference.linear(Input(x), weight, add)
    in_place = add._replace(next_norm=stream[0], out=stream)
    found, scaled = gemms.add(Input(x), weight, in_place)
    assert found is stream
    assert scaled is None
    assert error(found, expected) < BOUNDS[BF16]


def test_products_match_twin(library: Double, device: torch.device):
    check(gemms(device), device)
    assert library.calls == 5
    check(gemms(device, replace(CONFIG, quack=[128, 192, 1, 0])), device)
    first, second = library.configs[0], library.configs[5]
    assert (first.tile_m, first.tile_n, first.cluster_m, first.pingpong) == (64, 192, 2, True)
    assert (second.tile_m, second.tile_n, second.cluster_m, second.pingpong) == (128, 192, 1, False)
    # The library knows a compiled GEMM by its configuration's identity.
    assert {id(config) for config in library.configs} == {id(first), id(second)}


def test_products_match_twin_on_a_gpu(device: torch.device):
    pytest.importorskip("quack")
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    layers = gemms(device)
    for rows in (64, 100, 512):
        check(layers, device, rows)
    assert layers.quack is not None


def test_what_quack_does_not_serve_runs_elsewhere(library: Double, device: torch.device):
    layers, weight = gemms(device), make(192, 64, BF16, device)
    x = draw(0, 64, 64, dtype=BF16, device=device)
    bias = weight.data[:, 0].contiguous()
    for epilogue in (Epilogue(bias=bias), Epilogue(activation="gelu_tanh")):
        expected = reference.linear(Input(x), weight, epilogue)
        assert error(layers.linear(Input(x), weight, epilogue), expected) < 0.02
    odd = Input(draw(0, 64, 65, dtype=BF16, device=device))
    layers.linear(odd, make(192, 65, BF16, device))
    unaligned = Input(draw(0, 64, 72, dtype=BF16, device=device)[:, 1:65])
    layers.linear(unaligned, weight)
    out = torch.empty(64, 193, dtype=BF16, device=device)[:, :192]
    layers.linear(Input(x), weight, Epilogue(out=out))
    assert not library.calls


def test_a_library_that_fails_is_left(
    library: Double, device: torch.device, caplog: pytest.LogCaptureFixture
):
    """Its versions may not go together."""
    library.fails = True
    check(gemms(device), device)
    assert library.calls == 1
    assert "no such argument" in caplog.text


def test_a_library_that_cannot_be_loaded_is_left(
    library: Double, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delattr(sys.modules["quack.gemm_interface"], "gemm_act")
    assert quack_gemm.load() is None
    assert "gemm_act" in caplog.text


@pytest.mark.skipif(find_spec("quack") is not None, reason="quack-kernels are installed")
def test_no_library_is_no_fault(caplog: pytest.LogCaptureFixture):
    assert quack_gemm.load() is None
    assert not caplog.text


def test_many_rows_have_an_entry_of_their_own(library: Double, device: torch.device):
    """Only their exact numbers, for which it was measured."""

    class Table:
        def choose(self, gemm: Gemm, bucket: int) -> GemmConfig:
            return CONFIG if bucket == 512 else GemmConfig("cublas")

    layers = Gemms(device, BF16, table=Table())
    layers.quack, weight = quack_gemm.load(), make(64, 64, BF16, device)
    for rows in (511, 512, 513, 256):
        layers.linear(Input(draw(0, rows, 64, dtype=BF16, device=device)), weight)
    assert library.calls == 1


def test_the_tuner_keeps_both_kernels():
    """A tile of quack-kernels is recorded beside what serves without them."""
    problem = Problem(Gemm(6144, 4096, BF16, gated=True), 128, cublas=60.0)
    own = first_round(problem.gemm, 128, 132)[0]
    quack = by_quack(problem.gemm, 128)
    problem.times = {own: 55.0, quack[0]: 52.0, quack[1]: 53.0}
    best, microseconds = problem.best()
    assert (best.kernel, best.block_n, best.quack) == ("triton", own.block_n, quack[0].quack)
    assert microseconds == 52.0
    problem.times[quack[0]] = problem.times[quack[1]] = 54.5  # within the noise
    assert problem.best() == (own, 55.0)
    problem.times = {quack[0]: 52.0}
    assert problem.best() == (quack[0], 52.0)
    assert not first_round(problem.gemm, 512, 132)
    assert not by_quack(Gemm(6144, 4096, torch.float32), 128)
