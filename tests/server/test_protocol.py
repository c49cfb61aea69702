"""Accepted, rejected and ignored fields of every endpoint, with one sentence and field each."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from strobe.sampling_params import SamplingParams
from strobe.server.generation.api_errors import ApiError, to_api_error
from strobe.server.openai.error_body import error_body
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError, to_field_error
from strobe.server.schema.unsupported_fields import NO_EFFECT, UNSUPPORTED
from tests.server.support.answer_checks import check_body
from tests.server.support.request_bodies import (
    GENERATING,
    NAMED,
    SMALLEST,
    TOOL,
    USER,
    chat,
    refusal,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("model", SMALLEST)
def test_minimal_request_has_no_warnings(model: type[RequestModel]):
    assert model.read(json.dumps(SMALLEST[model]).encode()).warnings() == []


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"7", b"null", b'"text"', b"\xff\xfe", b"[" * 9999, b"1" * 9999,
             b'{"input": NaN}', b'{"prompt": "\\ud800"}', b'{"model": 7, "messages": 7}']
)  # fmt: skip
@pytest.mark.parametrize("model", SMALLEST)
def test_malformed_body_is_400(model: type[RequestModel], body: bytes):
    with pytest.raises(FieldError) as caught:
        model.read(body)
    error = error_body(to_api_error(caught.value))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 300


@pytest.mark.parametrize("model", SMALLEST)
def test_null_means_unset(model: type[RequestModel]):
    every = dict.fromkeys([*model.model_fields, "user", "nobody_knows"])
    request = model.read(json.dumps({**every, **SMALLEST[model]}))
    assert request == model.read(json.dumps(SMALLEST[model]))
    assert request.model_fields_set == set(SMALLEST[model])


@pytest.mark.parametrize("model", [m for m in SMALLEST if not m.ignores_unknown_fields])
def test_unknown_field_is_named(model: type[RequestModel]):
    error = refusal(model, quux_zork=1)
    assert (error.param, error.code) == ("quux_zork", "unknown_parameter")
    assert "quux_zork" in str(error)


@pytest.mark.parametrize("model", SMALLEST)
def test_lenient_server_ignores_unknown_field(model: type[RequestModel]):
    request = model.read({**SMALLEST[model], "quux_zork": 1}, lenient=True)
    assert request.warnings() == ["quux_zork has no effect: this server does not know it."]
    for name in UNSUPPORTED.get(model.schema_key, {}):
        with pytest.raises(FieldError):
            model.read({**SMALLEST[model], name: "something"}, lenient=True)


@pytest.mark.parametrize("name", ["\0", "a\0.b"])
def test_unknown_field_may_have_any_name(name: str):
    message = {**USER, name: 1}
    with pytest.raises(FieldError, match=r"is not a field of messages\[0\]"):
        ChatCompletionRequest.read({"messages": [message]})
    request = ChatCompletionRequest.read({"messages": [message]}, lenient=True)
    assert len(request.warnings()) == 1


LENIENT: list[tuple[type[RequestModel], dict[str, Any], str]] = [
    (ChatCompletionRequest, {"messages": [{**USER, "x": 1}]}, "messages[0].x"),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{"text": "a", "x": 1}]}]},
     "messages[0].content[0].x"),
    (ChatCompletionRequest,
     {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]}]},
     "messages[0].tool_calls[0].function.x"),
    (ChatCompletionRequest, {"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
    (ChatCompletionRequest, {"tools": [TOOL], "tool_choice": {**NAMED, "x": 1}}, "tool_choice.x"),
    (ChatCompletionRequest, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    (ChatCompletionRequest, {"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs.x"),
    (ChatCompletionRequest, {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (ChatCompletionRequest, {"speculation": {"x": 1}}, "speculation.x"),
    (ResponsesRequest, {"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x"),
    (ResponsesRequest, {"text": {"x": 1}}, "text.x"),
    (ResponsesRequest, {"reasoning": {"x": 1}}, "reasoning.x"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "fields", "path"), LENIENT, ids=[path for *_, path in LENIENT])
def test_lenient_server_names_unknown_field_path(
    model: type[RequestModel], fields: dict[str, Any], path: str
):
    assert refusal(model, **fields).param == path
    warnings = model.read({**SMALLEST[model], **fields}, lenient=True).warnings()
    assert f"{path} has no effect: this server does not know it." in warnings


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("top-p", "top_p"), ("stopp", "stop"), ("usr", "user"),
     ("max_token", "max_tokens")],
)  # fmt: skip
def test_close_match_is_suggested(wrong: str, right: str):
    assert f"did you mean {right}?" in str(refusal(ChatCompletionRequest, **{wrong: 1}))


def test_nested_field_is_named_by_its_path():
    error = refusal(ChatCompletionRequest, stream=True, stream_options={"include_usge": True})
    assert error.param == "stream_options.include_usge"
    assert "did you mean include_usage?" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", '"hot", but must be a number'),
        ("temperature", True, "true, but must be a number"),
        ("n", 1.5, "1.5, but must be a whole number"),
        ("n", "1", '"1", but must be a whole number'),
        ("stream", 1, "1, but must be true or false"),
        ("messages", "hi", '"hi", but must be a list'),
        ("chat_template", {}, "{}, but must be a string"),
        ("chat_template_kwargs", [], "[], but must be an object"),
        ("reasoning_effort", "huge", '"huge", but must be one of "none", "minimal"'),
        ("stop", 5, "5, but must be a string or a list of strings"),
        ("top_p", ["a", None, {"b": True}], '["a", null, {"b": true}], but must be a number'),
        ("top_p", list(range(5000)), "[0, 1, 2, 3, 4, 5, ...], but must be a number"),
    ],
)
def test_wrong_type_error_names_the_value(field: str, value: Any, message: str):
    error = refusal(ChatCompletionRequest, **{field: value})
    assert error.param == field
    assert str(error).startswith(f"{field} is {message}")


def test_list_index_is_in_the_path():
    assert refusal(ChatCompletionRequest, messages=[USER, 3]).param == "messages[1]"


def test_long_value_is_cut_in_the_error():
    error = refusal(ChatCompletionRequest, temperature="x" * 100_000)
    assert 'xxx…"' in str(error)
    assert len(str(error)) < 200
    error = refusal(ChatCompletionRequest, **{"x" * 100_000: 1})
    assert len(str(error)) < 200
    assert len(error.param or "") <= 200


def test_to_field_error_reads_framework_errors():
    """FastAPI wraps pydantic's errors in its own exception, with "body" before each location."""

    class Framework:
        def errors(self) -> list[dict[str, Any]]:
            return [self.error]

        def __init__(self, **error: Any):
            self.error = {"input": "x", "msg": "", **error}

    assert to_field_error(Framework(type="float_type", loc=("body", "top_p"))).param == "top_p"
    assert to_field_error(Framework(type="json_invalid", loc=("body", 3))).code == "invalid_json"
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [USER], "frobnicate": 1})
    assert to_field_error(caught.value).param == "frobnicate"


