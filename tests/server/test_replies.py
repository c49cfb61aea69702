"""The whole application without an engine: the ends of responses, and the access log."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.request import TokenLogprob
from strobe.server.app import make_app
from strobe.server.engine_process.client import (
    EngineDead,
    EngineStopped,
    EngineUnavailable,
    Generation,
)
from strobe.server.engine_process.engine_messages import Finish, Submit
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving
from strobe.text.tokenizer import Tokenizer
from tests.server.support.asgi_client import Answer, call
from tests.server.support.engineless_server import START, RecordingClient, event, samples, serving
from tests.server.support.scripted_server import Steps

CHAT = "/v1/chat/completions"
JSON = [("Content-Type", "application/json")]
ENDPOINTS = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
every_endpoint = pytest.mark.parametrize("path", ENDPOINTS)
Engine = Callable[[Generation], None]
"""A replacement for the engine: called with each submitted prompt."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODELS / "target")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The access log's lines so far."""
    caplog.set_level(logging.INFO)

    def read() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "strobe.access"]
        return [json.loads(record.getMessage()) for record in records]

    return read


def ask(served: Serving, path: str, engine: Engine | None = None, **fields: Any) -> Answer:
    """Post the endpoint's smallest request with these fields."""
    assert isinstance(served.client, RecordingClient)
    if engine is not None:
        served.client.at_submit = engine
    return post(served, path, {**ENDPOINTS[path], **fields})


def post(served: Serving, path: str, body: Any, **options: Any) -> Answer:
    return call(make_app(served), path, headers=JSON, body=[json.dumps(body).encode()], **options)


def events(answer: Answer) -> list[Any]:
    """A stream's events, as text."""
    data = [line[6:] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def refusals(served: Serving) -> dict[tuple[str, str], float]:
    metric_samples = samples(served.metrics, "strobe:http_requests_refused")
    return {(s.labels["status"], s.labels["reason"]): s.value for s in metric_samples}


def one_token(generation: Generation) -> None:
    """Emit a first token and nothing more."""
    generation.add_events([event([5], start=START)])


@every_endpoint
def test_time_limit_before_first_token_is_504(tokenizer: Tokenizer, lines: Any, path: str):
    for streams in (False, True):
        served = serving(tokenizer)
        answer = ask(served, path, stream=streams, timeout=0.1)
        assert answer.status == 504
        assert answer.error["code"] == "timeout"
        assert isinstance(served.client, RecordingClient)
        # The time may be up before the prompt is submitted.
        assert [type(message) for message in served.client.sent] in ([Submit, Finish], [])
        assert not served.client.num_open
        assert refusals(served) == {("504", "timeout"): 1}
    assert all(line.get("finish_reason", "abort") == "abort" for line in lines())


@every_endpoint
def test_time_limit_in_a_stream_is_an_error_event(tokenizer: Tokenizer, lines: Any, path: str):
    seconds, answer = 0.1, None
    while answer is None or answer.status != 200:  # until the first token arrives in time
        seconds *= 2
        assert seconds < 60
        served = serving(tokenizer, request_timeout=seconds)
        answer = ask(served, path, one_token, stream=True)
    reported = events(answer)
    if path == "/v1/responses":
        assert [event["type"] for event in reported[-2:]] == ["error", "response.failed"]
        assert reported[-2]["code"] == "timeout"
    else:
        assert reported[-1] == "[DONE]"
        assert reported[-2]["error"]["code"] == "timeout"
    assert isinstance(served.client, RecordingClient)
    assert served.client.sent[1:] == [Finish(0, None, "abort")]
    assert refusals(served) == {("504", "timeout"): 1}
    *_, line = lines()
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "timeout", "abort")
    assert line["completion_tokens"] == 1


