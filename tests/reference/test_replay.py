"""Plans are data: pickled and run on another engine, a plan gives the same step."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe import EngineConfig, SamplingParams
from strobe.step import Plan, StepResult
from tests.support.engine_runs import drain, make_engine

COLD = SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
SAMPLING = [
    COLD,
    COLD.clone(temperature=1.0, seed=3, top_p=0.9),
    COLD.clone(presence_penalty=0.6, logit_bias={4: 2.0}, logprobs=2),
    COLD.clone(speculation={"method": "ngram"}),
    COLD.clone(prompt_logprobs=1, max_tokens=4),
    COLD.clone(temperature=0.8, seed=9, min_tokens=5, speculation=False, n=2),
]


@pytest.mark.parametrize("page_size", [4, 16])
def test_plan_gives_the_same_step_on_another_engine(
    page_size: int, target: Any, draft: Callable[..., Path]
):
    config = EngineConfig(
        str(target.path),
        draft=str(draft()),
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        page_size=page_size,
    )
    first, second = make_engine(config), make_engine(config)
    log: list[tuple[bytes, str, StepResult]] = []
    launch = first.launch

    def logging(plan: Plan) -> Any:
        pending = launch(plan)
        log.append((pickle.dumps(plan), repr(plan), pending.result()))
        return pending

    first.launch = logging
    prompts = [[7, 3, 9] * n + [n] for n in (1, 9, 4, 6, 8, 3)]
    requests = [
        r
        for p, sampling in zip(prompts, SAMPLING, strict=True)
        for r in first.add_prompt(p, sampling)
    ]
    drain(first, requests)
    assert len(log) > 15
    for packed, printed, result in log:
        plan = pickle.loads(packed)
        assert repr(plan) == printed
        again = second.launch(plan).result()
        assert again._replace(seconds=None) == result._replace(seconds=None)
