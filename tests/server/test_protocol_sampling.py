"""Sampling fields: bounds, combinations, and the engine's parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from strobe.sampling_params import RepetitionDetection, SamplingParams, Speculation
from strobe.server.anthropic.protocol.messages_request import MessagesRequest
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.sampling_fields import BOUNDS, SAME_NAME, SamplingFields
from tests.server.support.request_bodies import (
    GENERATING,
    SCHEMA,
    SMALLEST,
    chat,
    complete,
    refusal,
    respond,
)

EVERY_FIELD: dict[str, Any] = {
    **{name: bounds.low + 0.75 * (bounds.high - bounds.low) for name, bounds in BOUNDS.items()
       if name in SAME_NAME},
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "min_tokens": 1,
    "stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "presence_penalty": -2,
    "frequency_penalty": 2, "repetition_penalty": 1.2, "logit_bias": {"7": -100, "8": 1.5},
    "allowed_token_ids": [7, 8], "speculation": {"method": "ngram", "num_drafts": 3},
    "repetition_detection": {"max_pattern_size": 3, "min_count": 4},
}  # fmt: skip


def test_request_values_override_model_defaults():
    defaults = {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    for request in (
        chat(temperature=0, top_k=None),
        complete(temperature=0),
        respond(temperature=0),
    ):
        sampling = request.sampling.arguments(defaults)
        assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0, 0.95, 20)
    assert defaults == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}


def test_unset_fields_leave_sampling_defaults():
    assert chat().sampling.arguments({}) == {"max_tokens": None, "n": 1}
    assert complete().sampling.arguments({}) == {"max_tokens": 16, "n": 1}
    assert respond().sampling.arguments({}) == {"max_tokens": None}


@pytest.mark.parametrize("model", GENERATING)
def test_every_field_reaches_the_engine(model: type[SamplingFields]):
    assert set(EVERY_FIELD) == set(SAME_NAME)
    sampling = model.read(json.dumps({**SMALLEST[model], **EVERY_FIELD})).sampling.arguments({})
    expected = EVERY_FIELD | {
        "stop": ("a", "b"), "stop_token_ids": (4,), "allowed_token_ids": (7, 8),
        "logit_bias": {7: -100.0, 8: 1.5}, "speculation": Speculation("ngram", 3),
        "repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=4),
    }  # fmt: skip
    assert {name: sampling[name] for name in expected} == expected
    params = SamplingParams(**sampling | {"max_tokens": 9})
    assert (params.seed, params.stop, params.allowed_token_ids) == (-3, ("a", "b"), (7, 8))


def test_whole_floats_are_accepted_as_integers():
    arguments = chat(max_tokens=5.0, top_k=3.0).sampling.arguments({})
    assert arguments == {"max_tokens": 5, "top_k": 3, "n": 1}


@pytest.mark.parametrize("model", GENERATING)
@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("temperature", [-0.1, 100.5], [0, 100]),
        ("top_p", [0, -1, 1.01], [0.001, 1]),
        ("top_k", [-2, 2**31], [-1, 0, 1]),
        ("min_p", [-0.1, 1.1], [0, 1]),
        ("presence_penalty", [-2.1, 2.1], [-2, 2]),
        ("frequency_penalty", [-2.1, 2.1], [-2, 2]),
        ("repetition_penalty", [0, -1, 101], [0.01, 100]),
        ("seed", [2**63, -(2**63) - 1], [2**63 - 1, -(2**63)]),
        ("min_tokens", [-1], [0, 3]),
        ("timeout", [0, -1, 1e9], [0.001, 86400]),
        ("stop", ["", ["a", ""], [1]], ["x", [], ["a", "b"]]),
        ("stop_token_ids", [-1, [-1], [True], ["1"], [1.5], [2**31]], [[], [0, 5]]),
        ("allowed_token_ids", [[], [-1], 5], [[0]]),
        ("logit_bias", [{"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"1": True}, [], {"²": 1}],
         [{}, {"0": -100}]),
        ("request_id", ["", "x" * 129, "a\nb", "é", 5], ["x" * 128, "a-b"]),
        ("cache_salt", ["", 5], ["x", None]),
        ("speculation", [1, "on", {"method": "magic"}, {"num_drafts": -1},
                         {"method": []}, {"num_drafts": 1.5}],
         [True, False, {}, {"method": "none"}, {"method": None, "num_drafts": 0}]),
        ("repetition_detection", [True, 8, {"max_pattern_size": 3}, {"min_pattern_size": 1},
                                  {"max_pattern_size": 2, "min_count": 1}, {"min_count": -1}],
         [{}, {"max_pattern_size": 0}, {"max_pattern_size": 4.0, "min_count": 2}]),
    ],
)  # fmt: skip
def test_bounds(model: type[SamplingFields], field: str, bad: list[Any], good: list[Any]):
    for value in bad:
        error = refusal(model, **{field: value})
        assert re.split(r"[.\[]", error.param or "")[0] == field
        assert str(error).startswith(field)
    for value in good:
        SamplingParams(**model.read({**SMALLEST[model], field: value}).sampling.arguments({}))


@pytest.mark.parametrize(
    ("model", "limit"),
    [(ChatCompletionRequest, "max_tokens"), (ChatCompletionRequest, "max_completion_tokens"),
     (CompletionRequest, "max_tokens"), (ResponsesRequest, "max_output_tokens")],
)  # fmt: skip
def test_token_limits(model: type[SamplingFields], limit: str):
    assert model.read({**SMALLEST[model], limit: 3}).sampling.arguments({})["max_tokens"] == 3
    error = refusal(model, **{limit: 3, "min_tokens": 4})
    assert error.param == "min_tokens"
    assert f"{limit} 3" in str(error)
    assert refusal(model, **{limit: -1}).param == limit
    assert refusal(model, **{limit: 0}).param == limit


def test_two_limits_must_agree():
    error = refusal(ChatCompletionRequest, max_tokens=3, max_completion_tokens=4)
    assert error.param == "max_tokens"
    assert chat(max_tokens=3, max_completion_tokens=3).sampling.arguments({})["max_tokens"] == 3


def test_logprobs_of_a_chat():
    assert "logprobs" not in chat(logprobs=False, top_logprobs=0).sampling.arguments({})
    assert chat(logprobs=True).sampling.arguments({})["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.arguments({})["logprobs"] == 20
    assert chat(prompt_logprobs=0).sampling.arguments({})["prompt_logprobs"] == 0
    for fields in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        assert refusal(ChatCompletionRequest, **fields).param == "top_logprobs"
    assert refusal(ChatCompletionRequest, logprobs=3).param == "logprobs"


def test_logprob_token_ids_need_logprobs_and_take_the_place_of_top_tokens():
    ids = {"logprob_token_ids": [5, 7]}
    sampling = chat(logprobs=True, **ids).sampling.arguments({})
    assert (sampling["logprobs"], sampling["logprob_token_ids"]) == (0, (5, 7))
    assert complete(logprobs=0, **ids).sampling.arguments({})["logprob_token_ids"] == (5, 7)
    assert "logprobs" not in chat(logprob_token_ids=[]).sampling.arguments({})
    assert chat(logprobs=True, **ids).warnings() == []
    assert "top_logprobs has no effect" in chat(logprobs=True, top_logprobs=2, **ids).warnings()[0]
    assert "logprobs has no effect" in complete(logprobs=2, **ids).warnings()[0]
    for model, hint in ((ChatCompletionRequest, "true"), (CompletionRequest, "0")):
        assert f"set logprobs to {hint}" in str(refusal(model, **ids))
        many = refusal(model, logprob_token_ids=[5] * 129)
        assert many.param == "logprob_token_ids"
    for model in (ResponsesRequest, MessagesRequest):
        assert refusal(model, **ids).param == "logprob_token_ids"


def test_logprobs_of_a_response():
    include = ["message.output_text.logprobs"]
    assert respond(include=include).sampling.arguments({})["logprobs"] == 0
    assert respond(include=include, top_logprobs=4).sampling.arguments({})["logprobs"] == 4
    assert "logprobs" not in respond().sampling.arguments({})
    assert refusal(ResponsesRequest, top_logprobs=4).param == "top_logprobs"
    assert refusal(ResponsesRequest, include=["file_search_call.results"]).param == "include[0]"
    assert "encrypted" in respond(include=["reasoning.encrypted_content"]).warnings()[0]


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_prompt_logprobs_are_rejected_in_a_stream(model: type[SamplingFields]):
    assert refusal(model, stream=True, prompt_logprobs=0).param == "prompt_logprobs"


def test_stream_options_need_a_stream():
    for model in GENERATING:
        assert refusal(model, stream_options={}).param == "stream_options"
    options = chat(stream=True, stream_options={"include_usage": True}).stream_options
    assert options is not None
    assert options.include_usage
    for request in (chat, complete, respond):
        warnings = request(stream=True, stream_options={"include_obfuscation": True}).warnings()
        assert warnings == [
            "stream_options.include_obfuscation has no effect: chunks are not padded."
        ]
    error = refusal(
        ChatCompletionRequest, stream=True, stream_options={"continuous_usage_stats": True}
    )
    assert error.param == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]),
     ("", [""])],
)  # fmt: skip
def test_prompt_accepts_four_forms(prompt: Any, prompts: list[Any]):
    assert CompletionRequest.read({"prompt": prompt}).prompts() == prompts
    if isinstance(prompts[0], list):
        assert CompletionRequest.read({"prompt_token_ids": prompt}).prompts() == prompts


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [1, "a"], [[1], "a"], [True], [-1], [1.5], {}, 5, [None]]
)
def test_invalid_prompt_is_named(prompt: Any):
    assert (refusal(CompletionRequest, prompt=prompt).param or "").startswith("prompt")


def test_prompt_and_prompt_token_ids_conflict():
    assert refusal(CompletionRequest, prompt_token_ids=[1]).param == "prompt_token_ids"
    with pytest.raises(FieldError, match="prompt is missing"):
        CompletionRequest.read(b"{}")
    with pytest.raises(FieldError, match='prompt_token_ids is "text"'):
        CompletionRequest.read({"prompt_token_ids": "text"})


def test_max_tokens_0_needs_echo_or_prompt_logprobs():
    assert complete(max_tokens=0, echo=True).sampling.arguments({})["max_tokens"] == 0
    assert complete(max_tokens=0, prompt_logprobs=1).sampling.arguments({})["max_tokens"] == 0
    assert refusal(CompletionRequest, max_tokens=0).param == "max_tokens"


def test_echo_with_logprobs_requests_prompt_logprobs():
    assert complete(echo=True, logprobs=2).sampling.arguments({})["prompt_logprobs"] == 2
    both = complete(echo=True, logprobs=2, prompt_logprobs=5)
    assert both.sampling.options["prompt_logprobs"] == 5
    assert "prompt_logprobs" not in complete(echo=True).sampling.arguments({})
    assert "prompt_logprobs" not in complete(logprobs=2).sampling.arguments({})


def test_best_of_generates_and_ranks_more_answers():
    sampling = complete(best_of=3, n=2).sampling.arguments({})
    assert (sampling["n"], sampling["logprobs"]) == (3, 0)
    assert "logprobs" not in complete(best_of=2, n=2).sampling.arguments({})
    assert complete(best_of=2, n=2, stream=True).answers == 2
    assert refusal(CompletionRequest, best_of=1, n=2).param == "best_of"
    assert refusal(CompletionRequest, best_of=2, stream=True).param == "best_of"


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_truncation_keeps_at_least_one_token(model: type[RequestModel]):
    model.read({**SMALLEST[model], "truncate_prompt_tokens": -1})
    assert refusal(model, truncate_prompt_tokens=0).param == "truncate_prompt_tokens"
    assert refusal(model, truncate_prompt_tokens=-2).param == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("guided_json", SCHEMA, {"json": SCHEMA}),
        ("guided_json", json.dumps(SCHEMA), {"json": SCHEMA}),
        ("json_schema", json.dumps(SCHEMA), {"json": SCHEMA}),
        ("guided_regex", "a+", {"regex": "a+"}),
        ("regex", "a+", {"regex": "a+"}),
        ("guided_choice", ["a", "b"], {"choice": ["a", "b"]}),
        ("guided_grammar", "start: A", {"grammar": "start: A"}),
        ("ebnf", "root ::= a", {"grammar": "root ::= a"}),
        ("structured_outputs", {"json": SCHEMA}, {"json": SCHEMA}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
        ("structured_outputs", {"regex": "a", "json_object": False}, {"regex": "a"}),
        ("structured_outputs", {"choice": ["a"], "json": None}, {"choice": ["a"]}),
        ("structured_outputs", {"grammar": "g"}, {"grammar": "g"}),
    ],
)
@pytest.mark.parametrize("model", GENERATING)
def test_constraints(model: type[SamplingFields], field: str, value: Any, expected: Any):
    sampling = model.read({**SMALLEST[model], field: value}).sampling.arguments({})
    assert sampling["structured_outputs"] == expected
    SamplingParams(**sampling)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_response_format(model: type[SamplingFields]):
    def constraint(value: Any) -> Any:
        request = model.read({**SMALLEST[model], "response_format": value})
        return request.sampling.arguments({}).get("structured_outputs")

    assert constraint({"type": "text"}) is None
    assert constraint({"type": "json_object"}) == {"json_object": True}
    named = {"name": "x", "strict": True, "schema": SCHEMA}
    assert constraint({"type": "json_schema", "json_schema": named}) == {"json": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"choise": ["a"]}}, "structured_outputs.choise"),
        ({"structured_outputs": {"whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", GENERATING)
def test_invalid_constraints(model: type[SamplingFields], fields: dict[str, Any], param: str):
    assert refusal(model, **fields).param == param


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"type": "structural_tag"}, ""),
        ({"type": "tag"}, ".type"),
        ({"type": []}, ".type"),
        ({}, ".type"),
        ("json", ""),
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, ".json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": 1}}, ".json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
         ".json_schema.strict"),
        ({"type": "json_object", "schema": SCHEMA}, ".schema"),
        ({"type": "text", "json_schema": {"schema": SCHEMA}}, ".json_schema"),
    ],
)  # fmt: skip
def test_invalid_formats(value: Any, param: str):
    error = refusal(ChatCompletionRequest, response_format=value)
    assert error.param == f"response_format{param}"


def test_format_and_constraint_conflict():
    error = refusal(ChatCompletionRequest, response_format={"type": "json_object"}, regex="a")
    assert error.param == "regex"
    assert chat(response_format={"type": "text"}, regex="a").sampling.structured_outputs


def test_unenforced_keywords_of_a_schema_are_warnings():
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": None}}
    lark = f"start: %json {json.dumps(schema)}"
    tag = {"begin": "<a>", "schema": schema, "end": "</a>"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["<a>"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for source, value in (
        ("guided_json", schema),
        ("guided_json", json.dumps(schema)),
        ("guided_grammar", lark),
        ("response_format", named),
        ("response_format", tags),
        ("structured_outputs", {"json": schema}),
    ):
        sentence = f"{source} has a schema with the keyword uniqueItems, which is not enforced."
        assert chat(**{source: value}).warnings() == [sentence]
