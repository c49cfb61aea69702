"""A head in the checkpoint beside `tie_word_embeddings: true`, against transformers: it is used if
it differs from the embedding, and held once if it is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from strobe.config import EngineConfig
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.weight_loading import check_target_tensors, load_draft, load_target
from strobe.parallel.split import Split
from strobe.sampling_params import SamplingParams
from strobe.tools.checkpoint_info import describe
from tests.support.engine_runs import make_engine, run
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import HIDDEN, VOCAB, edit_json, make_draft, make_target
from tests.support.transformers_parity import greedy

PROMPT = [1, 2, 3, 4, 5]
COLD = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_positions": 40,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
TARGETS = {
    "qwen3": (make_target, {}),
    "qwen3_5": (make_hybrid, {}),
    **FAMILIES,
}
ORACLES = [name for name in TARGETS if not name.endswith(("MXFP4", "FP8"))]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edit_tensors(path: Path, **changes: torch.Tensor | None) -> None:
    """Set or, with None, delete the embedding or the head."""
    names = {"embedding": EMBEDDING, "head": HEAD}
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        tensors.pop(names[key], None)
        if value is not None:
            tensors[names[key]] = value
    save_file(tensors, file, {"format": "pt"})


def make_tied(path: Path, name: str, **changes: torch.Tensor | None) -> None:
    make, options = TARGETS[name]
    make(path, **options | {"tie_word_embeddings": True})
    edit_tensors(path, **changes)


def random_head() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(123)) * 0.5


def answer(path: Path, **options: Any) -> list[int]:
    config = EngineConfig(target=str(path), method="none", max_model_len=64, **options)
    return run(make_engine(config), [PROMPT], COLD)[0]


def expected_answer(path: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return greedy(model, PROMPT, 8)


@pytest.mark.parametrize("name", ORACLES)
def test_tied_config_uses_the_checkpoints_own_head(name: str, tmp_path: Path):
    make_tied(tmp_path, name)
    without = answer(tmp_path)
    edit_tensors(tmp_path, head=random_head())
    expected = expected_answer(tmp_path)
    assert answer(tmp_path) == expected != without
    assert describe(tmp_path)["tie_embeddings"] is False


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - set(ORACLES)))
def test_quantized_checkpoint_uses_its_own_head(name: str, tmp_path: Path):
    make_tied(tmp_path, name, head=random_head())
    tied = answer(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert answer(tmp_path) == tied


@pytest.mark.parametrize("weight_dtype", ["float32", "float16", "int8"])
def test_packed_weights_use_the_checkpoints_own_head(weight_dtype: str, tmp_path: Path):
    make_tied(tmp_path, "qwen3", head=random_head())
    tied = answer(tmp_path, weight_dtype=weight_dtype)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    assert answer(tmp_path, weight_dtype=weight_dtype) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_head_equal_to_the_embedding_is_held_once(tied: bool, tmp_path: Path):
    make_tied(tmp_path, "qwen3")
    expected = answer(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING]
    edit_tensors(tmp_path, head=embedding.clone())
    edit_json(tmp_path / "config.json", tie_word_embeddings=tied)
    config = load_target_config(tmp_path)
    assert check_target_tensors(tmp_path, config).lm_head is None
    target = load_target(tmp_path, config, **OPTIONS)
    assert target.output.weight is target.embed_tokens.weight
    assert answer(tmp_path) == expected


def test_head_differs_in_its_last_value_only(tmp_path: Path):
    make_tied(tmp_path, "qwen3")
    head = load_file(tmp_path / "model.safetensors")[EMBEDDING].clone()
    head[-1, -1] += 1
    edit_tensors(tmp_path, head=head)
    target = load_target(tmp_path, load_target_config(tmp_path), **OPTIONS)
    assert torch.equal(target.output.weight, head)


def test_tied_checkpoint_may_store_only_the_head(tmp_path: Path):
    make_tied(tmp_path, "qwen3")
    embedding = load_file(tmp_path / "model.safetensors")[EMBEDDING].clone()
    expected = answer(tmp_path)
    edit_tensors(tmp_path, embedding=None, head=embedding)
    assert answer(tmp_path) == expected == expected_answer(tmp_path)


def test_ranks_share_the_checkpoints_own_head(tmp_path: Path):
    make_tied(tmp_path, "qwen3", head=random_head())
    config = load_target_config(tmp_path)
    halves: list[torch.Tensor] = []
    for rank in range(2):
        split = Split(rank=rank, size=2, draft_size=2)
        own_config, _ = split.split(config, None)
        target = load_target(tmp_path, own_config, open=split.opener("auto"), **OPTIONS)
        halves.append(target.output.weight)
    assert torch.equal(torch.cat(halves), random_head())


def test_drafter_head_equal_to_its_own_embedding_is_held_once(tmp_path: Path):
    make_target(tmp_path / "target")
    draft = make_draft(tmp_path / "draft", top={"tie_word_embeddings": True})
    file, own = draft / "model.safetensors", random_head()
    tensors = load_file(file)
    save_file({**tensors, "embed_tokens.weight": own, "lm_head.weight": own.clone()}, file)
    target = load_target(tmp_path / "target", load_target_config(tmp_path / "target"), **OPTIONS)
    drafter = load_draft(draft, load_draft_config(draft), target, **OPTIONS)
    assert torch.equal(drafter.output.weight, own)
    assert drafter.output.weight.data_ptr() == drafter.embedding.data_ptr()
