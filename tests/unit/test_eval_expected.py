"""Expected figures of a pair: chosen by its configs, by name, or by the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strobe.models.architectures import load_draft_config, load_target_config
from strobe.tools.bench.published_shapes import directories
from strobe.tools.eval.eval_settings import EvalSettings
from strobe.tools.eval.expected import Expected, chosen, compare, enough, expectations
from tests.support.text_pair import Pair
from tests.support.tiny_checkpoints import edit_json


def resolved(
    name: str = "qwen3-8b",
    num_drafts: int | None = None,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
) -> Any:
    """Return a published pair. target, draft: changes of its configs."""
    with directories(name) as parts:
        target_path, draft_path = map(Path, parts)
        for path, changes in ((target_path, target), (draft_path, draft)):
            if changes:
                edit_json(path / "config.json", **changes)
        config = load_draft_config(draft_path)
        return SimpleNamespace(
            target=load_target_config(target_path),
            draft=config,
            limits=SimpleNamespace(num_drafts=num_drafts or config.block_drafts),
        )


def expected_figures(settings: EvalSettings, pair: Any, **prompts: bool) -> Any:
    return expectations(settings, pair, chosen(settings), prompts or {"gsm8k": True})


KNOWN = {
    "qwen3-4b": "gsm8k",
    "qwen3-8b": "gsm8k",
    "llama-3.1-8b": "gsm8k",
    "qwen3-coder-30b-a3b": "humaneval",
    "demo": "demo",
}
"""Pairs with published figures, and one of their data sets."""


@pytest.mark.parametrize("name", KNOWN)
def test_published_pair_is_recognized_by_its_configs(name: str):
    expected = expected_figures(EvalSettings(), resolved(name), **{KNOWN[name]: True})
    assert KNOWN[name] in expected.by_data_set


SIMILAR_PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-30B-A3B": (
        "qwen3-coder-30b-a3b",
        {"intermediate_size": 6144, "max_position_embeddings": 40960, "rope_theta": 1e6},
        {},
    ),
    "Qwen3-30B-A3B-Instruct-2507": ("qwen3-coder-30b-a3b", {"intermediate_size": 6144}, {}),
    "Qwen3-4B-Instruct-2507": (
        "qwen3-4b",
        {"max_position_embeddings": 262144, "rope_theta": 5e6},
        {},
    ),
    "Qwen3-8B-Base": ("qwen3-8b", {"max_position_embeddings": 32768, "eos_token_id": 151643}, {}),
    "another base of rope": ("qwen3-8b", {"rope_theta": 5e6}, {}),
    "Llama 3": ("llama-3.1-8b", {"max_position_embeddings": 8192, "rope_scaling": None}, {}),
    "Llama 3.1, base": ("llama-3.1-8b", {"eos_token_id": 128001}, {}),
    "a drafter of six layers": ("qwen3-8b", {}, {"num_hidden_layers": 6}),
    "a drafter of block 8": ("qwen3-8b", {}, {"block_size": 8}),
    "a drafter in another format": (
        "qwen3-8b",
        {},
        {
            "architectures": ["Qwen3DSparkModel"],
            "dflash_config": None,
            "markov_rank": 0,
            "mask_token_id": 151669,
            "target_layer_ids": [1, 9, 17, 25, 33],
        },
    ),
}


@pytest.mark.parametrize("similar", SIMILAR_PAIRS)
def test_similar_pair_is_not_taken_for_a_published_one(similar: str):
    name, target, draft = SIMILAR_PAIRS[similar]
    pair = resolved(name, target=target, draft=draft)
    assert expected_figures(EvalSettings(), pair, **{KNOWN[name]: True}).by_data_set == {}


def test_paper_figures_apply_to_its_pairs():
    figure = expected_figures(EvalSettings(), resolved()).by_data_set["gsm8k"]
    assert (figure.acceptance_length, figure.mean_of_answers) == (6.54, True)
    assert figure.factor == pytest.approx(0.95 * 0.975)
    small = expected_figures(EvalSettings(), resolved("qwen3-4b"), mbpp=True).by_data_set["mbpp"]
    assert (small.acceptance_length, small.factor) == (6.09, 0.95)
    sampled = expected_figures(EvalSettings(temperature=1.0), resolved()).by_data_set["gsm8k"]
    assert sampled.acceptance_length == 5.98


@pytest.mark.parametrize(
    ("changes", "pair", "many", "reason"),
    [
        ({"temperature": 0.7}, {}, True, "there are none for temperature 0.7, top-p 1"),
        ({"thinking": True}, {}, True, "they were measured without thinking"),
        ({"max_tokens": 256}, {}, True, "they were measured with max_tokens 2048"),
        ({}, {"num_drafts": 7}, True, "they were measured with 15 drafts per step"),
        ({}, {}, False, "at least 50 prompts are needed"),
    ],
)
def test_figures_of_other_settings_are_skipped_with_a_reason(
    changes: dict[str, Any], pair: dict[str, Any], many: bool, reason: str
):
    settings = replace(EvalSettings(), **changes)
    expected = expected_figures(settings, resolved(**pair), gsm8k=many)
    assert expected.by_data_set == {}
    assert expected.notes == (f"The published figures for gsm8k are not compared: {reason}.",)


def test_named_figures_apply_to_any_pair():
    settings = EvalSettings(expect="qwen3-8b-dflash-speculators")
    expected = expected_figures(settings, resolved("demo"), **{"gsm8k-5shot": False})
    figure = expected.by_data_set["gsm8k-5shot"]
    assert (figure.acceptance_length, figure.accuracy, len(figure.by_position)) == (3.45, 0.885, 4)
    assert expected_figures(EvalSettings(expect="none"), resolved()).by_data_set == {}


def test_user_expectation_replaces_published_figure(tmp_path: Path):
    figures = {"gsm8k": {"acceptance_length": 5, "by_position": [0.9], "temperature": 0.3}}
    (tmp_path / "figures.json").write_text(json.dumps(figures))
    for text in (json.dumps(figures), str(tmp_path / "figures.json")):
        figure = expected_figures(EvalSettings(expect=text), resolved()).by_data_set["gsm8k"]
        assert (figure.acceptance_length, figure.factor, figure.by_position) == (5, 0.95, (0.9,))
    settings = EvalSettings(expect_acceptance_length=3.0, expect_accuracy=0.5)
    figure = expected_figures(settings, resolved()).by_data_set["gsm8k"]
    assert (figure.acceptance_length, figure.factor, figure.mean_of_answers) == (3.0, 1.0, False)
    assert figure.accuracy == 0.5
    custom_figure = expected_figures(settings, resolved("demo"), custom=True).by_data_set["custom"]
    assert (custom_figure.acceptance_length, custom_figure.accuracy) == (3.0, 0.5)


def test_figure_is_met_at_its_floor():
    row = {
        "acceptance": {
            "acceptance_length": 3.0,
            "mean_of_answers": 2.85,
            "rate_by_position": [0.8],
        },
        "accuracy": {"graded": 10, "accuracy": 0.9},
    }
    figure = Expected("x", 3.0, 0.9, (0.9, 0.5), mean_of_answers=True, source="a paper")
    checks = compare(figure, row)
    assert [check["met"] for check in checks] == [True, True, False, True]
    assert [check["measured"] for check in checks] == [2.85, 0.8, None, 0.9]
    assert compare(replace(figure, factor=0.96), row)[0]["met"] is False
    row["accuracy"] = {"graded": 0, "accuracy": None}
    assert len(compare(figure, row)) == 3  # published, but not measured
    assert compare(replace(figure, source="--expect"), row)[-1]["met"] is False  # the user's


def test_few_prompts_of_many_are_not_enough():
    assert enough(50, 1319)
    assert not enough(49, 1319)
    assert enough(7, 7)


def test_exit_status_is_1_below_an_expected_figure(
    main: Callable[..., Any], tmp_path: Path, pair: Pair
):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"turns": ["Hello"], "answer": "never"}\n')
    flags = ["--data", path, "--target", pair.target, "--draft", pair.draft, "--max-tokens=8"]
    command = ["eval", "acceptance", *flags, "--expect-acceptance-length=1"]
    status, out, _ = main(*command)
    assert status == 0
    assert "Compared with expected figures" in out
    status, out, _ = main(*command, "--expect-accuracy=0.5")
    assert status == 1
    assert "Below the expected value: 1 of 2 figures." in out
