"""Texts between a prompt and a suffix: completions, and llama.cpp's /infill."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.server.app import make_app
from strobe.server.engine_process.engine_messages import Submit
from strobe.server.openai.infill_prompt import ENDS, FILE_TOKENS, TOKENS
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.text.tokenizer import Tokenizer
from tests.server.support import scripted_server
from tests.server.support.answer_checks import check_body
from tests.server.support.asgi_client import Answer, call
from tests.server.support.engineless_server import RecordingClient, serving
from tests.server.support.request_bodies import refusal
from tests.server.support.scripted_server import Script, post


def tokenizer_with(*names: str) -> Tokenizer:
    """The demo models' tokenizer with further special tokens."""
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    tokenizer.fast.add_special_tokens(list(names))
    return tokenizer


def complete(
    tokenizer: Tokenizer, path: str = "/v1/completions", **fields: Any
) -> tuple[Answer, list[Submit]]:
    """Send a request; return its answer, and the prompts that the engine gets."""
    served = serving(tokenizer)
    assert isinstance(served.client, RecordingClient)
    served.client.facts = served.client.facts and served.client.facts._replace(vocab_size=9999)
    body = [json.dumps(fields).encode()]
    answer = call(make_app(served), path, body=body, gone=True)
    return answer, [sent for sent in served.client.sent if isinstance(sent, Submit)]


@pytest.mark.parametrize("names", TOKENS)
def test_prefix_and_suffix_are_marked(names: tuple[str, str, str]):
    tokenizer = tokenizer_with(*names)
    start, hole, end = map(tokenizer.fast.token_to_id, names)
    before = tokenizer.encode("def f(", add_special_tokens=False)
    after = tokenizer.encode("return x", add_special_tokens=False)
    for prompt in ("def f(", before):
        _, (sent,) = complete(tokenizer, prompt=prompt, suffix="return x", max_tokens=5)
        assert sent.prompt_ids == [start, *before, hole, *after, end]
    _, (sent,) = complete(tokenizer, prompt="def f(", suffix="", max_tokens=5)
    assert sent.prompt_ids == before


def test_model_without_tokens_for_a_suffix_says_so():
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    answer, _ = complete(tokenizer, prompt="def f(", suffix="return x")
    assert answer.error["message"].startswith("suffix asks for a text to fill in, but this model")
    answer, _ = complete(tokenizer, "/infill", input_prefix="def f(", input_suffix="")
    assert answer.error["message"].startswith("input_suffix asks for a text to fill in, but this")
    assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")


@pytest.mark.parametrize("families", FILE_TOKENS)
def test_files_precede_the_prefix_and_the_start_follows_it(families: tuple[str, str]):
    names, files = TOKENS[0], [{"filename": "a.py", "text": "A = 1"}, {"text": "B", "time": 3}]
    fields: dict[str, Any] = {"input_prefix": "def f(", "input_suffix": "x", "prompt": "y"}

    def text_of(tokenizer: Tokenizer, **more: Any) -> str:
        _, (sent,) = complete(tokenizer, "/infill", n_predict=5, **fields, **more)
        return tokenizer.decode(sent.prompt_ids, skip_special_tokens=False)

    gap = "<|fim_prefix|>def f(<|fim_suffix|>x<|fim_middle|>y"
    known, (repository, file) = tokenizer_with(*names, *families), families
    assert text_of(known) == gap
    assert text_of(known, input_extra=files) == (
        f"{repository}repository\n{file}a.py\nA = 1\n{file}file\nB\n{file}file\n{gap}"
    )
    assert text_of(tokenizer_with(*names), input_extra=files) == f"a.py\nA = 1\nfile\nB\n{gap}"


