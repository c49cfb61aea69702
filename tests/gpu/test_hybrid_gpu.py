"""A target with recurrent layers on a GPU: captured steps match eager ones bit by bit, and
speculation does not change tokens in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import run
from tests.support.gpu_checks import NEEDS_GPU, ON_GPU, check_against_cpu, check_captured, steady
from tests.support.losslessness_matrix import (
    FURTHER_FAMILIES,
    Pair,
    PlainAnswers,
    compare,
    make_pair,
)
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.transformers_parity import prompts

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), make_hybrid, **ON_GPU)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainAnswers:
    return PlainAnswers(pair)


@pytest.mark.parametrize("c", FURTHER_FAMILIES, ids=str)
def test_outputs_equal_plain_decoding(c: Any, pair: Pair, plain: PlainAnswers):
    engine = compare(c, pair, plain(c.workload))
    assert engine.resolved.backends.attention == "triton"
    assert len(engine.graphs) > 0 or c.workload == "stops"  # all of its steps may need processors


def test_gpu_matches_cpu(pair: Pair):
    check_against_cpu(pair, "greedy", "sampled")


def make_engine(pair: Pair, **options: Any) -> Engine:
    defaults = {"device": "cuda", "max_num_seqs": 4, "kv_cache_memory": "64MiB", **options}
    return Engine(EngineConfig(str(pair.target), draft=str(pair.draft), **defaults))


def states_left(engine: Engine) -> list[torch.Tensor]:
    states = engine.components.states
    assert states is not None
    return [states.state[:, :-1].clone(), states.window[:, :-1].clone()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_match_eager_ones_bit_by_bit(dtype: str, pair: Pair):
    """Compares the recurrent states as well as the tokens."""
    cold = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    texts = prompts([3, 17, 40, 1, 8, 29])
    check_captured(
        lambda: make_engine(pair, dtype=dtype, max_model_len=128, overlap=1),
        lambda engine: run(engine, texts, cold),
        states_left,
    )


def test_steady_steps_do_not_wait(pair: Pair):
    engine = make_engine(pair, max_model_len=512, overlap=2)
    endless = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    requests = [engine.add(text, endless) for text in prompts([3, 17, 40, 8])]
    with steady(engine, requests, after=20):
        for _ in range(15):
            engine.step()
