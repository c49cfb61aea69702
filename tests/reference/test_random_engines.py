"""Random engines on a CPU, briefly; `make fuzz` runs as long as requested, also on a GPU."""

from __future__ import annotations

import pytest

from tests.support.full_marks import full_where
from tests.support.random_engines import TARGETS, EngineFactory, Findings, play_round

FAMILIES = list(TARGETS)
ROUNDS = 24
"""A round's seed determines its family."""
SHORT = (0, 2 * len(FAMILIES))
"""Rounds of the first family, which `make test` runs."""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    return EngineFactory(tmp_path_factory.mktemp("pairs"), "cpu")


@full_where(lambda seed: seed not in SHORT)
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_random_engine_answers_like_plain_decoding(seed: int, factory: EngineFactory):
    findings = Findings()
    play_round(factory, seed, findings, FAMILIES)
    assert not findings.faults
    assert len(findings.ties) <= 1
    assert findings.counts[FAMILIES[seed % len(FAMILIES)], "answers"] > 0
