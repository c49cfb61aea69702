"""Tool calls on the four chat endpoints, whole and streamed: each reads an answer the same way."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from strobe.request import FinishReason
from tests.server.support.asgi_client import call
from tests.server.support.scripted_server import Script, shared_app

NAMES = ("read_file", "get_time")
USER = {"role": "user", "content": "hi"}
OPTIONS: dict[str, Any] = {
    "hermes": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    "qwen3_coder": {"tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3"},
    "llama3": {"tool_call_parser": "llama3_json", "reasoning_parser": "none"},
    "gemma4": {"tool_call_parser": "gemma4", "reasoning_parser": "none"},
    "gpt_oss": {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"},
}


class Reading(NamedTuple):
    """What a client reads in an answer. calls: (name, arguments); ended: "calls", "length" or
    "stop"."""

    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    ended: str


def chat_tools(*names: str) -> list[dict[str, Any]]:
    schema = {"type": "object"}
    return [{"type": "function", "function": {"name": n, "parameters": schema}} for n in names]


def lines(body: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects of a stream."""
    texts = [line.removeprefix("data: ") for line in body.decode().splitlines()]
    return [json.loads(text) for text in texts if text.startswith("{")]


ENDS = {"tool_calls": "calls", "tool_use": "calls", "max_tokens": "length", "end_turn": "stop"}


def read_chat(body: bytes, *, streamed: bool) -> Reading:
    reasoning = content = ended = ""
    calls: list[list[str]] = []
    for chunk in lines(body) if streamed else [json.loads(body)]:
        for choice in chunk["choices"]:
            part = choice["delta" if streamed else "message"]
            reasoning += part.get("reasoning_content") or ""
            content += part.get("content") or ""
            for delta in part.get("tool_calls", []):
                if "id" in delta:
                    calls.append([delta["function"]["name"], ""])
                calls[-1][1] += delta["function"]["arguments"]
            ended = choice["finish_reason"] or ended
    read = [(name, json.loads(arguments)) for name, arguments in calls]
    return Reading(reasoning, content, read, ENDS.get(ended, ended))


def read_responses(body: bytes, *, streamed: bool) -> Reading:
    response = lines(body)[-1]["response"] if streamed else json.loads(body)
    reasoning = content = ""
    calls: list[tuple[str, Any]] = []
    for item in response["output"]:
        if item["type"] == "function_call":
            assert item["status"] == "completed"
            calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "message":
            content += item["content"][0]["text"]
        else:
            reasoning += item["content"][0]["text"]
    ended = "length" if response["status"] == "incomplete" else "calls" if calls else "stop"
    return Reading(reasoning, content, calls, ended)


def read_messages(body: bytes, *, streamed: bool) -> Reading:
    blocks: list[dict[str, Any]] = []
    reason = ""
    if streamed:
        for event in lines(body):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                for name, key in (
                    ("text", "text"),
                    ("thinking", "thinking"),
                    ("json", "partial_json"),
                ):
                    blocks[-1][name] = blocks[-1].get(name, "") + delta.get(key, "")
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        for block in blocks:
            block["input"] = json.loads(block["json"]) if block["type"] == "tool_use" else None
    else:
        blocks = json.loads(body)["content"]
        reason = json.loads(body)["stop_reason"]
    return Reading(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
        ENDS[reason],
    )


def read_ollama(body: bytes, *, streamed: bool) -> Reading:
    parts = lines(body) if streamed else [json.loads(body)]
    messages = [part["message"] for part in parts]
    calls = [
        (entry["function"]["name"], entry["function"]["arguments"])
        for message in messages
        for entry in message.get("tool_calls", [])
    ]
    ended = parts[-1]["done_reason"]
    return Reading(
        "".join(message.get("thinking", "") for message in messages),
        "".join(message["content"] for message in messages),
        calls,
        "calls" if calls and ended == "stop" else ended,
    )


def anthropic_tools(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "input_schema": {"type": "object"}} for name in names]


def flat_tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", **tool["function"]} for tool in chat_tools(*names)]


class Endpoint(NamedTuple):
    path: str
    body: dict[str, Any]
    read: Callable[..., Reading]


ENDPOINTS = [
    Endpoint("/v1/chat/completions", {"messages": [USER], "tools": chat_tools(*NAMES)}, read_chat),
    Endpoint("/v1/responses", {"input": "hi", "tools": flat_tools(*NAMES)}, read_responses),
    Endpoint(
        "/v1/messages",
        {
            "messages": [USER],
            "max_tokens": 999,
            "tools": anthropic_tools(*NAMES),
            "thinking": {"type": "enabled"},
        },
        read_messages,
    ),
    Endpoint("/api/chat", {"messages": [USER], "tools": chat_tools(*NAMES)}, read_ollama),
]


def check_all(
    form: str,
    text: str,
    expected: Reading,
    *,
    ends: FinishReason = "stop",
    endpoints: Sequence[Endpoint] = ENDPOINTS,
    streams: Sequence[bool] = (False, True),
    **body: Any,
) -> None:
    """Check that every endpoint reads an answer in the same way, whole and streamed."""
    for endpoint in endpoints:
        for streamed in streams:
            for size in (1, 1000):
                application = shared_app(Script(text, size, ends), **OPTIONS[form])
                sent = {**endpoint.body, "stream": streamed, **body}
                answer = call(application, endpoint.path, body=[json.dumps(sent).encode()])
                assert answer.status == 200, answer.body
                reading = endpoint.read(answer.body, streamed=streamed)
                assert reading == expected, (endpoint.path, streamed, size)