def infilled(script: Script, **fields: Any) -> list[dict[str, Any]]:
    """Return the answer of /infill, or the events of its stream."""
    answer = post("/infill", script, input_prefix="a", input_suffix="b", **fields)
    assert answer.status == 200, answer.body
    bodies = answer.body.decode().removeprefix("data: ").strip().split("\n\ndata: ")
    return [json.loads(body) for body in bodies]


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Give the scripted server a tokenizer with tokens for gaps."""
    tokenizer = tokenizer_with(*TOKENS[0])
    monkeypatch.setattr(scripted_server, "tokenizer", lambda: tokenizer)
    monkeypatch.setattr(Script, "facts", Script.facts._replace(vocab_size=9999))
    return tokenizer


@pytest.mark.usefixtures("fills")
def test_infill_answers_in_the_form_of_llama_cpp():
    (whole,) = infilled(script := Script("return x", size=2), samplers=["infill"], seed=-1)
    assert script.received[0].seed is None
    check_body(answers.Infill, whole)
    assert whole.pop("timings")["cache_n"] == 3
    assert whole == {
        "content": "return x", "stop": True, "stop_type": "eos", "stopping_word": "",
        "model": "scripted", "tokens_predicted": len(script.ids), "tokens_evaluated": 5,
        "tokens_cached": 3, "truncated": False,
        "warnings": ["samplers has no effect: the order of the samplers is fixed."],
    }  # fmt: skip
    *parts, last = infilled(Script("return x", size=2), stream=True, include_speculation=True)
    assert "".join(part["content"] for part in parts) == "return x"
    check_body(list[answers.InfillPart], parts)
    check_body(answers.Infill, last)
    assert (last["content"], last["stop_type"], last["speculation"]["used"]) == ("", "eos", True)


@pytest.mark.usefixtures("fills")
def test_infill_names_the_reason_of_the_end():
    (cut,) = infilled(Script("return x"), stop=["x"])
    assert (cut["content"], cut["stop_type"], cut["stopping_word"]) == ("return ", "word", "x")
    (limited,) = infilled(Script("return x", ends="length"), n_predict=4)
    assert limited["stop_type"] == "limit"


@pytest.mark.usefixtures("fills")
@pytest.mark.parametrize("stream", [False, True])
def test_infill_without_tokens_computes_the_prompt_alone(stream: bool):
    *rest, warmed = infilled(script := Script("r", ends="length"), n_predict=0, stream=stream)
    assert (rest, warmed["content"], warmed["tokens_predicted"]) == ([], "", 0)
    assert script.received[0].max_tokens == 1


@pytest.mark.usefixtures("fills")
def test_infill_names_its_own_field_of_a_long_prompt():
    body = {"input_prefix": "a " * 3000, "input_suffix": "b", "n_predict": 3}
    assert post("/infill", Script("r"), **body).error["param"] == "input_prefix"


def test_tokens_between_files_end_an_answer_before_a_suffix():
    tokenizer = tokenizer_with(*TOKENS[0], *ENDS)
    _, (filled,) = complete(tokenizer, prompt="a", suffix="b", stop_token_ids=[7])
    _, (plain,) = complete(tokenizer, prompt="a", stop_token_ids=[7])
    ends = set(map(tokenizer.fast.token_to_id, ENDS))
    assert set(filled.params.stop_token_ids) == {7, *ends}
    assert plain.params.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a", "filename": 3}]}, "input_extra[0].filename"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 2}, "n_probs"),
    ],
)
def test_infill_rejects_fields_by_name(fields: dict[str, Any], param: str):
    assert refusal(InfillRequest, **fields).param == param


@pytest.mark.parametrize(
    ("name", "value"), [("echo", True), ("prompt_logprobs", 2), ("truncate_prompt_tokens", 5)]
)
def test_suffix_excludes_fields_of_the_prompt(name: str, value: Any):
    assert refusal(CompletionRequest, suffix="x", **{name: value}).param == name


@pytest.mark.usefixtures("fills")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "def f("}),
        ("/infill", {"input_prefix": "def f(", "input_suffix": "return x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_shadow_mode_warns_of_speculation_without_effect(path: str, fields: dict[str, Any]):
    def warnings(**more: Any) -> list[str]:
        script = Script("return x")
        script.config = EngineConfig(shadow=True)
        application = scripted_server.shared_app(script)
        body = json.dumps({**fields, **more}).encode()
        answer = call(application, path, body=[body])
        assert answer.status == 200
        return json.loads(answer.body).get("warnings", [])

    assert warnings() == []
    assert warnings(speculation=False) == []
    (sentence,) = warnings(speculation={"num_drafts": 3})
    assert sentence == "speculation has no effect: this server runs in shadow mode."
