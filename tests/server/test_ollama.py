"""Ollama's endpoints of a real server with the demo models, with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.support.http_client import Talk
from tests.server.support.server_process import Served

SUM = "With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?"
WEATHER = "What is the weather in Athens in celsius?"
FIELDS = {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "kelvin"]}}
OBJECT = {"type": "object", "properties": FIELDS, "required": list(FIELDS),
          "additionalProperties": False}  # fmt: skip
DESCRIPTION = "Use this to know the weather in a city."
TOOL = {"type": "function", "function": {
    "name": "get_weather", "description": DESCRIPTION, "parameters": OBJECT}}  # fmt: skip


def lines(
    server: Served, path: str, options: dict[str, Any] | None = None, **fields: Any
) -> Iterator[dict[str, Any]]:
    settings = {"temperature": 0, "num_predict": 128, **(options or {})}
    with Talk(server.url, path, {"options": settings, **fields}) as talk:
        assert talk.status == 200, talk.json()
        kind = "json" if fields.get("stream") is False else "x-ndjson"
        assert talk.response.getheader("content-type") == f"application/{kind}"
        yield from map(json.loads, talk.response)


def ask(server: Served, content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    (answer,) = lines(server, "/api/chat", messages=messages, stream=False, **fields)
    return answer


def test_tool_call_and_result(server: Served):
    first = ask(server, WEATHER, tools=[TOOL])["message"]
    (call,) = first["tool_calls"]
    assert call["function"]["arguments"] == {"city": "Athens", "unit": "celsius"}
    assert first["thinking"]
    assert not first["content"]
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"degrees": 31}'}
    messages = [{"role": "user", "content": WEATHER}, first, result]
    fields = {"messages": messages, "tools": [TOOL], "think": False}
    *parts, last = lines(server, "/api/chat", **fields)
    assert "31" in "".join(part["message"]["content"] for part in parts)
    assert (last["done"], last["done_reason"]) == (True, "stop")


FEATURES: dict[str, dict[str, Any]] = {
    "text": {"think": False},
    "thinking": {"tools": [TOOL]},
    "schema": {"format": OBJECT, "think": False},
    "stopped": {"options": {"stop": ["Step 2"]}, "think": False},
    "short": {"options": {"num_predict": 5}},
    "scores": {"logprobs": True, "top_logprobs": 2, "options": {"num_predict": 9}},
    "seeded": {"options": {"temperature": 1.5, "top_p": 1, "top_k": 0, "seed": 5}},
}


@pytest.mark.parametrize("name", FEATURES)
def test_speculation_and_streams_change_no_answer(server: Served, name: str):
    content, fields = WEATHER if name == "thinking" else SUM, FEATURES[name]
    answers: list[dict[str, Any]] = []
    for speculation in (True, False):
        options = {**fields.get("options", {}), "speculation": speculation}
        options["include_speculation"] = True
        answers.append(ask(server, content, **{**fields, "options": options}))
    whole, plain = answers
    assert [answer["speculation"]["used"] for answer in answers] == [True, False]
    messages = [{"role": "user", "content": content}]
    *parts, last = lines(server, "/api/chat", messages=messages, **fields)
    streamed = [part["message"] for part in parts]
    for part in ("content", "thinking"):
        text = whole["message"].get(part, "")
        assert text == plain["message"].get(part, "")
        assert text == "".join(message.get(part, "") for message in streamed)
    calls = [call["function"] for message in streamed for call in message.get("tool_calls", ())]
    assert calls == [call["function"] for call in whole["message"].get("tool_calls", ())]
    assert bool(calls) == (name == "thinking")
    counts = ("done", "done_reason", "prompt_eval_count", "eval_count")
    assert {k: last[k] for k in counts} == {k: whole[k] for k in counts}
    assert whole["done_reason"] == ("length" if name in ("short", "scores", "seeded") else "stop")
    assert all(answer[f"{part}_duration"] > 0
               for answer in answers for part in ("total", "eval", "prompt_eval"))  # fmt: skip
    if name == "schema":
        assert json.loads(whole["message"]["content"]).keys() == FIELDS.keys()
    if name == "scores":
        scores = [score for part in parts for score in part.get("logprobs", ())]
        assert [score["token"] for score in scores] == [s["token"] for s in whole["logprobs"]]
        assert len(scores[0]["top_logprobs"]) == 2


def test_generate_with_a_raw_prompt_equals_the_chat(server: Served):
    chat = ask(server, SUM, think=False)
    start = f"<|im_start|>user\n{SUM}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    *parts, last = lines(server, "/api/generate", prompt=start, raw=True)
    assert "".join(part["response"] for part in parts) == chat["message"]["content"]
    assert last["prompt_eval_count"] == chat["prompt_eval_count"]
    (whole,) = lines(server, "/api/generate", prompt=SUM, think=False, stream=False)
    assert whole["response"] == chat["message"]["content"]


def test_request_without_a_prompt_answers_at_once(server: Served):
    for path in ("/api/chat", "/api/generate"):
        (answer,) = lines(server, path, stream=False, keep_alive=0)
        assert (answer["done"], answer["done_reason"]) == (True, "load")
        assert answer["warnings"] == ["keep_alive has no effect: the model stays loaded."]


def test_num_ctx_and_a_long_answer_are_warnings(server: Served):
    answer = ask(server, SUM, think=False, options={"num_ctx": 9999, "num_predict": 99999})
    (first, second) = answer["warnings"]
    assert first.startswith("options.num_predict is 99999, but the answer has at most ")
    assert second.startswith("options.num_ctx is 9999, but the context holds 2048 tokens")


def test_listed_name_is_served_and_described(server: Served):
    (model,) = json.loads(server.get("/api/tags"))["models"]
    (running,) = json.loads(server.get("/api/ps"))["models"]
    assert running["context_length"] == 2048
    assert len(model["digest"]) == 64
    assert model.items() <= running.items()
    assert model["name"].endswith(":latest")
    with Talk(server.url, "/api/show", {"model": model["name"]}) as talk:
        shown = talk.json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["qwen3.context_length"] == 2048
    assert ask(server, SUM, model=model["name"], think=False)["model"] == model["name"]


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("/api/chat", {"model": "nope"}, 404),
        ("/api/show", {"model": "nope"}, 404),
        ("/api/chat", {"options": {"seed": "x"}}, 400),
        ("/api/pull", {"model": "x"}, 501),
        ("/api/nothing", {}, 404),
    ],
)
def test_error_is_one_sentence(server: Served, path: str, fields: dict[str, Any], status: int):
    with Talk(server.url, path, fields) as talk:
        body = talk.json()
    assert (talk.status, list(body)) == (status, ["error"])
    assert body["error"].endswith(".")
