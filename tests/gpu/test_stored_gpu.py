"""Weights held as stored on a GPU: captured steps match eager ones bit by bit, and speculation
changes no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from tests.support.gpu_checks import (
    NEEDS_GPU,
    ON_GPU,
    check_captured,
    finish,
    keys_and_values,
    steady,
)
from tests.support.losslessness_matrix import Pair, make_pair
from tests.support.stored_weights import store
from tests.support.target_families import FAMILIES
from tests.support.tested_formats import GPU_EXPERTS, GPU_FORMATS

pytestmark = NEEDS_GPU

PROMPTS = [[5, 9, 2, 11], [3] * 17, [4, 9, 2] * 6]
EXPERTS = "experts in "
"""Begins the names of pairs whose target has experts in a format."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=[*GPU_FORMATS, *(f"{EXPERTS}{n}" for n in GPU_EXPERTS)])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and a drafter in a format, or a target with experts in one and a plain drafter."""
    root = tmp_path_factory.mktemp("stored")
    name = request.param
    if name.startswith(EXPERTS):
        return make_sparse_pair(root, name.removeprefix(EXPERTS))
    made = make_pair(root, seed=4, **ON_GPU)
    for path in (made.target, made.draft):
        store(path, Path(f"{path} dense"), name, lambda n: n.endswith("_proj.weight"))
    return made


def make_sparse_pair(root: Path, name: str) -> Pair:
    make, changes = FAMILIES["qwen3_moe"]
    pair = make_pair(root, make, **{**changes, "moe_intermediate_size": 64}, **ON_GPU)
    store(pair.target, root / "target dense", name, is_expert)
    return pair


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


def make_engine(pair: Pair, **options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 256}
    defaults |= {"kv_cache_memory": "64MiB", "overlap": 1, "weight_dtype": "stored"}
    defaults |= {"draft": str(pair.draft), **options}
    return Engine(EngineConfig(target=str(pair.target), **defaults))


def answers(engine: Engine) -> list[list[int]]:
    assert engine.resolved.backends.attention == "triton"
    return finish(engine, [engine.add(prompt, GREEDY) for prompt in PROMPTS])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_match_eager_ones_bit_by_bit(pair: Pair, dtype: str):
    check_captured(lambda: make_engine(pair, dtype=dtype), answers, keys_and_values)


def test_answers_are_those_of_plain_decoding_and_of_the_dense_weights(pair: Pair):
    plain = answers(make_engine(pair, draft=None, method="none"))
    assert answers(make_engine(pair)) == plain
    dense = make_engine(pair, weight_dtype="auto", draft=None, method="none")
    assert answers(dense) == plain


@pytest.mark.parametrize("pair", GPU_FORMATS, indirect=True)
def test_steady_steps_do_not_wait(pair: Pair):
    engine = make_engine(pair, dtype="bfloat16", overlap=2)
    requests = [engine.add(prompt, GREEDY.clone(max_tokens=200)) for prompt in PROMPTS]
    with steady(engine, requests, after=40):
        for _ in range(10):
            engine.step()
