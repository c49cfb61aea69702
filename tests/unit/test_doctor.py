"""The doctor on the demo models, and on copies with one fault each."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.cli.main import main
from strobe.config import DEMO_MODELS, EngineConfig
from strobe.step import TAIL, Plan, Span, StepResult
from strobe.tools.doctor import measure
from strobe.tools.doctor import run as doctor
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.format_loss import other_ways
from strobe.tools.doctor.measure import MarginFit, gain
from strobe.tools.doctor.pair_checks import hashes
from strobe.tools.doctor.tokenizers import fingerprint
from tests.support.full_marks import full_where
from tests.support.tiny_checkpoints import edit_json


@pytest.fixture(scope="module", autouse=True)
def short() -> Any:
    """Use fewer prompts and shorter answers, enough to find the better variant."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "PROMPTS", doctor.PROMPTS[1::2])
        patch.setattr(doctor, "MAX_TOKENS", 40)
        patch.setattr(measure, "BASES", (1e4, 1e6))
        yield


@dataclass
class Copies:
    """Copies of the demo target and drafter."""

    target: Path
    draft: Path

    def examine(self) -> Report:
        config = EngineConfig(target=str(self.target), draft=str(self.draft), device="cpu")
        return doctor.examine(config)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    for part in ("target", "draft"):
        shutil.copytree(DEMO_MODELS / part, tmp_path / part)
    return Copies(tmp_path / "target", tmp_path / "draft")


