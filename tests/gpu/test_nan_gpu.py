"""NaN in a request does not reach other requests at the context's end, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from tests.support.gpu_checks import NEEDS_GPU, ON_GPU, finish
from tests.support.losslessness_matrix import make_pair
from tests.support.tiny_checkpoints import make_target

pytestmark = NEEDS_GPU

BAD = 59
"""The token whose embedding is NaN."""
COLD = SamplingParams(temperature=0, logit_bias={BAD: -100.0}, ignore_eos=True)


def engine_of(path: Path, **options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 3}
    engine = Engine(EngineConfig(str(path), kv_cache_memory="64MiB", **defaults, **options))
    model: Any = engine.runner.model
    model.embed_tokens.weight.data[BAD] = float("nan")
    model.lm_head.weight.data[BAD] = 0.0
    return engine


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False, "overlap": 1}], ids=str)
def test_nan_beyond_the_context_leaves_other_requests_alone(
    options: dict[str, Any], tmp_path: Path
):
    pair = make_pair(tmp_path, make_target, **ON_GPU)
    prompts = [[(5 * i + n) % 50 for i in range(n)] for n in (56, 58)]
    plain = engine_of(pair.target, method="none")
    expected = finish(plain, [plain.add(prompt, COLD) for prompt in prompts])
    engine = engine_of(pair.target, draft=str(pair.draft), num_drafts=7, adaptive=False, **options)
    assert engine.resolved.backends.attention == "triton"
    for _ in range(3):
        requests = [engine.add(prompt, COLD) for prompt in prompts]
        bad = engine.add(prompts[1], COLD.clone(logit_bias={BAD: 100.0}))
        assert finish(engine, [*requests, bad]) == [*expected, [BAD]]
        assert bad.finish_reason == "error"
        assert all(request.finish_reason == "length" for request in requests)
