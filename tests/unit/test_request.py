"""Sampling parameters, requests and draft counts."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest

from strobe.counters import DraftCounts
from strobe.request import Request
from strobe.sampling_params import FILTERS, OPTIONS, SamplingOption, SamplingParams, Speculation

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is True"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"top_p": 0.0}, "top_p is 0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 1.5}, "top_k is 1.5"),
    ({"min_p": -0.1}, "min_p is -0.1"),
    ({"min_p": 1.01}, "min_p is 1.01"),
    ({"seed": 2**63}, "seed is"),
    ({"seed": -(2**63) - 1}, "seed is"),
    ({"seed": 1.0}, "seed is 1.0"),
    ({"max_tokens": -1}, "max_tokens is -1"),
    ({"min_tokens": -1}, "min_tokens is -1"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, above max_tokens 3"),
    ({"stop": ["a", ""]}, "stop[1] is '', but must be a text of one"),
    ({"stop": [3]}, "stop[0] is 3"),
    ({"stop": ["\ud800"]}, "stop[0] is '\\ud800', but must be whole Unicode characters"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0] is -1"),
    ({"stop_token_ids": "12"}, "stop_token_ids"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1"),
    ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0, but must be above 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
    ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
    ({"logit_bias": [5]}, "logit_bias is [5], but must be a mapping; map"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias is '5'"),
    ({"logit_bias": {5: 100.5}}, "logit_bias[5] is 100.5"),
    ({"logit_bias": {5: math.nan}}, "logit_bias[5] is nan"),
    ({"allowed_token_ids": []}, "allowed_token_ids is [], but must hold one or more"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1] is -1"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids is '12'"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"logprobs": True}, "logprobs is True"),
    ({"logprobs": 1001}, "logprobs is 1001, but must be at most 1000"),
    ({"prompt_logprobs": 1.5}, "prompt_logprobs is 1.5"),
    ({"structured_outputs": "{}"}, "structured_outputs is '{}'"),
    ({"structured_outputs": {}}, "structured_outputs gives none of json, json_object"),
    ({"structured_outputs": {"yaml": "a"}}, "structured_outputs has no field 'yaml'"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "gives json and regex of"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json is [1]"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object is 'yes'"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex is 5"),
    ({"structured_outputs": {"grammar": ["a"]}}, "structured_outputs.grammar is ['a']"),
    ({"structured_outputs": {"choice": "abc"}}, "structured_outputs.choice is 'abc'"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is []"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1] is 1"),
    ({"structured_outputs": {"regex": "a", "think_end": 5}}, "structured_outputs.think_end is 5"),
    (
        {"structured_outputs": {"regex": "a", "think_end": ["5"]}},
        "structured_outputs.think_end[0] is '5'",
    ),
    (
        {"structured_outputs": {"regex": "a", "think_start": 5}},
        "think_start is 5, but nothing in think_end",
    ),
    (
        {"structured_outputs": {"regex": "a", "think_start": -5, "think_end": [1]}},
        "structured_outputs.think_start is -5",
    ),
    ({"structured_outputs": {"regex": "a", "prefix": 5}}, "structured_outputs.prefix is 5"),
    (
        {"structured_outputs": {"regex": "a", "alternative": 5}},
        "structured_outputs.alternative is 5",
    ),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos is True, but"),
    ({"speculation": "dflash"}, "speculation is 'dflash'"),
    ({"speculation": {"method": "eagle"}}, "speculation.method is 'eagle'"),
    ({"speculation": {"num_drafts": -1}}, "speculation.num_drafts is -1"),
    ({"speculation": {"k": 1}}, "speculation has no field 'k'"),
    ({"repetition_detection": 8}, "repetition_detection is 8, but must be an object"),
    (
        {"repetition_detection": {"max_pattern_size": 8}},
        "repetition_detection.min_count is 0, but must be at least 2",
    ),
    (
        {"repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}},
        "repetition_detection.min_pattern_size is 3, above max_pattern_size 2",
    ),
]


@pytest.mark.parametrize(("values", "message"), WRONG, ids=[str(v) for v, _ in WRONG])
def test_out_of_range_value_is_rejected_by_name(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**values)


def test_boundary_values_are_allowed():
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, seed=2**63 - 1, max_tokens=None)
    SamplingParams(temperature=100, top_p=1e-9, top_k=0, min_p=0, seed=-(2**63), min_tokens=16)
    SamplingParams(max_tokens=None, min_tokens=1000)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=100)
    SamplingParams(max_tokens=0, logprobs=0, prompt_logprobs=1000, logit_bias={0: -100, 5: 100})


def test_lists_and_single_texts_become_tuples():
    params = SamplingParams(stop="end", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("end",), (1, 2))
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()  # pyright: ignore
    assert params.clone(stop=["a", "b"]).stop == ("a", "b")
    assert params.clone().stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Speculation()),
        (True, Speculation()),
        (False, Speculation(method="none")),
        ({}, Speculation()),
        ({"method": "ngram"}, Speculation("ngram")),
        ({"num_drafts": 0}, Speculation(None, 0)),
        (Speculation("dflash", 3), Speculation("dflash", 3)),
    ],
)
def test_speculation_accepts_bools_dicts_and_objects(value: Any, expected: Speculation):
    assert SamplingParams(speculation=value).speculation == expected


def test_request_separates_prompt_and_output():
    prompt = [3, 1, 4]
    request = Request("r", prompt, SamplingParams(), seed=0)
    request.tokens += [1, 5]
    assert (request.num_prompt, request.num_output, request.output_ids) == (3, 2, [1, 5])
    assert prompt == [3, 1, 4]


def test_speculation_is_counted_by_position():
    counts = DraftCounts()
    assert counts.acceptance_length is None
    for drafted, accepted in ((3, 1), (5, 5), (2, 0)):
        counts.add(drafted, accepted)
    assert (counts.steps, counts.num_verified, counts.num_accepted) == (3, 10, 6)
    assert counts.accepted_per_position == [2, 1, 1, 1, 1]
    assert counts.acceptance_length == 3.0


def test_merged_counts_equal_joint_counts():
    first, second, both = DraftCounts(), DraftCounts(), DraftCounts()
    for counts, drafted, accepted in ((first, 3, 1), (second, 5, 4), (first, 2, 2), (second, 1, 0)):
        counts.add(drafted, accepted)
        both.add(drafted, accepted)
    first.merge(second)
    assert first == both


def test_scored_prompt_has_no_score_for_first_token():
    scored = SamplingParams(prompt_logprobs=1)
    first, second = (Request("r", [3, 1], scored, seed=0, sibling=i) for i in range(2))
    assert (first.wants_prompt_logprobs, first.prompt_logprobs) == (True, [None])
    assert (second.wants_prompt_logprobs, second.prompt_logprobs) == (False, [])


# sampling options


@pytest.mark.parametrize("option", FILTERS, ids=lambda option: option.name)
def test_declared_filter_is_on_unless_at_its_default(option: SamplingOption):
    assert not SamplingParams(**{option.name: option.default}).filters
    on = {option.name: option.high / 2 if option.default == option.high else option.high}
    assert SamplingParams(**on).filters
    assert not SamplingParams(temperature=0, **on).filters
    assert not SamplingParams(**on).processes


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 1}, {"frequency_penalty": -1}, {"repetition_penalty": 1.1},
     {"logit_bias": {3: 0.0}}, {"allowed_token_ids": [3]}, {"min_tokens": 1}],
    ids=str,
)  # fmt: skip
def test_declared_processor_is_on_unless_at_its_default(fields: dict[str, Any]):
    assert not SamplingParams(logit_bias={}).processes
    assert SamplingParams(**fields).processes
    assert not SamplingParams(**fields).filters


def test_top_k_of_minus_one_is_read_as_off():
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def test_bounds_are_read_from_the_declarations():
    options = {option.name: option for option in OPTIONS}
    assert list(options) == [field.name for field in fields(SamplingParams)]
    top_p, seed = options["top_p"], options["seed"]
    assert (top_p.kind, top_p.low, top_p.high, top_p.above) == (float, 0, 1, True)
    assert (seed.kind, seed.low, seed.high, seed.above) == (int, -(2**63), 2**63 - 1, False)
    assert options["logit_bias"].kind is None
