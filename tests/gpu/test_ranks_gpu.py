"""Ranks on GPUs: exchanges of one rank in a captured graph, and groups of two GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe import LLM
from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.parallel.group import RankFailed
from strobe.parallel.shared_memory import memory_size
from strobe.parallel.torch_group import TorchGroup, make_store
from strobe.ranks import leader
from strobe.ranks.leader import Ranks, start_engine
from strobe.sampling_params import SamplingParams
from strobe.tools.demo_comparison import choose_examples, prompts_of
from tests.support.engine_runs import run
from tests.support.gpu_checks import (
    NEEDS_GPU,
    ON_GPU,
    REGRET,
    check_captured,
    finish,
    keys_and_values,
    largest_regret,
)
from tests.support.losslessness_matrix import make_pair
from tests.support.tiny_checkpoints import make_tokenizer

pytestmark = NEEDS_GPU

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], [5, 6] * 10]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=48, structured_outputs={"regex": "[ab]{4,9}"}),
]


@pytest.fixture(params=["memory", "nccl"])
def alone(request: pytest.FixtureRequest) -> Iterator[TorchGroup]:
    group = TorchGroup(
        mmap(-1, memory_size(1)), 0, 1, lambda: None, make_store(), torch.device("cuda", 0)
    )
    assert group._symmetric is not None
    if request.param == "nccl":
        group._symmetric = None
    yield group
    group.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 4096], ids=["small", "odd", "large"])
def test_exchanges_of_one_rank_change_nothing(alone: TorchGroup, dtype: torch.dtype, rows: int):
    """Also in a captured graph."""
    x = torch.randn(rows, 4096, device="cuda").to(dtype)
    assert torch.equal(alone.sum(x.clone()), x)
    assert torch.equal(alone.join(x), x)
    assert torch.equal(alone.swap(x), x)
    held = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = alone.sum(held.clone()) + alone.join(held) + alone.swap(held)
    held.copy_(x)
    graph.replay()
    assert torch.equal(out, x + x + x)
    del graph  # which keeps NCCL from ending


@pytest.fixture
def settings(tmp_path: Path) -> EngineConfig:
    pair = make_pair(tmp_path, **ON_GPU)
    make_tokenizer(pair.target)
    return EngineConfig(
        target=str(pair.target),
        draft=str(pair.draft),
        device="cuda",
        dtype="float32",
        kv_cache_memory="64MiB",
        max_model_len=128,
        max_num_seqs=4,
        tensor_parallel_size=2,
    )


def finish_steps(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@TWO_GPUS
@pytest.mark.parametrize("changes", [{}, {"cuda_graphs": False}, {"method": "none"}], ids=str)
def test_two_ranks_answer_as_one_does(settings: EngineConfig, changes: dict[str, Any]):
    expected = run(Engine(settings.with_(tensor_parallel_size=1)), PROMPTS, PARAMS)
    engine = start_engine(settings.with_(**changes))
    assert run(engine, PROMPTS, PARAMS) == expected
    assert run(engine, PROMPTS, PARAMS) == expected


@TWO_GPUS
def test_two_ranks_in_bf16():
    """The first rank's steps are captured or not; the second one's always are."""
    llm = LLM(device="cpu", kv_cache_memory="64MiB")
    texts = [list(prompt) for prompt in prompts_of(llm, choose_examples(8))]
    params = SamplingParams(temperature=0.0, max_tokens=80)
    outputs: list[list[list[int]]] = []

    def answers(engine: Engine) -> list[list[int]]:
        outputs.append(finish(engine, [engine.add(text, params) for text in texts]))
        return outputs[-1]

    config = EngineConfig(device="cuda", dtype="bfloat16", kv_cache_memory="1GiB", overlap=1)
    config = config.with_(max_num_seqs=8, tensor_parallel_size=2)
    check_captured(lambda: start_engine(config), answers, keys_and_values)
    assert largest_regret(texts, outputs[0]) <= REGRET


@TWO_GPUS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_group_ends_with_a_rank(
    settings: EngineConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    """This process lives on, and can make another group."""
    made: list[Ranks] = []
    init = Ranks.__init__

    def keep(self: Ranks, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(leader.Ranks, "__init__", keep)
    monkeypatch.setattr(leader, "STALL_SECONDS", 2.0)
    engine = start_engine(settings)
    expected = run(engine, PROMPTS, PARAMS)
    engine.add(PROMPTS[0], PARAMS[0])
    engine.step()
    os.kill(made[0]._processes[0].pid, number)
    with pytest.raises(RuntimeError):
        finish_steps(engine)
    with pytest.raises(RankFailed, match="Rank 1"):
        engine.check_device()
    made[0].stop()
    assert run(start_engine(settings), PROMPTS, PARAMS) == expected


@TWO_GPUS
def test_group_ends_when_a_gpu_hangs(settings: EngineConfig, monkeypatch: pytest.MonkeyPatch):
    """The second rank's GPU waits for a number from the first one's, which is busy with something
    else for some seconds."""
    monkeypatch.setattr(leader, "STALL_SECONDS", 2.0)
    engine = start_engine(settings)
    expected = run(engine, PROMPTS, PARAMS)
    engine.add(PROMPTS[0], PARAMS[0])
    engine.step()
    torch.cuda._sleep(12 * 10**9)  # cycles
    with pytest.raises(RuntimeError):
        finish_steps(engine)
    with pytest.raises(RankFailed, match="Rank 1 has stalled"):
        engine.check_device()
    assert run(start_engine(settings), PROMPTS, PARAMS) == expected
