"""The task generator of the demo models: checkers, the train/held-out split, determinism."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter

import pytest

from scripts.demo_models.tasks import FAMILIES, Example, check, generate, heldout, split, training
from scripts.demo_models.tasks.example import prompt_key
from scripts.demo_models.write_heldout import lines
from strobe.demo_models import HELDOUT, read_heldout
from strobe.tools.demo_comparison import choose_examples


def full_text(example: Example) -> str:
    """Return a perfect model's answer."""
    if not example.thinking:
        return example.answer
    return f"<think>\n{example.reasoning}\n</think>\n\n{example.answer}<|im_end|>"


def damaged(example: Example) -> str:
    """Return the full text with a wrong result."""
    text = full_text(example)
    if example.family == "code":
        return text.replace("return ", "return not ")
    if example.family in ("json", "tool"):
        return text.replace('": ', '_": ')
    return text.replace("Answer: ", "Answer: 7")


def prompts(examples: list[Example]) -> set[str]:
    return {prompt_key(example) for example in examples}


@pytest.mark.parametrize("heldout_template", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_own_answer_passes_and_damaged_one_fails(family: str, heldout_template: bool):
    rng = random.Random(3)
    for _ in range(150):
        example = generate(rng, family=family, heldout_template=heldout_template)
        assert check(example, full_text(example)), example
        assert not check(example, damaged(example)), example


@pytest.mark.parametrize("family", FAMILIES)
def test_checker_never_raises(family: str):
    example = generate(random.Random(4), family=family)
    for text in (
        "",
        "Answer:",
        "```python\n```",
        "{",
        "[" * 5000,
        "<tool_call>\n1\n</tool_call>",
        "```python\nimport os\n```",
        "\0",
        "```\ndef f(:\n```",
        "</think>",
        "null",
    ):
        assert check(example, text) is False


def test_checker_rejects_harmful_code():
    example = generate(random.Random(5), family="code")
    name = example.reference["name"]
    for body in (
        "while True: pass",
        "return ().__class__",
        "return sum(range(10 ** 12))",
        "import os",
        "return open('x')",
    ):
        assert not check(example, f"```python\ndef {name}(*a):\n    {body}\n```")


def test_training_and_heldout_prompts_are_disjoint():
    train = list(training(3000, seed=1))
    held = heldout(60)
    assert not prompts(train) & prompts(held)
    assert {split(example) for example in train} == {"train"}
    assert {split(example) for example in held} == {"heldout"}


def test_heldout_templates_never_in_training():
    rng = random.Random(6)
    training_templates = {example.template for example in training(6000, seed=2)}
    for family in FAMILIES:
        held = {generate(rng, family=family, heldout_template=True).template for _ in range(200)}
        trained = {name for name in training_templates if name.startswith(f"{family}/")}
        assert len(held) >= 2
        assert len(trained) >= 20
        assert not held & trained


def test_heldout_is_half_templates_half_hash_without_duplicates():
    held = heldout(40)
    assert len(prompts(held)) == len(held) == 40 * len(FAMILIES)
    trained = {example.template for example in training(6000, seed=2)}
    kinds = Counter((e.family, e.thinking, e.template in trained) for e in held)
    assert set(kinds.values()) == {10}
    assert len(kinds) == 4 * len(FAMILIES)


def test_same_seed_same_tasks():
    assert list(training(50, seed=9)) == list(training(50, seed=9))
    assert heldout(6, seed=1) == heldout(6, seed=1)
    assert prompts(heldout(6, seed=1)) != prompts(heldout(6, seed=2))


def test_shipped_examples_match_generators():
    assert HELDOUT.read_text(encoding="utf-8").splitlines() == lines()
    assert HELDOUT.stat().st_size < 200_000
    pool = heldout(40, seed=1)
    assert read_heldout() == [pool[40 * family + i] for i in range(40) for family in range(6)]


def test_shipped_answers_pass_their_checkers():
    for example in read_heldout():
        assert check(example, full_text(example))
        assert not check(example, damaged(example))


def test_too_many_examples_is_an_error():
    assert len(read_heldout(240)) == len(choose_examples(240)) == 240
    for read in (read_heldout, choose_examples):
        with pytest.raises(ValueError, match=r"prompts is 241, but .* at most 240"):
            read(241)


def test_reasoning_only_with_thinking():
    modes = set()
    for example in training(200, seed=3):
        modes.add(example.thinking)
        assert bool(example.reasoning) == example.thinking
        assert json.loads(json.dumps(example.messages))
        assert bool(example.tools) == (example.family == "tool")
    assert modes == {True, False}


def test_unknown_family_is_named():
    with pytest.raises(ValueError, match="no family 'poems'"):
        generate(random.Random(0), family="poems")


def test_examples_are_frozen():
    example = generate(random.Random(0))
    with pytest.raises(dataclasses.FrozenInstanceError):
        example.family = "other"
