"""DFlash2's and DSpark's heads on a GPU: captured steps match eager ones bit by bit, steady steps
do not wait, and answers are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from tests.support.draft_heads import HEADS
from tests.support.gpu_checks import (
    NEEDS_GPU,
    ON_GPU,
    check_captured,
    finish,
    keys_and_values,
    steady,
)
from tests.support.losslessness_matrix import Pair, make_pair

pytestmark = NEEDS_GPU

PROMPTS = [[5, 9, 2, 11], [3] * 17, [4, 9, 2] * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SAMPLED = GREEDY.clone(temperature=0.8, seed=3)


@pytest.fixture(scope="module", params=HEADS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("heads")
    source = make_pair(root, seed=4, **ON_GPU)
    return replace(source, draft=HEADS[request.param](source.draft, root / "with a head"))


def make_engine(pair: Pair, **options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 256}
    defaults |= {"kv_cache_memory": "64MiB", "overlap": 1, "draft": str(pair.draft), **options}
    return Engine(EngineConfig(target=str(pair.target), **defaults))


def answers(engine: Engine) -> list[list[int]]:
    assert engine.resolved.backends.attention == "triton"
    requests = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    requests += [engine.add(prompt, SAMPLED) for prompt in PROMPTS]
    return finish(engine, requests)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_match_eager_ones_bit_by_bit(pair: Pair, dtype: str):
    check_captured(lambda: make_engine(pair, dtype=dtype), answers, keys_and_values)


@pytest.mark.parametrize("adaptive", [True, False])
def test_answers_are_those_of_plain_decoding(pair: Pair, adaptive: bool):
    plain = answers(make_engine(pair, draft=None, method="none"))
    assert answers(make_engine(pair, adaptive=adaptive)) == plain


def test_steady_steps_do_not_wait(pair: Pair):
    engine = make_engine(pair, dtype="bfloat16", overlap=2)
    requests = [engine.add(prompt, GREEDY.clone(max_tokens=200)) for prompt in PROMPTS]
    with steady(engine, requests, after=40):
        for _ in range(10):
            engine.step()
