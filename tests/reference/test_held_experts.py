"""Experts that are kept as stored have the values of their dequantized copies, alone and on several
ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe.config import EngineConfig
from strobe.models.architectures import load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization.methods import hold_stored
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.target import Target
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where
from tests.support.rank_threads import ranks
from tests.support.stored_weights import store, with_an_entry_per_expert
from tests.support.target_families import FAMILIES
from tests.support.tested_formats import EXPERTS
from tests.support.tiny_checkpoints import make_draft

OPTIONS: dict[str, Any] = {
    "max_positions": 16,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
BY_ACTIVATIONS = "GPTQ by activations"
PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


def make_pair(path: Path, name: str, family: str = "qwen3_moe", size: int = 32) -> Path:
    """Write a target with experts in a format, a copy of the same values and a drafter."""
    make, changes = FAMILIES[family]
    make(path / "target", **{**changes, "moe_intermediate_size": size})
    with_an_entry_per_expert(path / "target")
    store(path / "target", path / "dense", name, is_expert)
    make_draft(path / "draft")
    return path


def load(path: Path, *, held: bool = False) -> Target:
    config = load_target_config(path)
    return load_target(path, hold_stored(config, path) if held else config, **OPTIONS)


def experts_of(target: Target) -> dict[str, Linear]:
    linears = {path: m for path, m in target.named_modules() if isinstance(m, Linear)}
    return {path: linear for path, linear in linears.items() if linear.experts}


def tensors_of(linear: Linear) -> list[Tensor]:
    if linear.held_experts is None:
        return [value for value in (linear.weight, linear.scale) if value is not None]
    values = vars(linear.held_experts.stack).values()
    return [value for value in values if isinstance(value, Tensor)]


def check_held(path: Path) -> None:
    dense = experts_of(load(path / "dense"))
    held = experts_of(load(path / "target", held=True))
    for name, linear in held.items():
        values = linear.dense(torch.float32)
        torch.testing.assert_close(values, dense[name].weight, atol=0, rtol=3e-7)
        num_bytes = sum(tensor.nbytes for tensor in tensors_of(linear))
        assert num_bytes < 0.55 * dense[name].weight.nbytes


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_have_the_values_of_the_dequantized_copy(tmp_path: Path, name: str):
    check_held(make_pair(tmp_path, name))


@pytest.mark.parametrize("family", ["gemma4 with experts", "qwen3_5_moe"])
@pytest.mark.parametrize("name", ["FP8", "NVFP4", "int4"])
def test_families_hold_experts_as_stored(tmp_path: Path, family: str, name: str):
    check_held(make_pair(tmp_path, name, family))


@pytest.mark.parametrize("name", EXPERTS)
def test_planned_bytes_are_those_in_memory(tmp_path: Path, name: str):
    path = make_pair(tmp_path, name) / "target"
    config = hold_stored(load_target_config(path), path)
    planned = weight_bytes(check_target_tensors(path, config), torch.float32, fp8=False)
    target = load_target(path, config, **OPTIONS)
    experts = experts_of(target)
    actual = sum(tensor.nbytes for linear in experts.values() for tensor in tensors_of(linear))
    actual += sum(p.nbytes for n, p in target.named_parameters() if "experts" not in n)
    assert planned == actual


@full_where(lambda name: name not in ("FP8", "NVFP4", "int4"))
@pytest.mark.parametrize("name", EXPERTS)
def test_drafts_over_held_experts_change_no_answer(tmp_path: Path, name: str):
    pair = make_pair(tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = list[Any]()
    for target, draft in (("dense", None), ("target", None), ("target", "draft")):
        engine = make_engine(
            EngineConfig(
                target=str(pair / target),
                draft=None if draft is None else str(pair / draft),
                device="cpu",
                dtype="float32",
                weight_dtype="stored",
            )
        )
        answers.append(run(engine, PROMPTS, params))
    assert engine.stats.draft_counts.num_verified > 0
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


@full_where(lambda name, whole_experts: whole_experts is (name in ("FP8", "int4", "AWQ")))
@pytest.mark.parametrize("name", ["FP8", "NVFP4", "int4", "GPTQ", "AWQ"])
@pytest.mark.parametrize("whole_experts", [False, True], ids=["parts", "whole experts"])
def test_ranks_share_held_experts(tmp_path: Path, name: str, whole_experts: bool):
    pair = make_pair(tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    config = EngineConfig(
        target=str(pair / "target"),
        draft=str(pair / "draft"),
        device="cpu",
        dtype="float32",
        weight_dtype="stored",
        max_model_len=96,
        max_num_seqs=4,
        kv_cache_memory="8MiB",
    )
    expected = run(make_engine(config), PROMPTS, params)
    with ranks(config.with_(enable_expert_parallel=whole_experts), 2) as engine:
        assert run(engine, PROMPTS, params) == expected
        held = experts_of(engine.runner.model)
        assert all(len(tensor) for linear in held.values() for tensor in tensors_of(linear))


def test_groups_by_activations_are_one_sentence(tmp_path: Path):
    path = make_pair(tmp_path, BY_ACTIVATIONS) / "target"
    with pytest.raises(ValueError, match=r"g_idx orders groups by activations \(desc_act\), which"):
        load(path, held=True)
