"""Further target families on a GPU: captured steps match eager ones bit by bit, without
synchronization."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.kernels.reference_experts import blocked_gemm, grouped_gemm
from tests.support.gpu_checks import (
    NEEDS_GPU,
    ON_GPU,
    check_against_cpu,
    check_captured,
    finish,
    keys_and_values,
    steady,
)
from tests.support.losslessness_matrix import Pair, make_pair
from tests.support.target_families import FAMILIES

pytestmark = NEEDS_GPU

PROMPTS = [[5, 9, 2, 11], [3] * 17, [4, 9, 2] * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    write, changes = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    return make_pair(root, write, seed=4, **ON_GPU, **changes)


def make_engine(pair: Pair, **options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 256}
    defaults |= {"kv_cache_memory": "64MiB", "overlap": 1, **options}
    return Engine(EngineConfig(target=str(pair.target), draft=str(pair.draft), **defaults))


def answers(engine: Engine) -> list[list[int]]:
    assert engine.resolved.backends.attention == "triton"
    return finish(engine, [engine.add(prompt, GREEDY) for prompt in PROMPTS])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_match_eager_ones_bit_by_bit(pair: Pair, dtype: str):
    check_captured(lambda: make_engine(pair, dtype=dtype), answers, keys_and_values)


def test_steady_steps_do_not_wait(pair: Pair):
    engine = make_engine(pair, overlap=2)
    requests = [engine.add(prompt, GREEDY.clone(max_tokens=200)) for prompt in PROMPTS]
    with steady(engine, requests, after=40):
        for _ in range(10):
            engine.step()


def test_gpu_matches_cpu_in_fp32(pair: Pair):
    check_against_cpu(pair, "greedy", "stops")


@pytest.mark.parametrize("rows", [1, 24, 700])
def test_grouped_gemms_match_bmm_in_bf16(rows: int):
    noise = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(8, 48, 64, generator=noise, device="cuda").bfloat16()
    x = torch.randn(rows, 64, generator=noise, device="cuda").bfloat16()
    owner = torch.randint(0, 7, (rows,), generator=noise, device="cuda").sort().values
    experts = torch.arange(8, device="cuda")
    ends = torch.searchsorted(owner, experts, right=True, out_int32=True)
    expected = torch.bmm(weights[owner].float(), x.float()[:, :, None])[:, :, 0]
    for gemm in (grouped_gemm, blocked_gemm):
        torch.testing.assert_close(gemm(x, weights, ends).float(), expected, atol=0.1, rtol=0.02)
