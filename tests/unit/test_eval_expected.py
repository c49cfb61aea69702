"""What is expected of a pair: found by its facts, by name, or as the user says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from textpair import Pair
from tiny import edit_json

from strobe.models.registry import load_draft_config, load_target_config
from strobe.tools.bench.published_shapes import directories
from strobe.tools.eval.expected import Expected, chosen, compare, enough, expectations
from strobe.tools.eval.settings import EvalSettings


def resolved(
    name: str = "qwen3-8b",
    num_drafts: int | None = None,
    target: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
) -> Any:
    """A published pair; target, draft: what their configs say in place of what is published."""
    with directories(name) as parts:
        own, drafter = map(Path, parts)
        for path, changes in ((own, target), (drafter, draft)):
            if changes:
                edit_json(path / "config.json", **changes)
        config = load_draft_config(drafter)
        return SimpleNamespace(
            target=load_target_config(own),
            draft=config,
            limits=SimpleNamespace(num_drafts=num_drafts or config.block_drafts),
        )


def found(settings: EvalSettings, pair: Any, **prompts: bool) -> Any:
    return expectations(settings, pair, chosen(settings), prompts or {"gsm8k": True})


KNOWN = {
    "qwen3-4b": "gsm8k",
    "qwen3-8b": "gsm8k",
    "llama-3.1-8b": "gsm8k",
    "qwen3-coder-30b-a3b": "humaneval",
    "demo": "demo",
}
"""Pairs with published figures, and a data set that these are of."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_pair_is_known_by_its_configs(name: str):
    assert KNOWN[name] in found(EvalSettings(), resolved(name), **{KNOWN[name]: True}).found


OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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


@pytest.mark.parametrize("other", OTHERS)
def test_same_size_pair_is_not_taken_for_published_one(other: str):
    name, target, draft = OTHERS[other]
    pair = resolved(name, target=target, draft=draft)
    assert found(EvalSettings(), pair, **{KNOWN[name]: True}).found == {}


def test_the_papers_figures_belong_to_a_pair_by_its_shape():
    one = found(EvalSettings(), resolved()).found["gsm8k"]
    assert (one.acceptance_length, one.mean_of_answers) == (6.54, True)
    assert one.factor == pytest.approx(0.95 * 0.975)
    small = found(EvalSettings(), resolved("qwen3-4b"), mbpp=True).found["mbpp"]
    assert (small.acceptance_length, small.factor) == (6.09, 0.95)
    sampled = found(EvalSettings(temperature=1.0), resolved()).found["gsm8k"]
    assert sampled.acceptance_length == 5.98


@pytest.mark.parametrize(
    ("changes", "pair", "many", "reason"),
    [
        ({"temperature": 0.7}, {}, True, "there are none for temperature 0.7, top-p 1"),
        ({"thinking": True}, {}, True, "they were taken without thinking"),
        ({"max_tokens": 256}, {}, True, "they were taken with max_tokens 2048"),
        ({}, {"num_drafts": 7}, True, "they were taken with 15 drafts a step"),
        ({}, {}, False, "50 prompts are the fewest that say enough"),
    ],
)
def test_figures_of_other_settings_are_skipped_with_reason(
    changes: dict[str, Any], pair: dict[str, Any], many: bool, reason: str
):
    settings = replace(EvalSettings(), **changes)
    aims = found(settings, resolved(**pair), gsm8k=many)
    assert aims.found == {}
    assert aims.notes == (f"The published figures for gsm8k are not compared: {reason}.",)


def test_a_name_brings_its_figures_to_any_pair():
    settings = EvalSettings(expect="qwen3-8b-dflash-speculators")
    aims = found(settings, resolved("demo"), **{"gsm8k-5shot": False})
    one = aims.found["gsm8k-5shot"]
    assert (one.acceptance_length, one.accuracy, len(one.by_position)) == (3.45, 0.885, 4)
    assert found(EvalSettings(expect="none"), resolved()).found == {}


def test_user_expectation_replaces_published_figure(tmp_path: Path):
    given = {"gsm8k": {"acceptance_length": 5, "by_position": [0.9], "temperature": 0.3}}
    (tmp_path / "aims.json").write_text(json.dumps(given))
    for text in (json.dumps(given), str(tmp_path / "aims.json")):
        one = found(EvalSettings(expect=text), resolved()).found["gsm8k"]
        assert (one.acceptance_length, one.factor, one.by_position) == (5, 0.95, (0.9,))
    settings = EvalSettings(expect_acceptance_length=3.0, expect_accuracy=0.5)
    one = found(settings, resolved()).found["gsm8k"]
    assert (one.acceptance_length, one.factor, one.mean_of_answers) == (3.0, 1.0, False)
    assert one.accuracy == 0.5
    other = found(settings, resolved("demo"), custom=True).found["custom"]
    assert (other.acceptance_length, other.accuracy) == (3.0, 0.5)


def test_a_figure_is_met_from_its_floor_on():
    row = {
        "acceptance": {
            "acceptance_length": 3.0,
            "mean_of_answers": 2.85,
            "rate_by_position": [0.8],
        },
        "accuracy": {"graded": 10, "accuracy": 0.9},
    }
    one = Expected("x", 3.0, 0.9, (0.9, 0.5), mean_of_answers=True, source="a paper")
    checks = compare(one, row)
    assert [check["met"] for check in checks] == [True, True, False, True]
    assert [check["measured"] for check in checks] == [2.85, 0.8, None, 0.9]
    assert compare(replace(one, factor=0.96), row)[0]["met"] is False
    row["accuracy"] = {"graded": 0, "accuracy": None}
    assert len(compare(one, row)) == 3  # published, but not measured
    assert compare(replace(one, source="--expect"), row)[-1]["met"] is False  # asked for


def test_few_prompts_of_many_say_too_little():
    assert enough(50, 1319)
    assert not enough(49, 1319)
    assert enough(7, 7)


def test_the_exit_status_says_whether_it_was_reached(
    main: Callable[..., Any], tmp_path: Path, pair: Pair
):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"turns": ["Hello"], "answer": "never"}\n')
    run = ["eval", "acceptance", "--data", path, "--target", pair.target, "--draft", pair.draft]
    run.append("--max-tokens=8")
    status, out, _ = main(*run, "--expect-acceptance-length=1")
    assert status == 0
    assert "Against what is expected" in out
    status, out, _ = main(*run, "--expect-acceptance-length=1", "--expect-accuracy=0.5")
    assert status == 1
    assert "1 of 2 figures are below what is expected." in out
