"""The routes of files and batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from strobe.server.anthropic.protocol.message_bodies import MessageErrorResponse
from strobe.server.batches import anthropic, bodies, openai
from strobe.server.batches.protocol import MAX_ITEMS, BatchRequest, MessageBatchRequest
from strobe.server.batches.runner import BatchRunner
from strobe.server.openai import replies
from strobe.server.openai.openapi import Post
from strobe.server.openai.protocol.response_bodies import ErrorResponse
from strobe.server.openai.stored_responses import owner
from strobe.server.serving import RequestRejected, Serving

Endpoint = Callable[[Serving, BatchRunner, str, Request], Awaitable[Response]]
Method = Literal["GET", "POST", "DELETE"]

_BATCHES = "/v1/batches"
_MESSAGES = "/v1/messages/batches"
CREATES: dict[Endpoint, Post] = {
    openai.create: Post(_BATCHES, "Start a batch.", BatchRequest, bodies.Batch),
    anthropic.create: Post(
        _MESSAGES,
        "Start a batch of messages.",
        MessageBatchRequest,
        bodies.MessageBatch,
        MessageErrorResponse,
    ),
}
"""The endpoints whose body is a JSON object."""


class Route(NamedTuple):
    """An endpoint without a JSON body. model: of its response; None: lines of JSON."""

    method: Method
    path: str
    endpoint: Endpoint
    summary: str
    model: type[BaseModel] | None


OTHERS = (
    Route("POST", "/v1/files", openai.upload, "Upload a file of requests.", bodies.File),
    Route("GET", "/v1/files", openai.files, "The uploaded files.", bodies.FileList),
    Route("GET", "/v1/files/{id}", openai.file, "A file of requests or answers.", bodies.File),
    Route("GET", "/v1/files/{id}/content", openai.content, "A file's lines.", None),
    Route("DELETE", "/v1/files/{id}", openai.delete, "Delete a file.", bodies.DeletedFile),
    Route("GET", _BATCHES, openai.batches, "All batches.", bodies.BatchList),
    Route("GET", f"{_BATCHES}/{{id}}", openai.batch, "A batch.", bodies.Batch),
    Route("POST", f"{_BATCHES}/{{id}}/cancel", openai.cancel, "Cancel a batch.", bodies.Batch),
    Route("GET", _MESSAGES, anthropic.batches, "All batches of messages.", bodies.MessageBatchList),
    Route(
        "GET", f"{_MESSAGES}/{{id}}", anthropic.batch, "A batch of messages.", bodies.MessageBatch
    ),
    Route(
        "POST",
        f"{_MESSAGES}/{{id}}/cancel",
        anthropic.cancel,
        "Cancel a batch of messages.",
        bodies.MessageBatch,
    ),
    Route(
        "DELETE",
        f"{_MESSAGES}/{{id}}",
        anthropic.delete,
        "Delete a batch of messages.",
        bodies.DeletedMessageBatch,
    ),
    Route("GET", f"{_MESSAGES}/{{id}}/results", anthropic.results, "The results of a batch.", None),
)
"""All other endpoints."""

_FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
    "required": ["file", "purpose"],
}


def add_batch_endpoints(app: FastAPI, serving: Serving, runner: BatchRunner | None) -> None:
    """Add the endpoints. runner: None if the server stores no batches; then the OpenAPI document
    leaves them out."""
    for endpoint, post in CREATES.items():
        serve = _bound(endpoint, serving, runner, reads_json=True)
        app.add_api_route(post.path, serve, methods=["POST"], include_in_schema=False)
    for route in OTHERS:
        app.add_api_route(
            route.path,
            _bound(route.endpoint, serving, runner),
            methods=[route.method],
            include_in_schema=runner is not None,
            summary=route.summary,
            response_model=route.model,
            response_class=Response if route.model is None else JSONResponse,
            responses=_responses(route),
            openapi_extra=_request(route),
        )


def _responses(route: Route) -> dict[int | str, dict[str, Any]]:
    """Return the error responses, and the type of lines."""
    error = MessageErrorResponse if route.path.startswith(_MESSAGES) else ErrorResponse
    statuses = (400, 401, 404, *((413, 415) if route.path == "/v1/files" else ()))
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": error, "description": "Error"} for status in statuses
    }
    if route.model is None:
        kind = "application/x-jsonl" if error is MessageErrorResponse else "application/jsonl"
        responses[200] = {"content": {kind: {"schema": {"type": "string"}}}}
    return responses


def _request(route: Route) -> dict[str, Any]:
    """Return the parameters and the form of an endpoint, as in the OpenAPI document."""
    if "{id}" in route.path:
        name = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        return {"parameters": [name]}
    if route.method == "POST":
        return {
            "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
        }
    schemas = {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
        "order": {"enum": ["asc", "desc"]},
        "after_id" if route.path == _MESSAGES else "after": {"type": "string"},
        **({"purpose": {"type": "string"}} if route.path == "/v1/files" else {}),
    }
    return {"parameters": [{"name": n, "in": "query", "schema": s} for n, s in schemas.items()]}


def _bound(
    endpoint: Endpoint, serving: Serving, runner: BatchRunner | None, *, reads_json: bool = False
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route for an endpoint. reads_json: its body is a JSON object."""

    async def serve(http: Request) -> Response:
        try:
            if runner is None:
                raise RequestRejected(
                    501,
                    "This server stores no batches; start it with --batch-dir DIR, where it keeps "
                    "their files.",
                    code="not_implemented",
                )
            if reads_json:
                await replies.read_body(serving, http)
            return await endpoint(serving, runner, (owner(http) or b"").hex(), http)
        except Exception as error:
            return replies.error_response(serving, error)

    return serve