def whole_answer(generation: Generation) -> None:
    generation.add_events([event([5], start=START, finish_reason="stop")])


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_system_fingerprint_is_the_same_in_every_response(tokenizer: Tokenizer, path: str):
    served = serving(tokenizer)
    (fingerprint,) = {
        body["system_fingerprint"]
        for streams in (False, True)
        for answer in (ask(served, path, whole_answer, stream=streams),)
        for body in (events(answer)[:-1] if streams else [json.loads(answer.body)])
    }
    assert re.fullmatch("fp_[0-9a-f]{12}", fingerprint)
    other = serving(tokenizer)
    other.client.config = replace(other.client.config, seed=7)
    assert other.fingerprint != fingerprint


def test_shorter_time_limit_applies(tokenizer: Tokenizer):
    """With the longer limit, the request would not end."""
    for requested, own in ((0.01, 600.0), (600.0, 0.01)):
        served = serving(tokenizer, request_timeout=requested)
        assert ask(served, CHAT, timeout=own).status == 504


def nan_scores(generation: Generation) -> None:
    """Emit a good token, then one with a log probability of NaN, which JSON cannot represent."""
    generation.__class__ = Steps  # each event is a step of its own
    good, bad = TokenLogprob(5, -0.5, 1), TokenLogprob(6, math.nan, 1)
    generation.add_events([event([5], start=START, logprobs=[good])])
    generation.add_events([event([6], finish_reason="length", logprobs=[bad])])


def one_good_answer(generation: Generation) -> None:
    generation.add_events([event([5], start=START, finish_reason="length")])


LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True},
    "/v1/completions": {"logprobs": 0},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
}


@pytest.mark.parametrize("streams", [False, True])
@every_endpoint
def test_nan_in_an_answer_fails_only_that_request(tokenizer: Tokenizer, path: str, streams: bool):
    served = serving(tokenizer)
    answer = ask(served, path, nan_scores, stream=streams, **LOGPROBS[path])
    assert b"NaN" not in answer.body
    if not streams:
        assert (answer.status, answer.error["code"]) == (500, "internal")
    elif path == "/v1/responses":
        reported = events(answer)
        assert [event["type"] for event in reported[-2:]] == ["error", "response.failed"]
        assert reported[-2]["code"] == "internal"
    else:
        assert events(answer)[-1] == "[DONE]"
        assert events(answer)[-2]["error"]["code"] == "internal"
    assert ask(served, path, one_good_answer).status == 200
    assert isinstance(served.client, RecordingClient)
    assert not served.client.num_open


def test_completion_tokens_of_one_text_keep_the_highest_logprob(tokenizer: Tokenizer):
    scored = TokenLogprob(131, -2.0, 2, ((106, -0.5), (131, -2.0)))  # two bytes, both as �
    last = event([131], start=START, finish_reason="length", logprobs=[scored])
    answer = ask(serving(tokenizer), "/v1/completions", lambda g: g.add_events([last]), logprobs=2)
    logprobs = json.loads(answer.body)["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-2.0], [{"\ufffd": -0.5}])


@every_endpoint
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineDead("gone"), 500, "engine_dead"),
        (EngineStopped("over"), 503, "server_stopping"),
        (EngineUnavailable("not now", "grammars_unavailable"), 503, "grammars_unavailable"),
    ],
)
def test_engine_death_is_an_immediate_error(
    tokenizer: Tokenizer, path: str, error: Exception, status: int, code: str
):
    def ends(generation: Generation) -> None:
        generation.fail(error)

    def begins_and_ends(generation: Generation) -> None:
        one_token(generation)
        generation.fail(error)

    for streams in (False, True):
        answer = ask(serving(tokenizer), path, ends, stream=streams)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert (answer.header("retry-after") is not None) == (status == 503)
    answer = ask(serving(tokenizer), path, begins_and_ends, stream=True)
    assert answer.status == 200
    assert code in str(events(answer)[-2])


