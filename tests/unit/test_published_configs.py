"""Every published config in tests/corpus loads, or is rejected for its true reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.hub.pairs import METHODS
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.config_readers.detection import detect, supported_methods
from strobe.models.config_readers.tensor_names import own_name
from strobe.models.families import FAMILIES
from strobe.models.model_config import DraftConfig
from strobe.models.quantization.methods import HINT
from strobe.models.weight_loading import check_draft_tensors, check_target_tensors
from tests.support.published_configs import ANSWERS, checkpoint_of, names, published

SUPPORTED = {
    "{families}": ", ".join(FAMILIES),
    "{methods}": supported_methods(),
    "{formats}": HINT,
}
LOADERS = {"drafters": load_draft_config, "targets": load_target_config}
CHECKPOINTS = [(kind, name) for kind in LOADERS for name in names(kind)]


def answer_of(kind: str, name: str, directory: Path) -> str:
    """Return "loads" or the error, without the directory's path."""
    checkpoint_of(published(kind, name), directory, ANSWERS[kind][name])
    try:
        LOADERS[kind](directory)
    except ValueError as error:
        return str(error).replace(f"{directory}/", "")
    return "loads"


def test_every_published_config_has_an_answer():
    for kind in LOADERS:
        assert sorted(ANSWERS[kind]) == names(kind)


@pytest.mark.parametrize(("kind", "name"), CHECKPOINTS)
def test_published_config_gets_its_answer(tmp_path: Path, kind: str, name: str):
    answer = ANSWERS[kind][name]
    sentence = answer.get("sentence", "loads")
    for placeholder, value in SUPPORTED.items():
        sentence = sentence.replace(placeholder, value)
    assert answer_of(kind, name, tmp_path) == sentence
    if answer["answer"] == "rejected":
        assert answer["reason"] in sentence


@pytest.mark.parametrize("name", names("drafters"))
def test_published_drafters_method_and_format_are_told_by_keys(name: str):
    dialect = detect(published("drafters", name)["config"])
    answer = ANSWERS["drafters"][name]
    assert answer["method"] == (dialect and dialect.method)
    if dialect is not None and dialect.runs:
        assert answer["format"] == dialect.format


@pytest.mark.parametrize("name", names("targets"))
def test_published_targets_are_no_drafters(name: str):
    assert detect(published("targets", name)["config"]) is None


LOADING = [
    (kind, name)
    for kind, name in CHECKPOINTS
    if ANSWERS[kind][name]["answer"] == "loads"
    and ANSWERS[kind][name].get("method", "DFlash") in METHODS
]


class ListedCheckpoint(Checkpoint):
    """Tensors by their names, dtypes and shapes only."""

    def __init__(self, directory: Path, tensors: dict[str, Any]):
        self.directory = self.source = directory
        self.shapes = {own_name(name): tuple(shape) for name, (_, shape) in tensors.items()}
        self.dtypes = {own_name(name): dtype for name, (dtype, _) in tensors.items()}
        self.types = {}
        self.coded = set()

    def read(self, name: str) -> torch.Tensor:
        """Return the table of a head for the first tokens; nothing else is read."""
        (size,) = self.shapes[name]
        if name == "d2t":
            return torch.zeros(size, dtype=torch.int64)
        return torch.arange(size) < self.shapes["d2t"][0]


@pytest.mark.parametrize(("kind", "name"), LOADING)
def test_published_config_that_loads_makes_a_model(tmp_path: Path, kind: str, name: str):
    """Without weights, and with the published tensors where their list is known."""
    entry = published(kind, name)
    checkpoint_of(entry, tmp_path, {})
    if kind == "targets":
        check_target_tensors(tmp_path, load_target_config(tmp_path), open=None)
        return
    config = load_draft_config(tmp_path)
    check_draft_tensors(tmp_path, config, open=None)
    if entry.get("tensors"):
        listed = ListedCheckpoint(tmp_path, entry["tensors"])
        check_draft_tensors(tmp_path, config, open=lambda directory: listed)


INCOMPLETE = [(k, n) for k, n in CHECKPOINTS if ANSWERS[k][n]["answer"] == "incomplete"]


@pytest.mark.parametrize(("kind", "name"), INCOMPLETE)
def test_part_of_a_config_lacks_only_keys(kind: str, name: str):
    """What stops a part is a key that its source does not show, or shows in part."""
    entry = published(kind, name)
    assert entry["partial"]
    sentence = ANSWERS[kind][name]["sentence"]
    missing = re.match(r"config\.json: (\w+) is None", sentence)
    if missing is None:
        missing = re.search(r"(model_type) None|(architectures) None is not a drafter", sentence)
    keys = [] if missing is None else [key for key in missing.groups() if key]
    assert not set(keys).intersection(entry["config"])
    assert keys or "layer_types must list one type" in sentence


WHOLE: dict[str, dict[str, Any]] = {
    "DeepSpec": {
        **published("drafters", "deepseek-ai__dspark_qwen3_14b_block7-mlx-4bit")["config"],
        "quantization": None,
    },
    "speculators": published("drafters", "RedHatAI__Qwen3.6-35B-A3B-speculator.dspark")["config"],
    "z-lab": published("drafters", "z-lab__Qwen3.5-4B-DFlash")["config"],
    "DFlash2": published("drafters", "z-lab__Qwen3.8-27B-DFlash2")["config"],
    "SpecForge": published("drafters", "SpecForge__qwen3-8b-dspark")["config"],
}
"""A whole config of each format, to which parts add their keys."""


