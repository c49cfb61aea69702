"""`strobe verify` in bfloat16, where the bound is that of the rounding measured there."""

from __future__ import annotations

from pathlib import Path

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.reference import Reference, make_reference
from strobe.tools.verify.verify import Verifier, make_engine
from strobe.tools.verify.verify_settings import VerifySettings
from tests.support.planted_faults import Plant, planted, wrong_token


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(device="cpu", dtype="bfloat16", max_model_len=320)
    return make_engine(locate_models(config))


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Reference:
    return make_reference("auto", engine)[0]


def verify(engine: Engine, reference: Reference, path: Path, plant: Plant) -> Verification:
    path.write_text("Take the list apple, wind, beach and write it in reverse order.")
    settings = VerifySettings(prompts=str(path), tokens=1, max_tokens=12, seeds=0)
    with planted(engine, plant):
        return Verifier(engine, settings, reference=reference).run()


@pytest.mark.full
def test_verify_bfloat16_is_clean_within_the_rounding_measured(
    engine: Engine, reference: Reference, tmp_path: Path
):
    verification = verify(engine, reference, tmp_path / "prompts.txt", lambda engine, patch: None)
    assert verification.verdict == "clean", verification.findings
    rounding = verification.figures["rounding"]
    assert 1e-3 < rounding["largest"] < rounding["bound"] <= rounding["limit"]


@pytest.mark.full
def test_verify_bfloat16_finds_wrong_token(engine: Engine, reference: Reference, tmp_path: Path):
    verification = verify(engine, reference, tmp_path / "prompts.txt", wrong_token(20))
    assert verification.exit_status == 1, verification.findings
