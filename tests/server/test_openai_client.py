"""Chats and completions of a real server through the `openai` client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.support.server_process import Served
from tests.support.text_pair import make_pair

MODEL = "strobe-demo"
SUM = "With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?"
PET = (
    "Take this text and write a JSON object with the keys animal, name and age. "
    "The white turtle of Noah is called Bamin and is 12 years old."
)
WEATHER = "What is the weather in Athens in celsius?"
PLAIN: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}


class Pet(BaseModel):
    animal: Literal["turtle", "dog"]
    name: str
    age: int


class GetWeather(BaseModel):
    """Use this to know the weather in a city."""

    city: str
    unit: Literal["celsius", "kelvin"]


TOOL: Any = openai.pydantic_function_tool(GetWeather, name="get_weather")


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def fields(text: str, **more: Any) -> dict[str, Any]:
    """Arguments of a greedy chat without thinking."""
    extra = {**PLAIN, **more.pop("extra_body", {})}
    common = {"model": MODEL, "messages": user(text), "temperature": 0, "max_tokens": 64}
    return {**common, **more, "extra_body": extra}


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# chats


def test_chat_completion_and_usage(client: openai.OpenAI):
    completion = client.chat.completions.create(**fields(SUM))
    assert (completion.object, completion.model) == ("chat.completion", MODEL)
    (choice,) = completion.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert choice.message.content is not None
    assert choice.message.content.endswith("Answer: 11")
    assert choice.message.tool_calls is None
    usage = completion.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 20


def test_stream_equals_whole_answer_and_ends_with_usage(client: openai.OpenAI):
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**fields(SUM), **options))
    completion = client.chat.completions.create(**fields(SUM))
    *sent, last = chunks
    assert (
        "".join(c.choices[0].delta.content or "" for c in sent)
        == completion.choices[0].message.content
    )
    assert [c.choices[0].delta.role for c in sent] == ["assistant"] + [None] * (len(sent) - 1)
    reasons = [c.choices[0].finish_reason for c in sent]
    assert reasons == [None] * (len(sent) - 1) + ["stop"]
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in sent)
    assert last.choices == []
    assert last.usage is not None
    assert completion.usage is not None
    assert last.usage.completion_tokens == completion.usage.completion_tokens


def test_reasoning_is_separate_and_accepted_as_input(client: openai.OpenAI):
    request = fields(SUM, max_tokens=256)
    request["extra_body"] = {}
    message = client.chat.completions.create(**request).choices[0].message
    thought: Any = message
    assert "33" in thought.reasoning_content
    assert message.content is not None
    assert message.content.endswith("Answer: 11")
    messages = [*user(SUM), message, *user("Hello!")]
    again = client.chat.completions.create(**fields("", messages=messages))
    assert again.choices[0].message.content


def test_content_accepts_parts_and_developer_role(client: openai.OpenAI):
    head, tail = SUM.split(" Each ")
    parts = [{"type": "text", "text": head}, {"type": "text", "text": f"Each {tail}"}]
    messages = [
        {"role": "developer", "content": "You are a careful assistant."},
        {"role": "user", "content": parts, "name": "Tom"},
    ]
    completion = client.chat.completions.create(**fields("", messages=messages))
    assert "11" in (completion.choices[0].message.content or "")


def test_several_answers_are_indexed(client: openai.OpenAI):
    chunks = client.chat.completions.create(
        **fields("zzz 17 , 4 horse", n=3, temperature=1, seed=7, max_tokens=12), stream=True
    )
    texts: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1


def test_logprobs_parse_in_the_client(client: openai.OpenAI):
    completion = client.chat.completions.create(**fields(SUM, logprobs=True, top_logprobs=2))
    (choice,) = completion.choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert "".join(entry.token for entry in content[:-1]) == choice.message.content
    assert content[-1].token == "<|im_end|>"
    for entry in content:
        assert entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert len(entry.top_logprobs) == 2


# the client's helpers


def test_stream_helper_assembles_the_answer(client: openai.OpenAI):
    with client.chat.completions.stream(**fields(SUM)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    (done,) = [event for event in events if event.type == "content.done"]
    assert "".join(deltas) == done.content == final.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_pydantic_model_is_parsed_whole_and_streamed(client: openai.OpenAI):
    whole = client.chat.completions.parse(**fields(PET), response_format=Pet)
    expected = Pet(animal="turtle", name="Bamin", age=12)
    assert whole.choices[0].message.parsed == expected
    with client.chat.completions.stream(**fields(PET), response_format=Pet) as stream:
        (done,) = [event for event in stream if event.type == "content.done"]
    assert done.parsed == expected


def test_truncated_parsed_answer_raises_in_client(client: openai.OpenAI):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**fields(PET, max_tokens=5), response_format=Pet)


def test_tool_call_and_result_in_chat(client: openai.OpenAI):
    first = client.chat.completions.create(**fields(WEATHER, tools=[TOOL]))
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Athens", "unit": "celsius"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 31}'}
    messages = [*user(WEATHER), choice.message, result]
    second = client.chat.completions.create(**fields("", messages=messages, tools=[TOOL]))
    assert second.choices[0].finish_reason == "stop"
    assert "31" in (second.choices[0].message.content or "")


def test_streamed_calls_are_assembled_and_parsed(client: openai.OpenAI):
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    request = fields(WEATHER, tools=[TOOL], tool_choice=named)
    with client.chat.completions.stream(**request) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    deltas = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
    (done,) = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    (call,) = message.tool_calls or []
    assert "".join(e.arguments_delta for e in deltas) == call.function.arguments == done.arguments
    assert call.function.parsed_arguments == GetWeather(city="Athens", unit="celsius")
    assert call.id


# completions and models


def test_completion_whole_and_streamed(client: openai.OpenAI):
    request: dict[str, Any] = {"model": MODEL, "prompt": "The list is", "temperature": 0, "seed": 1}
    whole = client.completions.create(**request, max_tokens=12, logprobs=1, echo=True)
    (choice,) = whole.choices
    assert (whole.object, choice.finish_reason) == ("text_completion", "length")
    assert choice.text.startswith("The list is")
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    stream = client.completions.create(**request, max_tokens=12, stream=True)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert f"The list is{text}" == choice.text


@pytest.mark.parametrize("streams", [False, True])
def test_echo_offsets_count_characters_not_bytes(client: openai.OpenAI, streams: bool):
    request: dict[str, Any] = {"model": MODEL, "prompt": "é 世界 is", "temperature": 0, "seed": 1}
    request |= {"max_tokens": 4, "logprobs": 0, "echo": True}
    text, tokens, offsets = "", list[str](), list[int]()
    parts: Any = client.completions.create(**request, stream=True) if streams else []
    for part in parts or [client.completions.create(**request)]:
        text += part.choices[0].text
        tokens += part.choices[0].logprobs.tokens
        offsets += part.choices[0].logprobs.text_offset
    assert offsets == sorted(offsets)
    assert offsets[:4] == [0, 0, 1, 2]  # a token ends é; the first of 世 follows the space
    assert [text[start : start + 3] for start in offsets[-5:-4]] == [" is"]
    assert text[offsets[-4] :] == "".join(tokens[-4:])


def test_models_are_listed_and_retrieved(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "strobe")
    assert client.models.retrieve(MODEL) == model
    card: Any = model
    assert card.max_model_len == 2048


# what Strobe adds


def test_speculation_field_is_honoured_and_reported(client: openai.OpenAI):
    reports: list[dict[str, Any]] = []
    texts = set[str | None]()
    for speculation in (False, {"method": "dflash", "num_drafts": 7}, {"method": "ngram"}):
        extra = {"speculation": speculation, "include_speculation": True}
        completion: Any = client.chat.completions.create(**fields(SUM, extra_body=extra))
        reports.append(completion.speculation)
        texts.add(completion.choices[0].message.content)
    assert len(texts) == 1
    assert [report["method"] for report in reports] == ["none", "dflash", "ngram"]
    assert [report["used"] for report in reports] == [False, True, True]
    assert reports[0]["off_reason"]
    assert len(reports[1]["accepted_per_position"]) == 7
    assert reports[1]["acceptance_length"] > 5
    assert all(report["decode_seconds"] > 0 for report in reports)


def test_header_requests_the_speculation_report(client: openai.OpenAI):
    headers = {"X-Strobe-Speculation": "1"}
    completion: Any = client.chat.completions.create(**fields(SUM), extra_headers=headers)
    assert completion.speculation["used"]
    without: Any = client.chat.completions.create(**fields(SUM))
    assert "speculation" not in without.model_extra


def test_field_without_effect_is_named(client: openai.OpenAI):
    idle: dict[str, Any] = {"user": "u", "store": True, "metadata": {"a": "b"}}
    idle |= {"service_tier": "priority", "prediction": {"type": "content", "content": "x"}}
    completion: Any = client.chat.completions.create(**fields(SUM, **idle))
    assert {sentence.split()[0] for sentence in completion.warnings} == set(idle)
    first: Any = next(iter(client.chat.completions.create(**fields(SUM, **idle), stream=True)))
    assert first.warnings == completion.warnings
    without: Any = client.chat.completions.create(**fields(SUM))
    assert "warnings" not in without.model_extra


def test_request_ids_are_returned(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(**fields(SUM, max_tokens=2))
    assert raw.headers["x-request-id"] in raw.parse().id
    own = {"X-Request-Id": "mine-1"}
    completion = client.chat.completions.create(**fields(SUM, max_tokens=2), extra_headers=own)
    assert completion._request_id == "mine-1"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields(SUM, temperature=-1), extra_headers=own)
    assert caught.value.request_id == "mine-1"


# errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "param", "code"),
    [
        ({"temperature": 101}, "temperature", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"extra_body": {"wat": 1}}, "wat", "unknown_parameter"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search", "unsupported_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"max_tokens": 4000}, "max_tokens", "context_length_exceeded"),
        ({"messages": user("word " * 3000)}, "messages", "context_length_exceeded"),
        (
            {"max_tokens": openai.omit, "extra_body": {"min_tokens": 3000}},
            "min_tokens", "context_length_exceeded",
        ),
        ({"extra_body": {"guided_regex": "("}}, "guided_regex", "invalid_value"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "invalid_value"),
    ],
)  # fmt: skip
def test_invalid_field_is_named(
    client: openai.OpenAI, field: dict[str, Any], param: str, code: str, stream: bool
):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**fields(SUM, **field), stream=stream)
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.body["message"].endswith(".")  # pyright: ignore


def test_unknown_path_is_not_found(client: openai.OpenAI):
    request = {**fields(SUM), "model": "gpt-4o"}
    with pytest.raises(openai.NotFoundError, match="strobe-demo") as caught:
        client.chat.completions.create(**request)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.InternalServerError, match="Strobe serves text generation") as no:
        client.embeddings.create(model=MODEL, input="text")
    assert (no.value.status_code, no.value.code) == (501, "not_implemented")


def test_timeout_is_a_server_error(client: openai.OpenAI):
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(**fields(SUM, extra_body={"timeout": 1e-9}))
    assert (caught.value.status_code, caught.value.code) == (504, "timeout")


@pytest.mark.full
def test_key_is_required(tmp_path: Path):
    pair = make_pair(tmp_path)
    served = Served(str(pair.target), "--api-key=sesame", "--served-model-name=tiny")
    try:
        url = f"{served.url}/v1"
        request: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        for key in ("wrong", "sesam", "none"):
            client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
            with pytest.raises(openai.AuthenticationError):
                client.completions.create(**request)
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        client = openai.OpenAI(base_url=url, api_key="sesame", max_retries=0)
        assert client.models.list().data[0].id == "tiny"
        assert client.completions.create(**request).usage.completion_tokens == 2  # pyright: ignore
    finally:
        assert served.stop() == 0
    assert "sesam" not in served.log


# many at once


def test_sixteen_concurrent_streams_do_not_mix(client: openai.OpenAI, server: Served):
    words = ("horse", "pear", "paper", "rocket", "ladder", "boat", "lemon", "tiger")
    texts = [
        f"Take the words {', '.join((*words[i % 8 :], *words[: i % 8])[: 4 + i // 8])} and "
        "sort them from A to Z."
        for i in range(16)
    ]

    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(**fields(text, max_tokens=80), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def every() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as many:
            return await asyncio.gather(*(one(many, text) for text in texts))

    answers = asyncio.run(every())
    assert len(set(answers)) == 16
    for text, answer in list(zip(texts, answers, strict=True))[::5]:
        alone = client.chat.completions.create(**fields(text, max_tokens=80))
        assert alone.choices[0].message.content == answer