def nested(path: Path, **changes: Any) -> None:
    """Change keys of a drafter's dflash_config."""
    config = json.loads((path / "config.json").read_text())
    config["dflash_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


def offset(pair: Copies) -> None:
    nested(pair.draft, target_layer_ids=[2, 5, 8, 11, 14])


def mask_token(pair: Copies) -> None:
    nested(pair.draft, mask_token_id=500)


def rope_base(pair: Copies) -> None:
    edit_json(pair.draft / "config.json", rope_theta=1e6)


def causality(pair: Copies) -> None:
    edit_json(pair.draft / "config.json", is_causal=True)


def anchor(pair: Copies) -> None:
    """DeepSpec's layout, whose first slot predicts too."""
    path = pair.draft / "config.json"
    keys = json.loads(path.read_text())["dflash_config"]
    edit_json(path, architectures=["Qwen3DSparkModel"], dflash_config=None, markov_rank=0, **keys)


def tensor(pair: Copies) -> None:
    file = pair.draft / "model.safetensors"
    tensors = load_file(file)
    tensors["layers.1.mlp.down_proj.weight"] = tensors["layers.1.mlp.down_proj.weight"][:100]
    save_file({name: value.contiguous() for name, value in tensors.items()}, file)


def tokenizer(pair: Copies) -> None:
    """Shuffle the ids of the words, as another training of the tokenizer would."""
    path = pair.target / "tokenizer.json"
    content = json.loads(path.read_text())
    words = [word for word, i in content["model"]["vocab"].items() if 300 < i < 2044]
    ids = [content["model"]["vocab"][word] for word in words]
    random.Random(0).shuffle(ids)
    content["model"]["vocab"].update(zip(words, ids, strict=True))
    path.write_text(json.dumps(content))


def vocabulary(pair: Copies) -> None:
    edit_json(pair.draft / "config.json", vocab_size=4096)


BROKEN: dict[str, tuple[Callable[[Copies], None], str, str]] = {
    "offset by one": (offset, "layer offset", "features of one layer before the layers in "),
    "wrong mask token": (mask_token, "mask token", "With 3 (the tokenizer's mask token)"),
    "wrong rope base": (rope_base, "rope", "With rope with base 10000"),
    "flipped causality": (causality, "causality", "With bidirectional layers"),
    "anchor layout": (anchor, "anchor layout", "With a first slot that predicts nothing"),
    "truncated tensor": (tensor, "drafter's tensors", "layers.1.mlp.down_proj.weight has shape"),
    "other tokenizer": (tokenizer, "tokenizer", "decoding and encoding the answers preserves only"),
    "other vocabulary": (vocabulary, "fit", "vocab_size is 4096, the target's is 2048"),
}


@full_where(lambda name: name not in ("truncated tensor", "other vocabulary"))
@pytest.mark.parametrize("name", BROKEN)
def test_doctor_reports_the_fault(copies: Copies, name: str):
    inject_fault, about, says = BROKEN[name]
    inject_fault(copies)
    faults = copies.examine().faults
    assert [fault.about for fault in faults] == [about]
    assert says in faults[0].says


def test_demo_models_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["healthy"] is True
    assert {finding["level"] for finding in reported["findings"]} == {"ok"}
    off, on = reported["measured"]
    assert (off["thinking"], on["thinking"]) == (False, True)
    for row in (off, on):
        assert row["tokens_per_step"] > 10
        rates = row["rate_per_position"]
        assert len(rates) == 15
        assert rates == sorted(rates, reverse=True)
    first = reported["margins"][0]
    assert first["blocks"] == sum(row["steps"] for row in (off, on))
    assert [row["blocks"] for row in reported["margins"]] == sorted(
        [row["blocks"] for row in reported["margins"]], reverse=True
    )
    for row in reported["margins"]:
        assert 0 <= row["chance_at_low"] <= row["chance_at_high"] <= 1
        assert 0 <= row["low_evidence"] <= row["high_evidence"]
    kinds = {variant["kind"] for variant in reported["variants"]}
    assert kinds == {"as it is", "layer offset", "causality", "anchor layout", "rope"}
    memory = reported["facts"]["memory"]
    assert memory["target's keys and values of a token"] == 2 * 16 * 2 * 64 * 4
    assert memory["drafter's keys and values of a token"] == 2 * 3 * 2 * 64 * 4
    assert memory["tokens that fit"] > 1000
    assert all(len(value) == 64 for value in reported["facts"]["files"]["drafter"].values())
    assert reported["facts"]["fit"]["format"] == "z-lab"


def test_acceptance_lost_by_rounding_is_measured_on_own_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Take the list 9, 4, 7 and sort it."}\n')
    options = ["--weight-dtype", "int8", "--draft-weight-dtype", "int4", "--data", str(data)]
    assert main(["doctor", "--device", "cpu", "--json", *options]) == 0
    reported = json.loads(capsys.readouterr().out)
    names = ["as set", "target not in int8", "drafter not in int4", "neither rounded"]
    assert [row["what"] for row in reported["formats"]] == names
    first = reported["formats"][0]["tokens_per_step"]
    assert first == reported["measured"][0]["tokens_per_step"]
    for row in reported["formats"][1:]:
        assert row["lost"] == pytest.approx(1 - first / row["tokens_per_step"], abs=1e-3)
    about = [finding["about"] for finding in reported["findings"]]
    assert about.count("rounding") == 2
    assert "held in int8, error" in reported["facts"]["target's weights"]["MLP"]
    assert "held in int4, error" in reported["facts"]["drafter's weights"]["MLP"]


@pytest.mark.parametrize(
    ("target", "draft", "names"),
    [
        ("auto", None, []),
        ("stored", None, []),
        ("int4", None, ["target not in int4", "drafter not in int4", "neither rounded"]),
        ("int4", "auto", ["target not in int4"]),
        ("auto", "int8", ["drafter not in int8"]),
    ],
)
def test_only_rounded_weights_are_measured_otherwise(
    target: str, draft: str | None, names: list[str]
):
    config = EngineConfig(weight_dtype=target, draft_weight_dtype=draft)
    ways = other_ways(config)
    assert list(ways) == names
    for name, way in ways.items():
        if name.startswith("target"):
            assert way.draft_weight_dtype == (draft or target)


def test_empty_file_of_prompts_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "none.jsonl").write_text("\n")
    assert main(["doctor", "--data", str(tmp_path / "none.jsonl")]) == 2
    assert "holds no prompt; give JSON lines" in capsys.readouterr().err