def test_missing_field_is_named():
    with pytest.raises(FieldError) as caught:
        ChatCompletionRequest.read(b"{}")
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_error_object_is_openais():
    body = error_body(ApiError(429, "The queue is full.", code="queue_full"))
    assert body["error"]["type"] == "rate_limit_error"
    check_body(answers.ErrorResponse, body)


@pytest.mark.parametrize(
    ("model", "name"), [(m, name) for m in SMALLEST for name in NO_EFFECT.get(m.schema_key, {})]
)
def test_fields_without_effect_are_warnings(model: type[RequestModel], name: str):
    (warning,) = model.read({**SMALLEST[model], name: "something"}).warnings()
    assert warning.startswith(f"{name} has no effect: ")
    for value in NO_EFFECT.get(model.schema_key, {})[name].neutral_values:
        assert model.read({**SMALLEST[model], name: value}).warnings() == []


@pytest.mark.parametrize(
    ("model", "name"), [(m, name) for m in SMALLEST for name in UNSUPPORTED.get(m.schema_key, {})]
)
def test_unsupported_fields_are_400_unless_neutral(model: type[RequestModel], name: str):
    error = refusal(model, **{name: "something"})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert "not supported" in str(error)
    for value in UNSUPPORTED.get(model.schema_key, {})[name].neutral_values:
        assert model.read({**SMALLEST[model], name: value}).warnings() == []


def test_true_is_not_the_neutral_value_1():
    assert refusal(ChatCompletionRequest, best_of=True).param == "best_of"
    assert refusal(ChatCompletionRequest, use_beam_search=0).param == "use_beam_search"
    assert chat(length_penalty=1, best_of=1.0).warnings() == []


@pytest.mark.parametrize("model", SMALLEST)
def test_supported_fields_are_not_in_the_tables(model: type[RequestModel]):
    tables = [
        set(model.model_fields),
        set(NO_EFFECT.get(model.schema_key, {})),
        set(UNSUPPORTED.get(model.schema_key, {})),
    ]
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_repeated_warnings_are_merged():
    marked = {**USER, "cache_control": {"type": "ephemeral"}}
    warnings = chat(messages=[marked, marked, marked], user="me").warnings()
    assert {line.split(" has")[0] for line in warnings} == {"user", "messages[0].cache_control"}
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (ChatCompletionRequest, "chat.completion_create_params"),
        (CompletionRequest, "completion_create_params"),
        (ResponsesRequest, "responses.response_create_params"),
    ],
)
def test_all_openai_client_fields_are_known(model: type[RequestModel], where: str):
    pytest.importorskip("openai")
    module = importlib.import_module(f"openai.types.{where}")
    (base,) = [cls for name, cls in vars(module).items() if name.endswith("CreateParamsBase")]
    known = {
        *model.model_fields,
        *NO_EFFECT.get(model.schema_key, {}),
        *UNSUPPORTED.get(model.schema_key, {}),
    }
    assert len(base.__annotations__) > 15
    assert not set(base.__annotations__) - known


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "function", "name", "json", "tools", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("as_text", [True, False])
def test_deep_body_error_names_its_depth(as_text: bool):
    schema = '{"items":' * 400 + "{}" + "}" * 400
    body = f'{{"prompt": "[[[", "guided_json": {schema}}}'
    with pytest.raises(FieldError) as caught:
        CompletionRequest.read(body if as_text else body.encode())
    assert "nested too deeply: 402 levels, at most 200 are read" in str(caught.value)


@pytest.mark.parametrize("model", SMALLEST)
@given(data=st.data())
def test_any_json_is_400_or_valid(model: type[RequestModel], data: st.DataObject):
    names = st.sampled_from(sorted({*model.model_fields, *UNSUPPORTED.get(model.schema_key, {})}))
    body = {**SMALLEST[model], **data.draw(st.dictionaries(names, JSON_VALUES, max_size=3))}
    try:
        request = model.read(body)
    except FieldError:
        return
    if isinstance(request, GENERATING):
        SamplingParams(**request.sampling.arguments({}))


def test_protocol_imports_neither_engine_nor_framework():
    """Tools import the protocol without the engine and the web framework."""
    code = (
        "import sys, strobe.server.openai.protocol.responses_request, "
        "strobe.server.openai.protocol.token_requests, "
        "strobe.server.openai.protocol.response_bodies; print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    loaded = set(done.stdout.split())
    assert "pydantic" in loaded
    assert not {"torch", "fastapi", "starlette", "transformers", "strobe.engine"} & loaded
