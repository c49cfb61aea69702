"""A real language model, SmolLM2-135M-Instruct, answers the same with its drafter as without, and
as transformers does. Skipped where its file cannot be fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.smollm2.checkpoint import convert
from scripts.smollm2.prompts import is_heldout
from strobe import LLM, SamplingParams
from strobe.hub.packaged import packaged_file
from strobe.tools.demo_comparison import prompts_of
from strobe.tools.demo_prompts import chat_examples

pytestmark = pytest.mark.full

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the largest of three numbers.",
    "Name five animals that live in the sea.",
)
TOKENS = 32


@pytest.fixture(scope="module")
def llm() -> LLM:
    try:
        packaged_file("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    return LLM("smollm2", dtype="float32", adaptive=False, max_model_len=512, max_num_seqs=4)


def answers(llm: LLM, temperature: float, *, drafts: bool) -> list[Any]:
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=TOKENS, speculation=None if drafts else False
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [output.outputs[0] for output in llm.chat(chats, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_drafts_change_no_token(llm: LLM, temperature: float):
    drafted = answers(llm, temperature, drafts=True)
    plain = answers(llm, temperature, drafts=False)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert sum(answer.speculation.accepted for answer in drafted) > 0
    if temperature == 0:
        assert drafted[0].text == "The capital of France is Paris."


def test_greedy_answers_equal_transformers(llm: LLM, tmp_path: Path):
    convert(packaged_file("smollm2"), tmp_path / "target")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    for question, answer in zip(QUESTIONS, answers(llm, 0.0, drafts=True), strict=True):
        prompt = llm.tokenizer.render_chat([{"role": "user", "content": question}])
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.0
        )
        assert ids[0, len(prompt) :].tolist() == answer.token_ids


def test_demo_prompts_are_held_out_of_training(llm: LLM):
    prompts: list[Any] = prompts_of(llm, chat_examples(12))
    assert all(is_heldout(ids) for ids in prompts)
