"""Models split over two ranks with kernels against the same models on one rank in plain torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ops import FAMILIES, IDS, ROWS, Cache, contiguous, plan_of
from torch import Tensor

from strobe.kernels.operands import RowNorm
from strobe.kernels.reference_rowwise import rms_norm
from strobe.models.architectures import load_target_config
from strobe.models.ops.triton_ops import TritonOps
from strobe.models.quantization.kernel_weights import join_all
from strobe.models.weight_loading import load_target
from strobe.parallel.rank_triton_ops import RankTritonOps
from strobe.parallel.split import Split
from tests.support.rank_threads import Exchange, ThreadGroup

SIZE = 2
EXPERTS = ("qwen3_moe", "gpt_oss", "qwen3_5_moe", "joined", "gemma4_moe")


class KernelGroup(ThreadGroup):
    """Exchanges as `RankMemory` does, by plain torch. Only the rank that has `turn` runs, since
    Triton's interpreter serves one thread."""

    def __init__(self, exchange: Exchange, rank: int, turn: threading.Lock):
        super().__init__(exchange, rank)
        self.turn, self.calls = turn, list[str]()

    def _gather(self, x: Tensor) -> list[Tensor]:
        self.turn.release()
        try:
            return super()._gather(x)
        finally:
            self.turn.acquire()

    def fits(self, x: Tensor) -> bool:
        return x.shape[0] <= ROWS

    def add(
        self,
        part: Tensor,
        residual: Tensor | None = None,
        *,
        next_norm: RowNorm | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append("add")
        total = self.sum(part) if residual is None else self.sum(part) + residual
        total = total if out is None else out.copy_(total)
        return total, None if next_norm is None else rms_norm(total, *next_norm)

    def embed(self, ids: Tensor, weight: Tensor, first: int) -> Tensor:
        self.calls.append("embed")
        places = ids - first
        own = (places >= 0) & (places < weight.shape[0])
        rows = weight.detach()[places.clamp(0, weight.shape[0] - 1)]
        return self.sum(rows * own[:, None])

    def best(self, values: Tensor, ids: Tensor, margins: Tensor, first: int) -> Tensor:
        self.calls.append("best")
        every, of_all = self.join(values[:, None]), self.join((ids + first)[:, None])
        top, at = every.max(1, keepdim=True)
        second = every.scatter(1, at, -torch.inf).amax(1)
        own = self.join(margins[:, None]).gather(1, at)[:, 0]
        margins.copy_(torch.minimum(own, top[:, 0] - second))
        return of_all.gather(1, at)[:, 0]


def outputs(model: Any, plan: Any, device: torch.device) -> list[Tensor]:
    """Return the features, the logits, and the best tokens and their margins: of the model, which
    may cap logits, and of its output layer."""
    places, layers = torch.arange(ROWS, device=device), tuple(range(3))
    x, features = model(torch.tensor(IDS, device=device), places, plan, layers)
    best = model.argmax(x), *model.ops.best_two_of(model.head_part(x))
    return [features, model.head(x), *best, *model.ops.best_two(x, model.norm, model.output)]


@pytest.mark.parametrize(
    ("family", "whole_experts"),
    [
        *[(name, False) for name in FAMILIES],
        *[pytest.param(name, True, marks=pytest.mark.full) for name in EXPERTS],
    ],
)
def test_two_ranks_match_one(
    tmp_path: Path, device: torch.device, family: str, whole_experts: bool
):
    sizes = {"head_dim": 64, "num_hidden_layers": 2, "hidden_size": 64}
    FAMILIES[family](tmp_path, **sizes)
    config = load_target_config(tmp_path)
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": device}
    plain = load_target(tmp_path, config, **options)
    expected = outputs(plain, plan_of(config, Cache(config.decoder, device), device), device)

    exchange, turn = Exchange(SIZE), threading.Lock()
    found: dict[int, list[Tensor] | BaseException] = {}
    groups = [KernelGroup(exchange, rank, turn) for rank in range(SIZE)]

    def run(rank: int) -> None:
        group: Any = groups[rank]
        split = Split(rank, SIZE, SIZE, whole_experts, group)
        own, _ = split.split(config, None)
        with turn:
            try:
                model = load_target(tmp_path, own, **options, open=split.opener("auto"))
                contiguous(model)
                join_all(model)
                model.ops = split.ops(TritonOps(device, torch.float32), model, kernels=True)
                assert isinstance(model.ops, RankTritonOps)
                plan = plan_of(own, Cache(own.decoder, device), device)
                found[rank] = outputs(model, plan, device)
            except BaseException as error:
                found[rank] = error
                exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(SIZE):
        actual = found[rank]
        if isinstance(actual, BaseException):
            raise actual
        for one, whole in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)
    assert groups[0].calls == groups[1].calls
    assert {"embed", "best"} <= set(groups[0].calls)
    assert "add" in groups[0].calls or family.startswith("gemma4")  # norms come before its sums
