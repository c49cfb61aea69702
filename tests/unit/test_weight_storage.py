"""How weights are stored, what they cost, and how exactly they are held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strobe.config import DEMO_MODELS
from strobe.engine.backend_choice import WeightFormat
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.quantization.methods import hold_stored
from strobe.tools.checkpoint_info import describe
from strobe.tools.weight_storage import errors, storage_facts, storage_text
from tests.support.stored_weights import FORMATS, store
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_target

RECORDED = Path(__file__).parents[1] / "recorded"
PLAIN = WeightFormat(fp8=False, packed=None, rounded=None)


def test_kinds_of_a_mixture_are_named_with_their_bytes():
    path = RECORDED / "compressed-tensors-mixed"
    config = load_target_config(path)
    facts = storage_facts(Checkpoint(path), config, PLAIN, torch.bfloat16)
    assert facts["MLP"]["stored"] == {"NVFP4": 2, "FP8": 1}
    assert facts["head"]["stored"] == {"FP8": 1}
    checkpoint = Checkpoint(path)
    total = sum(map(checkpoint.bytes_of, checkpoint.shapes))
    assert sum(kind["bytes"] for kind in facts.values()) == total
    assert 0 < facts["MLP"]["error"]["mean"] < facts["MLP"]["error"]["max"] * 2 < 2**-7
    text = storage_text(facts["attention"])
    assert text.startswith("4 in FP8, 12,672 bytes; held in bfloat16, error 0.12% on average")


def test_weights_kept_as_stored_are_exact():
    path = RECORDED / "compressed-tensors-mixed"
    config = hold_stored(load_target_config(path), path)
    facts = storage_facts(Checkpoint(path), config, PLAIN, torch.bfloat16)
    assert facts["MLP"]["error"] == {"max": 0.0, "mean": 0.0}
    assert storage_text(facts["MLP"]).endswith("bytes; held as stored, exact")


def is_up(name: str) -> bool:
    return name.endswith("up_proj.weight")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_named(tmp_path: Path, name: str):
    make_target(tmp_path / "target")
    store(tmp_path / "target", tmp_path / "dense", name, is_up)
    path = tmp_path / "target"
    facts = storage_facts(Checkpoint(path), load_target_config(path), PLAIN, torch.float32)
    other = facts["MLP"]["stored"].pop("F32")
    assert other == 10
    assert sum(facts["MLP"]["stored"].values()) == 5
    (stored,) = facts["MLP"]["stored"]
    kinds = ("FP8", "int8", "NVFP4", "MXFP4", "MXFP8")
    kind = next((kind for kind in kinds if kind in name), "int4")
    assert stored.startswith(kind)


@pytest.mark.parametrize("family", ["gpt_oss in MXFP4", "experts in FP8"])
def test_experts_stay_as_stored(tmp_path: Path, family: str):
    make, changes = FAMILIES[family]
    make(tmp_path / "target", **changes)
    path = tmp_path / "target"
    facts = storage_facts(Checkpoint(path), load_target_config(path), PLAIN, torch.bfloat16)
    stored = "MXFP4" if "MXFP4" in family else "FP8"
    assert facts["experts"]["stored"][stored] >= 10
    assert facts["experts"]["held"] == "as stored"


@pytest.mark.parametrize(
    ("weights", "held", "mean"),
    [
        (PLAIN._replace(fp8=True), "fp8, a scale per row", 0.022),
        (PLAIN._replace(rounded="int8"), "int8", 0.01),
        (PLAIN._replace(rounded="int4"), "int4", 0.09),
        (PLAIN._replace(packed="int8"), "int8", 0.01),
        (PLAIN._replace(packed="int4"), "int4", 0.08),
    ],
)
def test_errors_of_rounding_are_measured(weights: WeightFormat, held: str, mean: float):
    path = DEMO_MODELS / "target"
    facts = storage_facts(Checkpoint(path), load_target_config(path), weights, torch.bfloat16)
    assert facts["MLP"]["held"] == held
    assert facts["MLP"]["error"]["mean"] == pytest.approx(mean, rel=0.35)
    assert facts["norms and others"]["error"] == {"max": 0.0, "mean": 0.0}


def test_errors_are_shares_of_the_values():
    values = torch.tensor([[1.0, -4.0], [2.0, 1.0]])
    assert errors(values, lambda rows: rows + 0.5) == {"max": 0.125, "mean": 0.25}


def test_info_says_how_weights_are_stored():
    facts = describe(RECORDED / "compressed-tensors-nvfp4-head")
    assert facts["stored_weights"]["head"] == (
        "1 in NVFP4, 2,308 bytes; held in float32, rounded; exact with weight_dtype stored"
    )
    assert facts["stored_weights"]["embedding"].endswith("; held in float32, exact")
