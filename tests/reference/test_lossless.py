"""Speculation changes no token, for every pair of settings of the matrix.

The reference is plain decoding, one request at a time; plain greedy decoding is compared with
transformers. Each pair of values of the matrix occurs in at least one run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import drain, make_engine
from tests.support.losslessness_matrix import (
    COMBINATIONS,
    DIMENSIONS,
    DRAFTERS,
    FURTHER_FAMILIES,
    LENGTH,
    SLOW_COMBINATIONS,
    Combination,
    Pair,
    PlainAnswers,
    all_pairs,
    compare,
    few_cases,
    pairs_of,
    prompts,
    workload,
)
from tests.support.scripted_drafting import Scripted, oracle
from tests.support.tiny_checkpoints import EOS_IDS
from tests.support.transformers_parity import greedy


@pytest.mark.parametrize("combinations", [COMBINATIONS, SLOW_COMBINATIONS], ids=["fast", "slow"])
def test_every_pair_of_values_occurs(combinations: list[Combination]):
    assert set().union(*map(pairs_of, combinations)) == all_pairs()
    assert len(set(combinations)) == len(combinations) <= 80
    assert {c.proposer for c in combinations if c.preempts} == set(DIMENSIONS["proposer"])


def test_every_pair_of_values_occurs_for_further_families():
    assert set().union(*map(pairs_of, FURTHER_FAMILIES)) == all_pairs(DRAFTERS)
    assert {c.proposer for c in FURTHER_FAMILIES if c.preempts} == set(DRAFTERS)


@pytest.fixture(scope="module")
def pair(target: Any, draft: Callable[..., Path]) -> Pair:
    return Pair(target.path, draft())


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainAnswers:
    return PlainAnswers(pair)


@pytest.mark.parametrize("c", few_cases(COMBINATIONS, 12))
def test_outputs_equal_plain_decoding(c: Combination, pair: Pair, plain: Any):
    compare(c, pair, plain(c.workload))


@pytest.mark.parametrize("c", few_cases(SLOW_COMBINATIONS, 0, more=24))
def test_outputs_equal_plain_decoding_in_slow_runs(c: Combination, pair: Pair, plain: Any):
    compare(c, pair, plain(c.workload))


def test_plain_greedy_decoding_equals_transformers(target: Any, plain: Any):
    for name in ("greedy", "stops"):
        for (prompt, sampling), answer in zip(workload(name), plain(name), strict=True):
            if sampling.temperature or sampling.min_tokens:
                continue
            ends = ([] if sampling.ignore_eos else EOS_IDS) + list(sampling.stop_token_ids)
            count = sampling.max_tokens or LENGTH - len(prompt)
            assert answer == greedy(target.hf, prompt, count, eos_token_id=ends or None)


def test_workloads_finish_in_every_way_and_vary(plain: Any):
    """Otherwise the comparisons above would prove little."""
    answers = {name: plain(name) for name in DIMENSIONS["workload"]}
    everything = [answer for outputs in answers.values() for answer in outputs]
    assert len({tuple(answer[:4]) for answer in everything}) > 25
    assert len({len(answer) for answer in everything}) > 10
    assert any(answer[-1] in (12, 33) for answer in answers["stops"])
    assert any(answer[-1] in EOS_IDS for answer in answers["sampled"])
    siblings = answers["sampled"][1:4]
    assert len(set(map(tuple, siblings))) == 3
    for (prompt, sampling), answer in zip(workload("greedy"), answers["greedy"], strict=True):
        if sampling.max_tokens is None:
            assert len(prompt) + len(answer) == LENGTH


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_oracle_divides_steps_by_its_block_size(target: Any, drafts: int, overlap: int):
    prompt = prompts()[0]
    answer = greedy(target.hf, prompt, 41, eos_token_id=None)
    config = EngineConfig(
        target=str(target.path),
        method="ngram",
        num_drafts=drafts,
        overlap=overlap,
        max_model_len=LENGTH,
    )
    engine = make_engine(
        config, lambda parts, _: Scripted(parts.state, drafts, oracle), names=["ngram"]
    )
    script: Any = engine.proposers["ngram"]
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True))
    script.answers[request] = prompt + answer
    drain(engine, [request])
    assert request.output_ids == answer
    blocks = -(-40 // (drafts + 1))
    assert request.draft_counts.steps == blocks
    assert engine.stats.steps == 1 + blocks + (overlap - 1)
    assert request.draft_counts.num_verified == blocks * drafts
    short = blocks * (drafts + 1) - 40
    assert request.draft_counts.num_accepted >= blocks * drafts - short


@pytest.mark.parametrize("overlap", [1, 2])
def test_context_end_limits_drafts_but_not_the_answer(overlap: int, target: Any):
    """Tests every distance of the last block from the end; drafts past the end are right, too."""
    for length in range(20, 29):
        prompt = prompts()[2]
        answer = greedy(target.hf, prompt, 30, eos_token_id=None)
        config = EngineConfig(
            target=str(target.path),
            method="ngram",
            num_drafts=6,
            max_model_len=length,
            page_size=4,
            overlap=overlap,
        )
        engine = make_engine(
            config, lambda parts, _: Scripted(parts.state, 6, oracle), names=["ngram"]
        )
        script: Any = engine.proposers["ngram"]
        sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        request = engine.add(prompt, sampling)
        script.answers[request] = prompt + answer
        drain(engine, [request])
        assert request.output_ids == answer[: length - len(prompt)]
        assert request.finish_reason == "length"
        assert request.draft_counts.num_accepted == request.draft_counts.num_verified
