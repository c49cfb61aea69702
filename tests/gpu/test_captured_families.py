"""Families of targets beside the first on a GPU: captured steps give the bits of eager ones, and
nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import FAMILIES
from matrix import Pair, make_pair
from on_gpu import (
    NEEDS_GPU,
    ON_GPU,
    check_against_cpu,
    check_captured,
    finish,
    keys_and_values,
    steady,
)

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.models.families.experts import blocked_gemm, grouped_gemm

pytestmark = NEEDS_GPU

PROMPTS = [[5, 9, 2, 11], [3] * 17, [4, 9, 2] * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    write, changes = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    return make_pair(root, write, seed=4, **ON_GPU, **changes)


def engine(pair: Pair, **options: Any) -> Engine:
    given = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 4, "max_model_len": 256}
    given |= {"kv_cache_memory": "64MiB", "overlap": 1, **options}
    return Engine(EngineConfig(target=str(pair.target), draft=str(pair.draft), **given))


def answers(one: Engine) -> list[list[int]]:
    assert one.resolved.backends.attention == "triton"
    return finish(one, [one.add(prompt, GREEDY) for prompt in PROMPTS])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_give_the_bits_of_eager_ones(pair: Pair, dtype: str):
    check_captured(lambda: engine(pair, dtype=dtype), answers, keys_and_values)


def test_steady_steps_do_not_wait(pair: Pair):
    one = engine(pair, overlap=2)
    asked = [one.add(prompt, GREEDY.clone(max_tokens=200)) for prompt in PROMPTS]
    with steady(one, asked, after=40):
        for _ in range(10):
            one.step()


def test_gpu_matches_cpu_in_fp32(pair: Pair):
    check_against_cpu(pair, "greedy", "stops")


@pytest.mark.parametrize("rows", [1, 24, 700])
def test_both_grouped_gemms_agree_in_bf16(rows: int):
    noise = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(8, 48, 64, generator=noise, device="cuda").bfloat16()
    x = torch.randn(rows, 64, generator=noise, device="cuda").bfloat16()
    owner = torch.randint(0, 7, (rows,), generator=noise, device="cuda").sort().values
    every = torch.arange(8, device="cuda")
    ends = torch.searchsorted(owner, every, right=True, out_int32=True)
    wanted = torch.bmm(weights[owner].float(), x.float()[:, :, None])[:, :, 0]
    for gemm in (grouped_gemm, blocked_gemm):
        torch.testing.assert_close(gemm(x, weights, ends).float(), wanted, atol=0.1, rtol=0.02)
