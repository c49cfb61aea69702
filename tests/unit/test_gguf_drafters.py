"""Drafters in GGUF files are the drafters that they were converted from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.models.architectures import load_draft_config
from strobe.models.checkpoint import Checkpoint
from strobe.sampling_params import SamplingParams
from tests.support.draft_heads import to_dflash2, to_dspark
from tests.support.engine_runs import make_engine, run
from tests.support.recorded_drafter import WatchedHead
from tests.support.tiny_checkpoints import make_draft, make_target

gguf = pytest.importorskip("gguf")

from tests.support.gguf_drafters import to_gguf  # noqa: E402
from tests.support.gguf_files import tiny  # noqa: E402

PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]
PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SLIDING = ("sliding_attention", "full_attention")
SCALED = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 1.5}


def windowed(path: Path, **top: Any) -> Path:
    return make_draft(path, layer_types=SLIDING, window=5, top=top)


DRAFTERS: dict[str, Callable[[Path], Path]] = {
    "DFlash": lambda path: make_draft(path / "d"),
    "DFlash, causal windows": lambda path: windowed(path / "d"),
    "DFlash, windows both ways": lambda path: windowed(path / "d", is_causal=False),
    "DFlash, scaled": lambda path: make_draft(path / "d", top=SCALED),
    "DFlash, sinks": lambda path: make_draft(path / "d", sinks=True),
    "DFlash2": lambda path: to_dflash2(make_draft(path / "s"), path / "d"),
    "DFlash2, codebooks with a suffix": lambda path: to_dflash2(
        make_draft(path / "s"), path / "d", suffix=".weight"
    ),
    "DSpark": lambda path: to_dspark(make_draft(path / "s", block=7), path / "d"),
    "DSpark, anchor apart": lambda path: to_dspark(
        make_draft(path / "s"), path / "d", sample_from_anchor=False
    ),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_target(path)
    return path


def drafts_of(target: Path, draft: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the answers and all drafts."""
    settings = EngineConfig(str(target), draft=str(draft), max_model_len=64, page_size=4)
    engine = make_engine(settings, lambda parts, _: WatchedHead(parts), names=["dflash"])
    head: Any = engine.proposers["dflash"]
    answers = run(engine, PROMPTS, PARAMS)
    return answers, [block.tokens for block in head.true_drafts()]


@pytest.mark.parametrize("name", DRAFTERS)
def test_file_drafts_as_the_drafter_that_was_converted(
    name: str, tmp_path: Path, tiny_target: Path
):
    source = DRAFTERS[name](tmp_path)
    file = to_gguf(source, tmp_path / "drafter.gguf")
    config = load_draft_config(gguf_directory(file))
    expected = load_draft_config(source)
    for part in ("decoder", "head", "method", "capture", "block_size", "mask_token_id"):
        assert getattr(config, part) == getattr(expected, part)
    assert config.anchor_first == expected.anchor_first
    answers, drafts = drafts_of(tiny_target, file)
    assert (answers, drafts) == drafts_of(tiny_target, source)
    assert len(drafts) > 4


def test_own_embedding_and_head_of_a_file_are_used(tmp_path: Path):
    source = make_draft(tmp_path / "d")
    values = load_file(source / "model.safetensors")
    noise = torch.Generator().manual_seed(3)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        values[name] = torch.randn(61, 32, generator=noise)
    save_file(values, source / "model.safetensors")
    checkpoint = Checkpoint(gguf_directory(to_gguf(source, tmp_path / "drafter.gguf")))
    for name, value in values.items():
        assert torch.equal(checkpoint.read(name), value), name


@pytest.mark.parametrize(("kind", "temperature"), [("Q8_0", 0.0), ("BF16", 1.0)])
def test_quantized_file_changes_no_answer(
    kind: str, temperature: float, tmp_path: Path, tiny_target: Path
):
    source = make_draft(tmp_path / "s", intermediate=64)
    file = to_gguf(to_dflash2(source, tmp_path / "d"), tmp_path / "drafter.gguf", kind)
    params = PARAMS.clone(temperature=temperature, seed=4)
    settings = EngineConfig(str(tiny_target), draft=str(file), max_model_len=64)
    plain = make_engine(settings.with_(draft=None, method="none"))
    engine = make_engine(settings)
    assert run(engine, PROMPTS, params) == run(plain, PROMPTS, params)
    assert engine.stats.draft_counts.num_verified > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"tokenizer.ggml.mask_token_id": None}, "lacks .* tokenizer.ggml.mask_token_id;"),
    "no layers": ({"dflash.target_layers": None}, "lacks the metadata dflash.target_layers;"),
    "DeepSeek-V4": (
        {"dflash.hyper_connection.count": 4},
        "describes a drafter for DeepSeek-V4's DSpark, which is not supported",
    ),
    "experts": ({"dflash.expert_count": 4}, "describes a drafter with experts, which"),
    "other layers": (
        {"dflash.decoder_arch": "laguna"},
        "describes a drafter with the layers of laguna, which is not supported",
    ),
    "part of a head": (
        {"dflash.rope.dimension_count": 4},
        "rope turns 4 of a head's 16 values",
    ),
    "rope": ({"dflash.rope.scaling.type": "longrope"}, "dflash.rope.scaling.type is 'longrope'"),
    "a fork's form": (
        {"general.architecture": "dflash-draft"},
        "describes a drafter for DFlash in the form of a fork of llama.cpp, which",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_drafter_is_a_one_line_error(name: str, tmp_path: Path, tiny_target: Path):
    changes, sentence = REFUSED[name]
    file = to_gguf(make_draft(tmp_path / "d"), tmp_path / "drafter.gguf", **changes)
    with pytest.raises(ValueError, match=sentence) as error:
        resolve(EngineConfig(str(tiny_target), draft=str(file)))
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_reduced_vocabulary_is_a_one_line_error(tmp_path: Path, tiny_target: Path):
    """llama.cpp stores the table of tokens in a type that no weight has."""
    writer = gguf.GGUFWriter(tmp_path / "drafter.gguf", "dflash")
    writer.add_tensor("d2t", np.arange(8, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"a drafter with a reduced vocabulary \(d2t\), which"):
        resolve(EngineConfig(str(tiny_target), draft=str(tmp_path / "drafter.gguf")))


def test_file_of_a_target_is_no_drafter(tmp_path: Path, tiny_target: Path):
    file = tiny(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match="is not a drafter for DFlash"):
        resolve(EngineConfig(str(tiny_target), draft=str(file)))
