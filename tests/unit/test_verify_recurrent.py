"""`strobe verify` on a target with recurrent layers, whose kept states it must not confuse."""

from __future__ import annotations

import shutil

import pytest

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.engine import Engine
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.reference import Reference, make_reference
from strobe.tools.verify.verify import Verifier, make_engine
from strobe.tools.verify.verify_settings import VerifySettings
from tests.support.planted_faults import Plant, foreign_recurrent_state, foreign_state, planted
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.text_pair import TEXT_FILES, VOCAB


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    target = tmp_path_factory.mktemp("hybrid")
    make_hybrid(target, vocab_size=VOCAB)
    for name in TEXT_FILES:
        shutil.copy(DEMO_MODELS / "target" / name, target)
    return make_engine(EngineConfig(str(target), device="cpu", max_model_len=320))


@pytest.fixture(scope="module")
def reference(engine: Engine) -> Reference:
    return make_reference("transformers", engine)[0]


def verify(engine: Engine, reference: Reference, plant: Plant) -> Verification:
    settings = VerifySettings(tokens=1, max_tokens=6, seeds=0)
    verifier = Verifier(engine, settings, reference=reference)
    verifier.builder.texts = ["Sort these words: pear, apple, fig.", "What is 3 + 4?"]
    with planted(engine, plant):
        return verifier.run()


@pytest.mark.full
def test_verify_recurrent_target_has_no_fault(engine: Engine, reference: Reference):
    verification = verify(engine, reference, lambda engine, patch: None)
    assert not verification.of("fault"), verification.findings


@pytest.mark.parametrize(
    "plant", [pytest.param(foreign_state, marks=pytest.mark.full), foreign_recurrent_state]
)
def test_verify_finds_foreign_state_of_recurrent_layers(
    engine: Engine, reference: Reference, plant: Plant
):
    verification = verify(engine, reference, plant)
    assert verification.exit_status == 1, verification.findings
