"""Completions between a prompt and a suffix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgi import Answer, call
from bodies import refusal
from engineless import RecordingClient, serving

from strobe.config import DEMO_MODELS
from strobe.server.app import make_app
from strobe.server.engine_process.messages import Submit
from strobe.server.openai.infill import TOKENS
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.text.tokenizer import Tokenizer


def complete(tokenizer: Tokenizer, **fields: Any) -> tuple[Answer, list[int]]:
    """Send a completion; return its answer, and the prompt that the engine gets."""
    served = serving(tokenizer)
    assert isinstance(served.client, RecordingClient)
    served.client.facts = served.client.facts and served.client.facts._replace(vocab_size=9999)
    body = [json.dumps(fields).encode()]
    answer = call(make_app(served), "/v1/completions", body=body, gone=True)
    prompts = [sent.prompt_ids for sent in served.client.sent if isinstance(sent, Submit)]
    return answer, prompts[0] if prompts else []


@pytest.mark.parametrize("names", TOKENS)
def test_prefix_and_suffix_are_marked(names: tuple[str, str, str]):
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    tokenizer.fast.add_special_tokens(list(names))
    start, hole, end = map(tokenizer.fast.token_to_id, names)
    before = tokenizer.encode("def f(", add_special_tokens=False)
    after = tokenizer.encode("return x", add_special_tokens=False)
    expected = [start, *before, hole, *after, end]
    for prompt in ("def f(", before):
        _, ids = complete(tokenizer, prompt=prompt, suffix="return x", max_tokens=5)
        assert ids == expected
    _, ids = complete(tokenizer, prompt="def f(", suffix="", max_tokens=5)
    assert ids == before


def test_model_without_tokens_for_a_suffix_says_so():
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    answer, _ = complete(tokenizer, prompt="def f(", suffix="return x")
    assert answer.error["message"].startswith("suffix is set, but this model has no tokens")
    answer = call(make_app(serving(tokenizer)), "/infill", body=[b"{}"])
    assert answer.status == 501
    assert answer.error["message"].startswith("/infill is not supported: use /v1/completions")


@pytest.mark.parametrize(
    ("name", "value"), [("echo", True), ("prompt_logprobs", 2), ("truncate_prompt_tokens", 5)]
)
def test_suffix_excludes_fields_of_the_prompt(name: str, value: Any):
    assert refusal(CompletionRequest, suffix="x", **{name: value}).param == name
