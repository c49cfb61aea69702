"""Strobe and vLLM's CPU build, with its context keys mended, take the same tokens in every step.

vLLM runs in an environment of its own: that of STROBE_VLLM_PYTHON, the path of its Python, or the
one that `make verify-peers` made. Nothing is installed. Skipped where there is none, or where
SmolLM2 cannot be fetched."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from scripts.vllm_cpu import BF16_DRAFTER, NUM_DRAFTS, ROOT, make_target
from strobe import LLM, SamplingParams
from strobe.hub.packaged import packaged_file

TEXTS = (
    "Write a Python function that reverses a string.",
    "Explain in three sentences why the sky is blue.",
    "List five fruits and their colours.",
    "Rewrite in the past tense: I go to the market and buy apples.",
    "Count from one to ten in words.",
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Give three reasons to learn a language.",
    "Translate to Spanish: The cat sleeps on the chair.",
    "What does the word 'ephemeral' mean?",
    "Write a polite email that declines an invitation.",
    "Name the planets of the solar system.",
    "Summarize: The dog ran over the hill, saw a rabbit, and came back tired.",
    "Write an HTML page with a heading and a paragraph.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a dragon who is afraid of fire.",
    "What is 12 + 30?",
    "Describe a sunset to someone who cannot see.",
    "Which animals live in the desert?",
    "Write a SQL query that counts the rows of a table.",
    "How does a bicycle stay upright?",
    "Correct the sentence: She don't likes apples.",
    "List the days of the week in reverse order.",
)
COUNT = int(os.environ.get("STROBE_VLLM_PROMPTS", 4))
"""How many of them are compared."""


def vllm_python() -> Path:
    """Return the Python of an environment that has vLLM; skip the test if there is none."""
    made = ROOT / "build" / "verify-peers" / "vllm" / "bin" / "python"
    python = Path(os.environ.get("STROBE_VLLM_PYTHON", made))
    if not python.exists():
        pytest.skip(f"there is no {python}; STROBE_VLLM_PYTHON names a Python that has vLLM")
    return python


@pytest.mark.full
def test_every_step_takes_as_many_tokens_as_vllms(tmp_path: Path):
    python = vllm_python()
    try:
        packaged_file("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    target = str(make_target(tmp_path / "smollm2"))
    llm = LLM(
        target,
        draft=str(BF16_DRAFTER),
        dtype="float32",
        weight_dtype="float32",
        adaptive=False,
        max_model_len=512,
        max_num_seqs=1,
        num_drafts=NUM_DRAFTS,
    )
    texts = TEXTS[:COUNT]
    chats = [[{"role": "user", "content": text}] for text in texts]
    prompts = [llm.tokenizer.render_chat(chat) for chat in chats]
    max_tokens = 24
    arguments = ["--target", target, "--draft", str(BF16_DRAFTER), "--mend"]
    finished = subprocess.run(
        [str(python), "-m", "scripts.vllm_cpu", *arguments],
        cwd=ROOT,
        input=json.dumps([prompts, max_tokens]) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for text, prompt, theirs in zip(texts, prompts, json.loads(finished.stdout), strict=True):
        tokens = list[int]()
        steps = list[int]()
        for delta in llm.stream(prompt, params):
            tokens += delta.token_ids
            steps.append(len(delta.token_ids))
        assert {"tokens": tokens, "steps": steps} == theirs, text
