"""Scales of keys and values that checkpoints have for FP8."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.rank_threads import ranks
from tests.support.stored_weights import store
from tests.support.tiny_checkpoints import edit_json, make_draft, make_target

PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "older compressed-tensors": ("k_proj.output_scale", "v_proj.output_scale"),
    "one for both": ("kv_scale", "kv_scale"),
}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A directory with an FP8 target and a drafter."""
    make_target(tmp_path / "target")
    is_weight = lambda name: name.endswith("_proj.weight")  # noqa: E731
    store(tmp_path / "target", tmp_path / "dense", "FP8", is_weight)
    make_draft(tmp_path / "draft")
    return tmp_path


def add(pair: Path, scales: Mapping[str, Tensor]) -> None:
    """Add a tensor to each layer's attention."""
    file = pair / "target" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(5):
        for name, value in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = value.clone()
    save_file(tensors, file)


def settings(pair: Path, **options: Any) -> EngineConfig:
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 96}
    values |= {"kv_cache_memory": "8MiB", "max_num_seqs": 4, "kv_cache_dtype": "fp8"}
    return EngineConfig(
        target=str(pair / "target"), draft=str(pair / "draft"), **{**values, **options}
    )


def answers(engine: Engine) -> list[list[int]]:
    return run(engine, PROMPTS, PARAMS)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_powers_of_two_change_no_answer(pair: Path, names: tuple[str, str]):
    """They change the exponents of what is stored, and the smallest values."""
    expected_engine = make_engine(settings(pair))
    expected = answers(expected_engine)
    add(pair, {names[0]: torch.tensor(0.25), names[1]: torch.tensor([0.25])})
    engine = make_engine(settings(pair))
    assert answers(engine) == expected
    assert {scale.keys for scale in engine.runner.store.scales} == {0.25}
    stored = engine.runner.store.layers[0].float()
    plain = expected_engine.runner.store.layers[0].float()
    torch.testing.assert_close(stored * 0.25, plain, rtol=0, atol=2**-9)
    assert engine.stats.draft_counts.num_verified > 0


def test_scales_keep_large_values_from_saturating(pair: Path):
    """Norms of keys make them exceed FP8's largest number."""
    file = pair / "target" / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "k_norm" in name:
            tensors[name] = tensors[name] * 2000
        if "q_norm" in name:
            tensors[name] = tensors[name] / 2000
    save_file(tensors, file)
    exact = make_engine(settings(pair, kv_cache_dtype="auto"))
    answers(exact)
    add(pair, {"k_scale": torch.tensor(30.0)})
    engine = make_engine(settings(pair))
    answers(engine)
    slots = slice(16, 16 + len(PROMPTS[0]))
    keys = exact.runner.store.layers[0][slots, 0].float()
    stored = engine.runner.store.layers[0][slots, 0].float()
    assert keys.abs().max() > 448
    torch.testing.assert_close(stored * 30, keys, rtol=2**-4, atol=0.1)


def test_ranks_use_the_scales(pair: Path):
    add(pair, {"k_scale": torch.tensor(0.013), "v_scale": torch.tensor(0.02)})
    expected = answers(make_engine(settings(pair)))
    with ranks(settings(pair), 2) as engine:
        assert answers(engine) == expected
        assert engine.runner.store.scales[2].values == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.tensor(float("nan")), "is nan, but a scale must be a finite number above zero"),
        (torch.tensor(0.0), r"is 0\.0, but a scale must be"),
        (torch.tensor(-1.0), r"is -1\.0, but a scale must be"),
        (torch.ones(2), r"has shape \[2\] and holds F32 values, but scales of keys and values"),
        (torch.ones(1, dtype=torch.int64), r"has shape \[1\] and holds I64 values"),
    ],
    ids=["NaN", "zero", "negative", "per head", "integer"],
)
def test_scales_that_cannot_be_are_one_sentence_before_weights_are_read(
    pair: Path, value: Tensor, problem: str
):
    add(pair, {"v_scale": value})
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.v_scale {problem}"):
        resolve(settings(pair))
    resolve(settings(pair, kv_cache_dtype="auto"))


@pytest.mark.parametrize(
    ("options", "scheme", "reason"),
    [
        ({"kv_cache_dtype": "auto"}, None, "keys and values are not stored in FP8"),
        ({}, {"num_bits": 8, "type": "int"}, "they are for keys and values in int8"),
    ],
    ids=["not FP8", "int8"],
)
def test_scales_without_effect_are_logged_once(
    pair: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    scheme: object,
    reason: str,
):
    add(pair, {"k_scale": torch.tensor(0.5)})
    config = load_config(pair)
    edit_json(
        pair / "target" / "config.json",
        quantization_config={**config, "kv_cache_scheme": scheme},
    )
    with caplog.at_level(logging.INFO, "strobe"):
        engine = make_engine(settings(pair, **options))
    lines = [text for text in caplog.messages if "scales of keys and values" in text]
    assert len(lines) == 1
    assert f"of 5 layers have no effect: {reason}" in lines[0]
    assert {scale.keys for scale in engine.runner.store.scales} == {1.0}


def load_config(pair: Path) -> dict[str, Any]:
    return json.loads((pair / "target" / "config.json").read_text())["quantization_config"]