def test_fit_reports_chance_by_evidence():
    rng, margin_fit = np.random.default_rng(0), MarginFit(2)
    for _ in range(100):
        margins = rng.choice([1.0, 9.0], (3, 1)).repeat(2, 1)
        right = rng.random((3, 2)) < np.where(margins > 5, 0.9, 0.4)
        accepted = [int(row.argmin()) if not row.all() else 2 for row in right]
        spans = tuple(Span(i, 5, 5, (TAIL,), 2, "dflash", 3) for i in range(2))
        spans = (*spans, Span(2, 5, 5, (TAIL,), 0, None, 1))
        accepted[2] = 0
        margin_fit.observe(Plan(spans), StepResult([], accepted, margins=margins.tolist()))
    first, second = margin_fit.by_position()
    assert first["blocks"] == 200
    assert second["blocks"] == pytest.approx(200 * first["right"])
    for row in (first, second):
        assert (row["low_evidence"], row["high_evidence"]) == (1.0, 3.0)
        assert row["chance_at_low"] == pytest.approx(0.4, abs=0.12)
        assert row["chance_at_high"] == pytest.approx(0.9, abs=0.08)


def test_large_files_of_equal_size_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.tools.doctor.pair_checks.HASHED_BYTES", 1 << 20)
    path, content = tmp_path / "model.safetensors", bytearray(3 << 20)
    digests: set[str] = set()
    for offset in (0, 1 << 20, (3 << 20) - 1, None):
        if offset is not None:
            content[offset] += 1
        path.write_bytes(content)
        digests |= set(hashes(tmp_path).values())
    assert len(digests) == 3
    assert all(digest.startswith("size and 256 samples: ") for digest in digests)


def test_report_ends_with_faults(copies: Copies, capsys: pytest.CaptureFixture[str]):
    vocabulary(copies)
    assert main(["doctor", str(copies.target), str(copies.draft), "--device", "cpu"]) == 1
    page = " ".join(capsys.readouterr().out.split())
    assert "vocab_size is 4096, the target's is 2048" in page
    assert page.endswith("1 thing wrong.")
    assert "Not measured, since the pair cannot run as it is." in page


def test_drafter_with_different_tokenizer_is_a_fault(copies: Copies):
    shutil.copy(copies.target / "tokenizer.json", copies.draft)
    assert fingerprint(copies.draft) == fingerprint(copies.target)
    content = json.loads((copies.draft / "tokenizer.json").read_text())
    content["model"]["merges"].pop()
    (copies.draft / "tokenizer.json").write_text(json.dumps(content))
    edit_json(copies.draft / "config.json", vocab_size=4096)  # so that nothing is measured
    about = {fault.about for fault in copies.examine().faults}
    assert about == {"tokenizer", "fit"}


def test_fingerprint_ignores_the_files_layout(copies: Copies):
    path = copies.target / "tokenizer.json"
    before = fingerprint(copies.target)
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert fingerprint(copies.target) == before
    assert fingerprint(copies.draft) is None


def test_doctor_needs_a_drafter(target: Any, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", str(target.path)]) == 2
    assert "no drafter is named; add one." in capsys.readouterr().err


def test_gain_is_the_paired_difference_in_standard_errors():
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(0, 8, (400,), generator=generator)
    changed = base + torch.randint(0, 2, (400,), generator=generator)
    difference = (changed - base).double()
    expected = float(difference.mean() / (difference.std() / 20))
    assert gain(base.tolist(), changed.tolist()) == pytest.approx(expected)
    assert gain([1, 2], [1, 2]) == 0.0
    assert gain([1, 2], [2, 3]) == float("inf")
