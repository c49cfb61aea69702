"""Random engines on a CPU, briefly; `make fuzz` runs as long as requested, also on a GPU."""

from __future__ import annotations

import pytest

from tests.support import expert_ties
from tests.support.expert_ties import Routers, explained_by_experts
from tests.support.full_marks import full_where, nightly_where
from tests.support.random_engines import TARGETS, EngineFactory, Findings, play_round

FAMILIES = list(TARGETS)
ROUNDS = 24
"""A round's seed determines its family."""
SHORT = (0, 2 * len(FAMILIES))
"""Rounds of the first family, which `make test` runs; `make test-all` runs one of each other."""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    return EngineFactory(tmp_path_factory.mktemp("pairs"), "cpu")


@full_where(lambda seed: seed not in SHORT)
@nightly_where(lambda seed: seed >= len(FAMILIES) and seed not in SHORT)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_engine_answers_like_plain_decoding(seed: int, factory: EngineFactory):
    findings = Findings()
    play_round(factory, seed, findings, FAMILIES)
    assert not findings.faults
    assert len(findings.ties) <= 1
    assert findings.counts[FAMILIES[seed % len(FAMILIES)], "answers"] > 0


@pytest.mark.full
def test_router_tie_is_told_from_a_fault(factory: EngineFactory):
    """In the second wave of this round, two experts of a row are 1e-6 apart; the engine chooses the
    one that float64 does, plain decoding the other. Its log probability differs by 0.2."""
    findings = Findings()
    play_round(factory, 30058, findings, ["qwen3_5_moe"])
    assert not findings.faults


def test_only_a_swapped_expert_explains_a_log_probability(
    factory: EngineFactory, monkeypatch: pytest.MonkeyPatch
):
    target = factory.pair("qwen3_5_moe").target
    tokens = [7 * i % 60 for i in range(12)]
    right = Routers(target).logprobs(tokens[:-1])[-1, tokens[-1]].item()
    assert explained_by_experts(target, tokens, 11, (right, right))
    assert not explained_by_experts(target, tokens, 11, (right, right - 0.2))
    monkeypatch.setattr(expert_ties, "ROUTER_TIE", 0.5)
    routers = Routers(target)
    changes = [
        routers.logprobs(tokens[:-1], row)[-1, tokens[-1]].item()
        for row in routers.ties(tokens[:-1])
    ]
    swapped = max(changes, key=lambda value: abs(value - right))
    assert abs(swapped - right) > 0.01
    assert explained_by_experts(target, tokens, 11, (right, swapped))
    assert not explained_by_experts(target, tokens, 11, (right, right + 0.5))
