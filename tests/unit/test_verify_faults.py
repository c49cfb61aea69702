"""`strobe verify` on the demo models: clean as they are, and with each planted fault a fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.reference import Reference, make_reference
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


SHORT = ("one wrong token", "foreign state", "top-p off by one", "grammar mask shifted")
"""What `make test` finds; `make test-all` finds the others, too."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.full]) for n in PLANTS]
)
def test_verify_finds_planted_fault(verify: Verify, name: str):
    verification = verify(PLANTS[name], seeds=48 if "top-p" in name else 0)
    assert verification.exit_status == 1, verification.findings
