"""docs/api.md and the OpenAPI schema match the models; the openai client parses responses."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from strobe.server.generation.bodies import PromptLogprob, SpeculationReport, TokenLogprob
from strobe.server.openai.error_body import TYPES
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.items import ITEMS
from strobe.server.openai.protocol.responses_request import ResponsesStreamOptions
from strobe.server.page import files as page_files
from strobe.server.schema.base import RequestModel, StreamOptions
from strobe.server.schema.messages import PARTS, AssistantMessage, ToolCall
from strobe.server.schema.sampling_fields import SamplingFields
from strobe.server.schema.structured_output import KINDS, SINGLE_FIELDS, SchemaTextFormat
from strobe.server.schema.tools import Function
from strobe.server.schema.unsupported_fields import NO_EFFECT, UNSUPPORTED
from tests.server.support.answer_checks import check_body
from tests.server.support.request_bodies import GENERATING, SMALLEST
from tests.server.support.scripted_server import Script, app

ROOT = Path(__file__).parents[2]
PLACE = r"{(\w+)(?::path)?}"
"""A path parameter."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "scripts" / "api_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_tables_match_the_models(script: ModuleType, page: str):
    assert script.with_tables(page) == page, "run python scripts/api_page.py"


def rows(page: str, place: str) -> dict[str, str]:
    """Return the status of each field in a table of the page."""
    table = re.search(rf"<!-- table {re.escape(place)} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert table, place
    cells = [line.strip("| ").split(" | ") for line in table[1].splitlines()[2:]]
    return {row[0].strip("`"): row[-1] for row in cells}


@pytest.mark.parametrize("model", [*SMALLEST, StreamOptions, ResponsesStreamOptions])
def test_page_lists_every_request_field(model: type[RequestModel], page: str):
    named = rows(page, model.schema_key)
    if issubclass(model, SamplingFields):
        named = rows(page, "shared") | named
    for name in model.model_fields:
        assert named.pop(name).startswith("supported"), name
    for name in NO_EFFECT.get(model.schema_key, {}):
        assert named.pop(name) == "ignored", name
    for name in UNSUPPORTED.get(model.schema_key, {}):
        assert named.pop(name).startswith("rejected"), name
    assert not named


@pytest.mark.parametrize("place", sorted({*NO_EFFECT, *UNSUPPORTED}))
def test_page_lists_every_object_field(place: str, page: str):
    named = rows(page, place)
    if place in {model.schema_key for model in GENERATING}:
        named |= rows(page, "shared")
    assert not {*NO_EFFECT.get(place, {}), *UNSUPPORTED.get(place, {})} - set(named)


@pytest.mark.parametrize(
    "names",
    [
        AssistantMessage.model_fields, PARTS, ToolCall.model_fields, Function.model_fields, KINDS,
        SINGLE_FIELDS, [f.alias or n for n, f in SchemaTextFormat.model_fields.items()], ITEMS,
        *(item.model_fields for item in ITEMS.values()),
        SpeculationReport.__annotations__, answers.Step.__annotations__,
        answers.ModelCard.__annotations__,
        answers.TokenizeResponse.__annotations__, answers.DetokenizeResponse.__annotations__,
        answers.CompletionLogprobs.__annotations__, TokenLogprob.__annotations__,
        PromptLogprob.__annotations__, answers.ErrorDetail.__annotations__,
    ],
    # Names alone: the text of a field holds its address.
    ids=lambda names: " ".join(map(str, names)),
)  # fmt: skip
def test_page_lists_hand_written_parts(names: Any, page: str):
    words = set(re.findall(r"\w+", page))
    flat = [path for name in names for path in ([name] if isinstance(name, str) else name)]
    assert flat
    assert not set(flat) - words


def test_page_lists_every_endpoint(page: str):
    paths = re.findall(r"^\| (.*?) \| ", page.partition("\n\n|")[2].partition("\n\n")[0], re.M)
    named = {call for cell in paths for call in re.findall(r"`([A-Z]+ /[^`]*)`", cell)}
    routed = app(Script(""))
    while not hasattr(routed, "routes"):  # middleware
        routed = routed.app
    there = {
        f"{method} {re.sub(PLACE, lambda place: place[1].upper(), route.path)}"
        for route in routed.routes
        for method in getattr(route, "methods", ())
        if method not in ("HEAD", "OPTIONS")
    }
    loaded = {f"GET {path}" for path in page_files() if path != "/"}  # loaded by the page at /
    assert loaded <= there
    assert there - loaded == named
    assert len(named) > 10


def test_page_lists_every_status(page: str):
    for status, kind in TYPES.items():
        assert f"| {status} | `{kind}` |" in page


@pytest.mark.parametrize("model", SMALLEST)
def test_schema_lists_every_field_and_allows_others_only_if_ignored(model: type[RequestModel]):
    schema = json.loads(json.dumps(model.model_json_schema()))
    known = {
        *model.model_fields,
        *NO_EFFECT.get(model.schema_key, {}),
        *UNSUPPORTED.get(model.schema_key, {}),
    }
    assert set(schema["properties"]) == known
    others = None if model.ignores_unknown_fields else {"type": "null"}
    assert schema.get("additionalProperties") == others


@pytest.mark.parametrize("model", SMALLEST)
def test_schema_allows_null_for_optional_fields(model: type[RequestModel]):
    schema = model.model_json_schema()
    for name in set(model.model_fields) - set(schema.get("required", ())):
        kinds = [kind.get("type") for kind in schema["properties"][name]["anyOf"]]
        assert "null" in kinds, name


def test_openai_client_parses_the_examples():
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response

    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
             "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    head = {"id": "x", "created": 1, "model": "m", "usage": usage, "warnings": ["w"],
            "system_fingerprint": "f"}  # fmt: skip
    token = {"token": "a", "logprob": -0.5, "bytes": [97],
             "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]}  # fmt: skip
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call], "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop",
              "stop_reason": None, "logprobs": {"content": [token]}}  # fmt: skip
    delta = {"role": "assistant", "content": "a",
             "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}  # fmt: skip
    step = {"tokens": [("a", False)], "drafted": 0, "accepted": 0}
    lists = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}],
             "text_offset": [0]}  # fmt: skip
    text = {"index": 0, "text": "a", "finish_reason": "length", "logprobs": lists}
    output = {"type": "message", "id": "m", "role": "assistant", "status": "completed",
              "content": [{"type": "output_text", "text": "a", "annotations": [],
                           "logprobs": [token]}]}  # fmt: skip
    unset = ("error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls",
             "previous_response_id", "prompt", "user")  # fmt: skip
    reply = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed",
             "background": False, "output": [output], "parallel_tool_calls": True,
             "temperature": 1.0, "top_p": 1.0, "tool_choice": "auto", "store": True, "tools": [],
             "text": {"format": {"type": "text"}}, "top_logprobs": 0, "truncation": "disabled",
             "service_tier": "default", "reasoning": {"effort": None, "summary": None},
             "metadata": {}, **dict.fromkeys(unset),
             "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2,
                       "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                       "output_tokens_details": {"reasoning_tokens": 0}}}  # fmt: skip
    chunk = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "step": step}
    completion = {**head, "object": "chat.completion", "choices": [choice]}
    completion_chunk = {**head, "object": "chat.completion.chunk", "choices": [chunk]}
    text_completion = {**head, "object": "text_completion", "choices": [text]}

    pairs: list[tuple[Any, type[BaseModel], dict[str, Any]]] = [
        (answers.ChatCompletion, ChatCompletion, completion),
        (answers.ChatCompletionChunk, ChatCompletionChunk, completion_chunk),
        (answers.Completion, Completion, text_completion),
        (answers.Response, Response, reply),
    ]
    for ours, theirs, value in pairs:
        check_body(ours, value)
        theirs.model_validate(value)