def merged(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return the whole config with the part's keys, which say the same as lists of its own."""
    values = dict(whole)
    for key, value in part.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            values[key] = merged(values[key], value)
        elif key != "layer_types":
            values[key] = value
    return values


@pytest.mark.parametrize("name", [name for kind, name in INCOMPLETE if kind == "drafters"])
def test_every_key_of_a_drafters_part_is_known(tmp_path: Path, name: str):
    part = published("drafters", name)["config"]
    dialect = detect(part)
    is_dflash2 = dialect is None or dialect.method == "DFlash2"
    base = WHOLE["DFlash2" if dialect is None or is_dflash2 else dialect.format]
    directory = checkpoint_of({"config": merged(base, part)}, tmp_path, {})
    config = load_draft_config(directory)
    if dialect is not None:
        assert (config.method, config.format) == (dialect.method, dialect.format)


@pytest.mark.parametrize("name", [name for kind, name in INCOMPLETE if kind == "targets"])
def test_every_key_of_a_targets_part_is_known(tmp_path: Path, name: str):
    bases = {
        "gemma": "google__gemma-4-26B-A4B",
        "Qwen3-8B": "Qwen__Qwen3-8B",
        "Qwen2.5": "Qwen__Qwen3-8B",  # with the same keys as Qwen2.5's
    }
    named = [base for words, base in bases.items() if words in name]
    base = next(iter(named), "Qwen__Qwen3.8-27B")
    values = merged(published("targets", base)["config"], published("targets", name)["config"])
    if "Qwen2.5" in name:
        values["model_type"] = "qwen2"
    config = load_target_config(checkpoint_of({"config": values}, tmp_path, {}))
    assert config.quantization is not None
    assert config.quantization.label.startswith(("compressed-tensors", "ModelOpt", "AWQ"))


def test_head_counts_beside_text_config_must_agree(tmp_path: Path):
    """unsloth's Qwen3.8-27B has numbers of heads beside text_config."""
    entry = published("targets", "unsloth__Qwen3.8-27B-NVFP4")
    config = {k: v for k, v in entry["config"].items() if k != "quantization_config"}
    assert "head_dim" in config
    directory = checkpoint_of({"config": config}, tmp_path, {})
    assert load_target_config(directory).decoder.head_dim == 256
    checkpoint_of({"config": {**config, "head_dim": 128}}, tmp_path, {})
    with pytest.raises(ValueError, match="head_dim is 128, but 256 in text_config"):
        load_target_config(directory)


def test_modelopts_file_beside_a_silent_config_is_read(tmp_path: Path):
    entry = published("targets", "nvidia__Llama-3.1-70B-Instruct-FP8")
    assert "quantization_config" not in entry["config"]
    directory = checkpoint_of(entry, tmp_path, {})
    quantization = load_target_config(directory).quantization
    assert quantization is not None
    assert quantization.label == "ModelOpt in FP8 with a scale per tensor"
    assert quantization.rules.ignored == ("lm_head",)
    (directory / "hf_quant_config.json").unlink()
    assert load_target_config(directory).quantization is None


def read(name: str, directory: Path) -> DraftConfig:
    entry = published("drafters", name)
    return load_draft_config(checkpoint_of(entry, directory, ANSWERS["drafters"][name]))


@pytest.mark.parametrize(
    ("name", "first", "drafts"),
    [
        ("z-lab__Qwen3.8-27B-DFlash2", False, 7),
        ("SpecForge__qwen3-8b-dspark", True, 7),
        ("Doopeworld__Qwen3.8-27B-DSpark-vLLM", True, 7),
        ("nvidia__MiniMax-M3-DSpark", True, 8),
        ("RedHatAI__Qwen3.6-35B-A3B-speculator.dspark", True, 8),
        ("z-lab__Qwen3.5-4B-DFlash", False, 15),
    ],
)
def test_published_blocks_have_their_layout(tmp_path: Path, name: str, first: bool, drafts: int):
    config = read(name, tmp_path)
    assert (config.anchor_first, config.block_drafts) == (first, drafts)


def test_published_dflash2_drafter_value_by_value(tmp_path: Path):
    config = read("z-lab__Qwen3.8-27B-DFlash2", tmp_path)
    assert config.capture == (6, 20, 34, 48, 62)
    assert config.mask_token_id == 248070
    assert config.head.selector_rank == 256
    assert {(mask.causal, mask.window) for mask in config.decoder.masks} == {(False, 2048)}
    glimmer = read("z-lab__Muse-Glimmer-30B-DFlash2", tmp_path)
    assert glimmer.output_multiplier == pytest.approx(1 / 26**0.5)
    assert glimmer.logit_softcap == 20.0


def test_published_dspark_drafter_value_by_value(tmp_path: Path):
    config = read("RedHatAI__Qwen3.6-35B-A3B-speculator.dspark", tmp_path)
    assert (config.draft_vocab_size, config.decoder.vocab_size) == (32000, 248320)
    assert config.capture == (2, 10, 20, 30, 37)
    assert (config.head.rank, config.head.kind, config.head.confidence) == (256, "vanilla", True)
    assert config.head.confidence_with_markov
    assert {(mask.causal, mask.window) for mask in config.decoder.masks} == {(True, 2048)}
    nvidia = read("nvidia__MiniMax-M3-DSpark", tmp_path)
    assert (nvidia.dtype, nvidia.num_target_layers, nvidia.head.confidence) == ("float32", 60, True)
