"""The server against its own OpenAPI document: generated requests cause no server errors, and
responses match their schemas.

Each operation gets 4 requests per mode; in `make test-all` 16, or STROBE_SCHEMA_EXAMPLES.
benchmarks/schema.py is the long form.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strobe.server.app import POSTS
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError
from tests.server.support.polling import PATIENCE
from tests.server.support.request_bodies import SMALLEST
from tests.server.support.server_process import Served
from tests.support.full_marks import nightly_where

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed; pip install schemathesis"
)
from schemathesis.config import SchemathesisConfig  # noqa: E402

MANY = int(os.environ.get("STROBE_SCHEMA_EXAMPLES", 16))
EXAMPLES = [pytest.param(4, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.full)]
CONFIG = {
    "seed": 1,
    "checks": {
        # Schemas cannot express all rules about several fields: a valid request may be a 400.
        "positive_data_acceptance": {"enabled": False},
        "not_a_server_error": {"enabled": False},  # `checked` asserts it, except for ALLOWED
    },
}
READS = (
    "/health", "/ping", "/load", "/shadow", "/version", "/metrics", "/v1/models", "/tokenizer_info",
    "/server_info", "/api/tags", "/api/ps", "/api/version", "/v1/files", "/v1/batches",
    "/v1/messages/batches",
)  # fmt: skip
HELD = (
    "/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/files/{id}", "/v1/batches/{id}",
    "/v1/files/{id}/content", "/v1/messages/batches/{id}", "/v1/messages/batches/{id}/results",
)  # fmt: skip
CHANGES = (
    "/v1/files", "/v1/batches", "/v1/batches/{id}/cancel", "/v1/messages/batches",
    "/v1/messages/batches/{id}/cancel", "/reset_prefix_cache",
)  # fmt: skip
"""POST endpoints that change what other tests see."""
MODEL = "/v1/models/{name}"
LIMITS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 3},
    "/v1/completions": {"max_tokens": 3},
    "/infill": {"n_predict": 3},
    "/v1/responses": {"max_output_tokens": 16},
    "/v1/messages": {"max_tokens": 3},
    "/api/chat": {"options": {"num_predict": 3}},
    "/api/generate": {"options": {"num_predict": 3}},
}
"""Fields that keep the answers of generating endpoints short."""
BASES = {
    post.path: {**SMALLEST[post.request_model], **LIMITS.get(post.path, {})}
    for post in POSTS.values()
}
ALLOWED = {503, 504}
"""5xx that are not the server's fault; all others fail a test."""


def bounded(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="session")
def api(server: Served) -> Any:
    config = SchemathesisConfig.from_dict(CONFIG)
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)


def checked(case: Any) -> int:
    """Send a request, validate the response, and return its status."""
    response = case.call(timeout=PATIENCE)
    assert response.status_code < 500 or response.status_code in ALLOWED, response.text
    case.validate_response(response)
    return response.status_code


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *((path, mode) for path in BASES for mode in ("positive", "negative")),
        *((path, "positive") for path in (MODEL, *HELD)),  # any text is a valid name
    ],
)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_every_answer_matches_the_openapi_document(api: Any, path: str, mode: str, examples: int):
    """mode: "negative" generates requests that the document does not allow."""
    operation, statuses = api[path]["POST" if path in BASES else "GET"], Counter[int]()
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))

    @bounded(examples)
    @given(cases)
    def holds(case: Any) -> None:
        if mode == "positive" and path in BASES:  # answers up to the context length are slow
            limits = {n: v for n, v in BASES[path].items() if n.startswith(("max_", "options"))}
            case.body = {**limits, **case.body}
            for name in limits:
                if isinstance(case.body[name], int | float):
                    case.body[name] = min(case.body[name], 50)
        statuses[checked(case)] += 1

    holds()
    assert statuses.total() >= examples
    if mode == "negative":
        assert not statuses[200], statuses


@pytest.mark.parametrize("path", READS)
def test_get_endpoints_match_the_openapi_document(api: Any, path: str):
    assert checked(api[path]["GET"].Case()) == 200


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_field_combinations_match_the_openapi_document(api: Any, path: str, examples: int):
    """Requests generated from the whole schema are nearly all a 400; these are usually a 200."""
    operation, statuses = api[path]["POST"], Counter[int]()
    cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)

    @bounded(examples)
    @given(cases, st.sets(st.integers(0, 200), min_size=1, max_size=3))
    def holds(case: Any, places: set[int]) -> None:
        fields = [item for item in sorted(case.body.items()) if item[1] is not None]
        chosen = dict(fields[place % len(fields)] for place in places) if fields else {}
        case.body = {**BASES[path], **chosen, **BASES[path]}
        statuses[checked(case)] += 1

    holds()
    if path != "/infill":  # the demo models have no tokens for it
        assert statuses[200] >= examples / 4, statuses


TOGETHER = (
    " together with ", " without ", ", the name of an earlier ", " differs from ",
    " as JSON it fails", "tools is empty", "there are no tools", " above max_tokens ",
    " above max_pattern_size ", " is missing", " makes no token",
    " begins with none of the triggers ", " but belongs to the role ",
    " that are not shown to the model; give ",
)  # fmt: skip
"""Errors that depend on several fields or on all items together, or on the JSON inside a text: no
schema of a single field can express them."""


@nightly_where(lambda model, examples: examples != MANY and list(SMALLEST).index(model) % 2 == 1)
@pytest.mark.parametrize("model", SMALLEST)
@pytest.mark.parametrize("examples", EXAMPLES)
def test_documented_single_field_is_accepted(model: type[RequestModel], examples: int):
    refused: list[str] = []

    def holds(name: str, field: dict[str, Any], parts: dict[str, Any]) -> None:
        body = {"type": "object", "required": [name], "properties": {name: field}}
        content = {"application/json": {"schema": {**body, "additionalProperties": False}}}
        post = {"requestBody": {"required": True, "content": content}, "responses": {}}
        document = {
            "openapi": "3.1.0",
            "info": {"title": "", "version": ""},
            "components": {"schemas": parts},
            "paths": {"/": {"post": post}},
        }
        operation = schemathesis.openapi.from_dict(document)["/"]["POST"]

        @bounded(examples)
        @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
        def is_read(case: Any) -> None:
            try:
                model.read({**SMALLEST[model], **case.body})
            except FieldError as error:
                if not any(words in str(error) for words in TOGETHER):
                    refused.append(str(error))

        is_read()

    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, field in json.loads(json.dumps(schema["properties"])).items():
        if field.keys() != {"description"}:
            holds(name, field, schema.get("$defs", {}))
    assert not refused


def test_server_survives_schema_tests(server: Served, api: Any):
    assert server.get("/health") == ""
    paths = api.raw_schema["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} == {*BASES, *CHANGES}
    assert paths.keys() - BASES.keys() == {*READS, *HELD, *CHANGES, MODEL}
    assert "Traceback" not in server.log
