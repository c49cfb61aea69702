"""The OpenAPI document: the routes, with the bodies that their handlers parse themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode, JsonSchemaValue

from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.schema.base import RequestModel, with_unknown_fields

POST_ERRORS = ("400", "401", "404", "408", "413", "415", "429", "503", "504")
"""Error statuses of POST endpoints."""

EVENT_STREAM = "text/event-stream"
EVENT: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {
        "event": {"type": "string"},
        "data": {
            "type": "string",
            "description": "A part of the answer as JSON, an error, or [DONE] at the end.",
        },
    },
}
"""An event of a stream."""


References = Mapping[tuple[type, JsonSchemaMode], JsonSchemaValue]
"""Where the document describes each type."""


class Post(NamedTuple):
    """A POST endpoint, with the types of its request, response and errors."""

    path: str
    summary: str
    request_model: type[RequestModel]
    response_model: type
    error_model: type = answers.ErrorResponse
    stream_type: str = EVENT_STREAM


def describe(
    app: FastAPI,
    posts: Collection[Post],
    errors: Mapping[str, Collection[str]],
    open_paths: Collection[str] | None,
    *,
    lenient: bool = False,
) -> dict[str, Any]:
    """Return the OpenAPI document. errors: the error statuses of each GET path; open_paths: paths
    that need no API key, None if there are no keys; lenient: whether requests may have unknown
    fields."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shapes: list[tuple[type, JsonSchemaMode]] = [(answers.ErrorResponse, "serialization")]
    for post in posts:
        shapes.append((post.request_model, "validation"))
        shapes.append((post.response_model, "serialization"))
        shapes.append((post.error_model, "serialization"))
    references, parts = TypeAdapter.json_schemas(
        [(model, mode, TypeAdapter[Any](model)) for model, mode in shapes],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Any] = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's, which no route returns
        schemas.pop(name, None)
    schemas.update(parts.get("$defs", {}))
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            responses: dict[str, Any] = operation["responses"]
            responses.pop("422", None)
            error = _error(references, answers.ErrorResponse)
            responses |= dict.fromkeys(errors.get(path, ()), error)
    for post in posts:
        schema["paths"].setdefault(post.path, {})["post"] = _operation(references, post)
    if open_paths is not None:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        for path in schema["paths"].keys() & set(open_paths):
            for operation in schema["paths"][path].values():
                operation["security"] = []
    return with_unknown_fields(schema) if lenient else schema


def _operation(references: References, post: Post) -> dict[str, Any]:
    """Describe a POST endpoint."""
    answer = _content(references, post.response_model, "serialization")
    if "stream" in post.request_model.model_fields:
        item = EVENT if post.stream_type == EVENT_STREAM else answer["application/json"]["schema"]
        answer[post.stream_type] = {"itemSchema": item}
    request = _content(references, post.request_model, "validation")
    return {
        "operationId": post.path.strip("/").replace("/", "_"),
        "summary": post.summary,
        "requestBody": {"required": True, "content": request},
        "responses": {
            "200": {"description": "The answer", "content": answer},
            **dict.fromkeys(POST_ERRORS, _error(references, post.error_model)),
        },
    }


def _error(references: References, model: type) -> dict[str, Any]:
    return {"description": "Error", "content": _content(references, model, "serialization")}


def _content(references: References, model: type, mode: JsonSchemaMode) -> dict[str, Any]:
    return {"application/json": {"schema": references[model, mode]}}