@every_endpoint
def test_disconnect_ends_the_answers(tokenizer: Tokenizer, lines: Any, path: str):
    for streams in (False, True):
        served = serving(tokenizer)
        post(served, path, {**ENDPOINTS[path], "stream": streams}, gone=True)
        assert isinstance(served.client, RecordingClient)
        assert [type(message) for message in served.client.sent] == [Submit, Finish]
        assert served.client.num_open == served.handling == 0
        assert (
            'engine="0",finished_reason="abort",model_name="m"} 1.0'
            in served.metrics.render(None)[0].decode()
        )
    assert [(line["status"], line["finish_reason"]) for line in lines()] == [(499, "abort")] * 2


def test_disconnect_in_body_is_not_a_server_error(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, lines: Any
):
    served = serving(tokenizer)

    async def half(scope: Any, receive: Any, send: Any) -> None:
        messages = iter([{"type": "http.request", "body": b'{"mess', "more_body": True}])

        async def leaves() -> Any:
            return next(messages, {"type": "http.disconnect"})

        await make_app(served)(scope, leaves, send)

    call(half, CHAT, headers=JSON, length=False)
    assert [line["status"] for line in lines()] == [499]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert not refusals(served)


def test_endless_body_is_408_at_time_limit(tokenizer: Tokenizer):
    served = serving(tokenizer, request_timeout=0.01)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        messages = iter([{"type": "http.request", "body": b'{"mess', "more_body": True}])

        async def waits() -> Any:
            return next(messages, None) or await asyncio.Event().wait()

        await make_app(served)(scope, waits, send)

    answer = call(slow, CHAT, headers=JSON, length=False)
    assert (answer.status, answer.error["code"]) == (408, "body_timeout")
    assert refusals(served) == {("408", "body_timeout"): 1}


@every_endpoint
@pytest.mark.parametrize("streams", [False, True])
def test_access_log_reports_answers(tokenizer: Tokenizer, lines: Any, path: str, streams: bool):
    def answers(generation: Generation) -> None:
        generation.add_events([event([300], start=START)])
        drafted = {"num_verified": 15, "num_accepted": 2, "num_computed_tokens": 9}
        generation.add_events([event([301, 302, 303], finish_reason="stop", **drafted)])

    served = serving(tokenizer)
    answer = ask(served, path, answers, stream=streams, request_id="mine")
    assert answer.status == 200
    (line,) = lines()
    assert line["request_id"] == answer.header("x-request-id")
    assert line["answer_id"] == "mine"
    assert (line["model"], line["stream"], line["status"]) == ("m", streams, 200)
    assert isinstance(served.client, RecordingClient)
    prompt = len(served.client.sent[0].prompt_ids)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (prompt, 4)
    assert line["total_tokens"] == prompt + 4
    assert (line["finish_reason"], line["speculation"]) == ("stop", "dflash")
    assert line["acceptance_length"] == 3.0
    assert line["bytes"] == len(answer.body)
    assert "prompts" not in line
    assert "answers" not in line


def test_prompts_and_answers_are_logged_if_enabled(tokenizer: Tokenizer, lines: Any):
    def answers(generation: Generation) -> None:
        ids = tokenizer.encode("the answer")
        generation.add_events([event(ids, start=START, finish_reason="stop")])

    ask(serving(tokenizer, log_prompts=True), "/v1/completions", answers)
    (line,) = lines()
    assert (line["prompts"], line["answers"]) == (["hi"], ["the answer"])


def test_access_log_joins_several_finish_reasons(tokenizer: Tokenizer, lines: Any):
    def answers(generation: Generation) -> None:
        generation.add_events([event([300], 1, start=START, finish_reason="stop")])
        generation.add_events([event([300], 0, start=START, finish_reason="length")])
        generation.add_events([event([300], 2, start=START, finish_reason="stop")])

    ask(serving(tokenizer), CHAT, answers, n=3)
    (line,) = lines()
    assert (line["finish_reason"], line["completion_tokens"]) == ("length,stop", 3)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, 200),
        ({"facts": None}, 503),
        ({"dead": True}, 503),
        ({"grammar_fault": "Structured output is unavailable: no process."}, 503),
    ],
)
def test_health_is_200_only_if_the_engine_can_answer(
    tokenizer: Tokenizer, changes: dict[str, Any], status: int
):
    served = serving(tokenizer)
    for name, value in changes.items():
        setattr(served.client, name, value)
    assert call(make_app(served), "/health", method="GET").status == status
    served.shutdown.stopping = True
    assert call(make_app(served), "/health", method="GET").status == 503


