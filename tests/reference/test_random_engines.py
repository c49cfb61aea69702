"""Random engines on a CPU, briefly; `make fuzz` runs as long as requested, also on a GPU."""

from __future__ import annotations

import pytest
from random_engines import TARGETS, EngineFactory, Findings, play_round

FAMILIES = list(TARGETS)
ROUNDS = 24
"""`make test` runs those of the first family; a round's seed determines its family."""


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> EngineFactory:
    return EngineFactory(tmp_path_factory.mktemp("pairs"), "cpu")


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.full] if seed % len(FAMILIES) else [])
        for seed in range(ROUNDS)
    ],
)
def test_random_engine_answers_like_plain_decoding(seed: int, factory: EngineFactory):
    findings = Findings()
    play_round(factory, seed, findings, FAMILIES)
    assert not findings.faults
    assert len(findings.ties) <= 1
    assert findings.counts[FAMILIES[seed % len(FAMILIES)], "answers"] > 0
