"""The losslessness matrix on a GPU in fp32, with kernels and captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strobe import EngineConfig, SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.gpu_checks import NEEDS_GPU, ON_GPU, check_against_cpu
from tests.support.losslessness_matrix import (
    LENGTH,
    SLOW_COMBINATIONS,
    Combination,
    Pair,
    PlainAnswers,
    compare,
    make_pair,
    prompts,
)
from tests.support.tiny_checkpoints import make_draft

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), **ON_GPU)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainAnswers:
    return PlainAnswers(pair)


@pytest.mark.parametrize("c", SLOW_COMBINATIONS, ids=str)
def test_outputs_equal_plain_decoding(c: Combination, pair: Pair, plain: PlainAnswers):
    engine = compare(c, pair, plain(c.workload))
    backends = engine.resolved.backends
    assert backends.kernels
    assert backends.attention == backends.draft_attention == "triton"
    assert len(engine.graphs) > 0


def test_gpu_matches_cpu(pair: Pair):
    check_against_cpu(pair, "greedy", "stops", "sampled")


def test_drafter_sinks_match_between_kernels_and_torch(pair: Pair, tmp_path: Path):
    """Compares the second layer's keys, which depend on the first layer's attention."""
    path = make_draft(tmp_path, width=pair.width, sinks=True)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    common: dict[str, Any] = {"device": pair.device, "max_model_len": LENGTH, "overlap": 1}
    observed_keys: list[torch.Tensor] = []
    for off in ({}, {"attention_backend": "reference"}):
        config = EngineConfig(target=str(pair.target), draft=str(path), **common, **off)
        engine = make_engine(config)
        assert engine.resolved.backends.kernels is not bool(off)
        run(engine, prompts(), params)
        observed_keys.append(engine.components.stores["draft"].data[:, 16:].float())
    size = min(store.shape[1] for store in observed_keys)  # graphs have one page more, for padding
    kernel_keys, torch_keys = (store[:, :size] for store in observed_keys)
    torch.testing.assert_close(kernel_keys, torch_keys, atol=1e-3, rtol=1e-3)
