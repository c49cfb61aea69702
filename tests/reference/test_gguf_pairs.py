"""Targets and drafters in GGUF files of each type of tensors, alone and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import from_numpy

from strobe.config import EngineConfig
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.models.quantization.gguf_codes import CODES
from strobe.sampling_params import SamplingParams
from tests.support.draft_heads import to_dflash2
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where
from tests.support.rank_threads import ranks
from tests.support.tested_formats import GGUF_TYPES
from tests.support.tiny_checkpoints import make_draft

pytest.importorskip("gguf")

from tests.support.gguf_drafters import gguf_name, to_gguf
from tests.support.gguf_files import (
    TOKENS,
    dequantized,
    metadata_of,
    model_of,
    tensors_of,
    write,
)

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Sizes that blocks of 256 values divide, also on two ranks."""
METADATA = {
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.key_length": 64,
    "llama.attention.value_length": 64,
    "llama.rope.dimension_count": 64,
}
SHORT = ("Q8_0", "Q4_K", "NVFP4")
"""Types that `make test` runs."""
PROMPTS = [[5, 80, 33, 12, 7], [7] * 11]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_drafts(path: Path, kind: str) -> tuple[Path, Path]:
    """Write a drafter in a type, and a copy of the same values; return their directories."""
    source = make_draft(
        path / "source",
        layer_ids=(0, 1),
        target_layers=2,
        intermediate=512,
        width=64,
        hidden=256,
        vocab=len(TOKENS),
    )
    draft = to_dflash2(source, path / "draft")
    stored = gguf_directory(to_gguf(draft, path / "draft.gguf", kind))
    file = draft / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        tensors[name] = from_numpy(dequantized(gguf_name(name), value.numpy(), kind))
    save_file(tensors, file)
    return stored, draft


@full_where(lambda kind: kind not in SHORT)
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_pair_in_each_type_answers_as_its_dense_copy(kind: str, tmp_path: Path):
    tensors = tensors_of("llama", model_of("llama", **SHAPE))
    metadata = metadata_of("llama") | METADATA
    dense_tensors = {name: dequantized(name, array, kind) for name, array in tensors.items()}
    target = gguf_directory(write(tmp_path / "target.gguf", metadata, tensors, kind))
    dense = gguf_directory(write(tmp_path / "dense.gguf", metadata, dense_tensors))
    draft, dense_draft = make_drafts(tmp_path, kind)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = EngineConfig(
        target=str(target),
        draft=str(draft),
        device="cpu",
        dtype="float32",
        weight_dtype="float32",
        kv_cache_memory="8MiB",
        adaptive=False,
    )
    answers = list[Any]()
    counts = list[tuple[int, int]]()
    for config in (
        settings.with_(target=str(dense), draft=None, method="none"),
        settings,
        settings.with_(target=str(dense), draft=str(dense_draft)),
    ):
        engine = make_engine(config)
        answers.append(run(engine, PROMPTS, params))
        drafts = engine.stats.draft_counts
        counts.append((drafts.num_verified, drafts.num_accepted))
    assert answers[0] == answers[1] == answers[2]
    assert counts[1] == counts[2]
    assert counts[1][0] > 0
    with ranks(settings, 2) as engine:
        assert run(engine, PROMPTS, params) == answers[0]
    if kind not in CODES:
        return
    stored = settings.with_(weight_dtype="stored")
    engine = make_engine(stored)
    assert run(engine, PROMPTS, params) == answers[0]
    drafts = engine.stats.draft_counts
    assert (drafts.num_verified, drafts.num_accepted) == counts[2]
    with ranks(stored, 2) as engine:
        assert run(engine, PROMPTS, params) == answers[0]