@every_endpoint
def test_engine_unavailable_is_503_with_retry_after(tokenizer: Tokenizer, path: str):
    served = serving(tokenizer)
    served.client.facts = None
    answer = ask(served, path)
    assert answer.status == 503
    assert int(answer.header("retry-after") or 0) > 0


def test_token_strs_are_the_pieces_of_the_vocabulary(tokenizer: Tokenizer):
    body = {"prompt": " world \u00e9", "return_token_strs": True}
    answer = json.loads(post(serving(tokenizer), "/tokenize", body).body)
    assert answer["token_strs"] == tokenizer.hf.convert_ids_to_tokens(answer["tokens"])
    assert "\u0120" in answer["token_strs"][0]


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
def test_lenient_server_accepts_unknown_fields(
    tokenizer: Tokenizer, path: str, body: dict[str, Any]
):
    body = {**body, "quux": 1}
    assert post(serving(tokenizer), path, body).error["code"] == "unknown_parameter"
    answer = post(serving(tokenizer, lenient=True), path, body)
    assert answer.status == 200
    assert json.loads(answer.body)["warnings"] == [
        "quux has no effect: this server does not know it."
    ]


@pytest.mark.parametrize("lenient", [False, True])
def test_openapi_matches_strictness(tokenizer: Tokenizer, lenient: bool):
    served = make_app(serving(tokenizer, lenient=lenient))
    document = json.loads(call(served, "/openapi.json", method="GET").body)
    schemas = document["components"]["schemas"]
    assert ("additionalProperties" in schemas["ChatCompletionRequest"]) is not lenient
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]


def test_prompt_list_is_admitted_completely_or_not_at_all(tokenizer: Tokenizer):
    """Three slots: four prompts never fit, three do not fit next to a running one."""
    served = serving(tokenizer, max_waiting=1)
    assert isinstance(served.client, RecordingClient)
    refused = post(served, "/v1/completions", {"prompt": ["a"] * 4})
    assert (refused.status, refused.error["param"]) == (400, "prompt")
    assert "prompt holds 4 prompts" in refused.error["message"]
    served.client._generations[99] = type("Open", (), {"open": {0}})()
    answer = post(served, "/v1/completions", {"prompt": ["a"] * 3})
    assert (answer.status, answer.header("retry-after")) == (429, "1")
    assert not served.client.sent


@pytest.mark.parametrize(
    ("tokens", "limit", "param", "message"),
    [
        (1, 3000, "max_tokens", "The prompt has 1 token and max_tokens is 3000, but the context "
         "holds 2048; shorten the prompt or lower max_tokens."),
        (2048, None, "prompt", "The prompt has 2048 tokens, but the context holds 2048 with the "
         "answer; shorten it."),
        (3000, 5, "prompt", "The prompt has 3000 tokens, but the context holds 2048 with the "
         "answer; shorten it."),
        (2000, 49, "max_tokens", "The prompt has 2000 tokens and max_tokens is 49, but the context "
         "holds 2048; shorten the prompt or lower max_tokens."),
    ],
)  # fmt: skip
def test_oversized_prompt_error_says_what_to_shorten(
    tokenizer: Tokenizer, tokens: int, limit: int | None, param: str, message: str
):
    with pytest.raises(FieldError) as raised:
        serving(tokenizer).fit([5] * tokens, ("max_tokens", limit), None, "prompt")
    assert (str(raised.value), raised.value.param) == (message, param)
    assert serving(tokenizer).fit([5] * 2000, ("max_tokens", 48), None, "prompt") == [5] * 2000
