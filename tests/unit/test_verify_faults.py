"""`strobe verify` on the demo models: clean as they are, and with each planted fault a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.sampling_params import SamplingParams
from strobe.tools.verify.cases import Case
from strobe.tools.verify.check import Checker
from strobe.tools.verify.filter_edges import FILTERS, Filter
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.reference import Reference, make_reference
from strobe.tools.verify.runs import Run, run_cases
from strobe.tools.verify.verify import Verifier, make_engine
from strobe.tools.verify.verify_settings import VerifySettings
from tests.support.planted_faults import PLANTS, Plant, planted

Verify = Callable[..., Verification]

TEXTS = (
    "There are 54 people on a bus. 41 people leave at a stop. How many people are there?",
    "Take the list apple, wind, beach, ladder, olive and write it in reverse order.",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(locate_models(EngineConfig(device="cpu", max_model_len=320)))


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Reference:
    return make_reference("auto", engine)[0]


@pytest.fixture
def verify(engine: Engine, reference: Reference, tmp_path: Path) -> Verify:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS))

    def run(plant: Plant | None = None, **changes: object) -> Verification:
        fields: dict[str, Any] = {
            "prompts": str(path),
            "tokens": 1,
            "max_tokens": 12,
            "seeds": 0,
        } | changes
        verifier = Verifier(engine, VerifySettings(**fields), reference=reference)
        if plant is None:
            return verifier.run()
        with planted(engine, plant):
            return verifier.run()

    return run


def test_verify_clean_engine_is_clean(verify: Verify):
    verification = verify(seeds=16)
    assert verification.verdict == "clean", verification.findings
    assert verification.exit_status == 0


SHORT = ("one wrong token", "top-p off by one")
"""What `make test` finds; `make test-all` finds the others, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.full]) for n in PLANTS]
)
def test_verify_finds_planted_fault(verify: Verify, name: str):
    verification = verify(PLANTS[name], seeds=16 if "top-p" in name else 0)
    assert verification.exit_status == 1, verification.findings


@pytest.mark.parametrize("tested", FILTERS[1:], ids=lambda tested: tested.name)
def test_filter_is_tested_where_one_token_too_many_is_probable(
    engine: Engine, reference: Reference, tested: Filter
):
    """If one draw in seven takes it, 16 seeds of each way miss it in 8 of 1,000 runs."""
    checker = Checker(reference, engine)
    case = Case("chat", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=32))
    answers = run_cases(engine, [case], speculate=False)
    checker.check_runs({"plain": Run({"chat": answers}, 1.0)})
    row, temperature = tested.choose(checker.edges, bound=1e-3)
    assert tested.kept is not None
    weights = np.exp((np.array(row.top) - row.top[0]) / temperature)[: tested.kept + 1]
    assert weights[-1] / weights.sum() >= 1 / 7
    assert row.gap(tested.kept) > 1e-3