TAGS = """<tool_call>
<function=read_file>
<parameter=path>
/etc/hosts
</parameter>
</function>
</tool_call>"""
HERMES = '<tool_call>\n{"name": "read_file", "arguments": {"path": "/etc/hosts"}}\n</tool_call>'
HOSTS = [("read_file", {"path": "/etc/hosts"})]


@pytest.mark.parametrize(("form", "written"), [("qwen3_coder", TAGS), ("hermes", HERMES)])
@pytest.mark.parametrize("end", ["", "\n</think>\n\n"])
def test_call_at_the_end_of_reasoning_is_a_call(form: str, written: str, end: str):
    text = f"<think>\nI read it.\n{written}{end}"
    check_all(form, text, Reading("I read it.", "", HOSTS, "calls"))


@pytest.mark.parametrize("thought", ["I use <tool_call> for that.", f"Like this: {TAGS}"])
def test_tags_mentioned_in_reasoning_are_no_call(thought: str):
    text = f"<think>\n{thought}\n</think>\n\nDone."
    check_all("qwen3_coder", text, Reading(thought, "Done.", [], "stop"))


def written(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'


def test_raw_line_break_in_an_argument_is_accepted():
    calls = [("read_file", {"path": "a\nb\tc"})]
    check_all("hermes", written('{"path": "a\nb\tc"}'), Reading("", "", calls, "calls"))


@pytest.mark.parametrize(
    "arguments",
    ['{"path": "a",}', "{'path': 'a'}", '{"path": "\\d"}', '{"path": "say "a""}', '{"path": "a'],
)
def test_call_with_wrong_json_is_text(arguments: str):
    text = written(arguments)
    check_all("hermes", text, Reading("", text, [], "stop"))


def test_gpt_oss_call_with_empty_body_has_no_arguments():
    text = "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>"
    check_all("gpt_oss", text, Reading("", "", [("get_time", {})], "calls"))


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "get_time"}\n</tool_call>', [("get_time", {})]),
        (
            "hermes",
            '<tool_call>\n[{"name": "get_time"}, {"name": "read_file", "arguments": '
            '"{\\"path\\": \\"/etc/hosts\\"}"}]\n</tool_call>',
            [("get_time", {}), *HOSTS],
        ),
        ("llama3", '{"name": "get_time", "parameters": null}', [("get_time", {})]),
        (
            "gemma4",
            "<|tool_call>call:get_time{data_refs:['ds_1'],s:'x'}<tool_call|>",
            [("get_time", {"data_refs": ["ds_1"], "s": "x"})],
        ),
    ],
)
def test_other_forms_of_a_call_are_calls(form: str, text: str, calls: list[tuple[str, Any]]):
    check_all(form, text, Reading("", "", calls, "calls"))


def test_cut_call_is_length_with_the_complete_calls():
    text = f"Well.\n{HERMES}\n{HERMES[:50]}"
    check_all("hermes", text, Reading("", "Well.", HOSTS, "length"), ends="length")


NAMED = (
    {"type": "function", "function": {"name": "read_file"}},
    {"type": "function", "name": "read_file"},
    {"type": "tool", "name": "read_file"},
)
REQUIRED = ("required", "required", {"type": "any"})


def check_forced(choices: Any, text: str, expected: Reading, **options: Any) -> None:
    """Check the endpoints with a tool_choice. choices: of chats, responses and messages."""
    for endpoint, choice in zip(ENDPOINTS, choices, strict=False):
        body = {key: value for key, value in endpoint.body.items() if key != "thinking"}
        check_all(
            "hermes", text, expected, endpoints=[endpoint._replace(body=body)], tool_choice=choice,
            **options,
        )  # fmt: skip


@pytest.mark.parametrize("choices", [NAMED, REQUIRED])
def test_forced_call_is_one_call(choices: Any):
    one = Reading("", "", HOSTS, "calls")
    check_forced(choices, f"{HERMES}\n{HERMES}", one)
    check_forced(choices, f"{HERMES}\n{HERMES[:30]}", one._replace(ended="length"), ends="length")


def test_required_calls_are_several_on_request():
    two = Reading("", "", HOSTS * 2, "calls")
    text = f"{HERMES}\n{HERMES}"
    check_forced(REQUIRED[:2], text, two, parallel_tool_calls=True)
    several = {"type": "any", "disable_parallel_tool_use": False}
    messages = [endpoint for endpoint in ENDPOINTS if endpoint.path == "/v1/messages"]
    check_all("hermes", text, two, endpoints=messages, tool_choice=several)
    cut = two._replace(ended="length")
    check_forced(
        REQUIRED[:2], f"{text}\n{HERMES[:30]}", cut, ends="length", parallel_tool_calls=True
    )


@pytest.mark.parametrize("length", [5, 20, 30, 60])
def test_cut_forced_call_leaves_no_text(length: int):
    for choices in (NAMED, REQUIRED):
        nothing = Reading("", "", [], "length")
        check_forced(choices, HERMES[:length], nothing, ends="length", streams=(False,))


def test_forced_call_is_streamed_as_it_arrives():
    application = shared_app(Script(HERMES), **OPTIONS["hermes"])
    body = {**ENDPOINTS[0].body, "stream": True, "tool_choice": "required"}
    chunks = lines(call(application, body=[json.dumps(body).encode()], path=ENDPOINTS[0].path).body)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert len([delta for delta in deltas if delta.get("tool_calls")]) > 2
