"""The routes of files and batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from strobe.server.anthropic.protocol.message_bodies import MessageErrorResponse
from strobe.server.batches import anthropic, bodies, openai
from strobe.server.batches.batch_runner import BatchRunner
from strobe.server.batches.protocol import MAX_ITEMS, BatchRequest, MessageBatchRequest
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.http.openapi import Post
from strobe.server.openai.protocol.response_bodies import ErrorResponse
from strobe.server.openai.stored_responses import owner
from strobe.server.serving import Serving

Endpoint = Callable[[Serving, BatchRunner, str, Request], Awaitable[Response]]
Method = Literal["GET", "POST", "DELETE"]

_BATCHES = "/v1/batches"
_MESSAGES = "/v1/messages/batches"
CREATES: dict[Endpoint, Post] = {
    openai.create: Post(
        path=_BATCHES,
        summary="Start a batch.",
        request_model=BatchRequest,
        response_model=bodies.Batch,
    ),
    anthropic.create: Post(
        path=_MESSAGES,
        summary="Start a batch of messages.",
        request_model=MessageBatchRequest,
        response_model=bodies.MessageBatch,
        error_model=MessageErrorResponse,
    ),
}
"""The endpoints whose body is a JSON object."""


class Route(NamedTuple):
    """An endpoint without a JSON body. model: of its response; None: lines of JSON."""

    method: Method
    path: str
    endpoint: Endpoint
    summary: str
    model: type | None


OTHERS = (
    Route(
        method="POST",
        path="/v1/files",
        endpoint=openai.upload,
        summary="Upload a file of requests.",
        model=bodies.File,
    ),
    Route(
        method="GET",
        path="/v1/files",
        endpoint=openai.files,
        summary="The uploaded files.",
        model=bodies.FileList,
    ),
    Route(
        method="GET",
        path="/v1/files/{id}",
        endpoint=openai.file,
        summary="A file of requests or answers.",
        model=bodies.File,
    ),
    Route(
        method="GET",
        path="/v1/files/{id}/content",
        endpoint=openai.content,
        summary="A file's lines.",
        model=None,
    ),
    Route(
        method="DELETE",
        path="/v1/files/{id}",
        endpoint=openai.delete,
        summary="Delete a file.",
        model=bodies.DeletedFile,
    ),
    Route(
        method="GET",
        path=_BATCHES,
        endpoint=openai.batches,
        summary="All batches.",
        model=bodies.BatchList,
    ),
    Route(
        method="GET",
        path=f"{_BATCHES}/{{id}}",
        endpoint=openai.batch,
        summary="A batch.",
        model=bodies.Batch,
    ),
    Route(
        method="POST",
        path=f"{_BATCHES}/{{id}}/cancel",
        endpoint=openai.cancel,
        summary="Cancel a batch.",
        model=bodies.Batch,
    ),
    Route(
        method="GET",
        path=_MESSAGES,
        endpoint=anthropic.batches,
        summary="All batches of messages.",
        model=bodies.MessageBatchList,
    ),
    Route(
        method="GET",
        path=f"{_MESSAGES}/{{id}}",
        endpoint=anthropic.batch,
        summary="A batch of messages.",
        model=bodies.MessageBatch,
    ),
    Route(
        method="POST",
        path=f"{_MESSAGES}/{{id}}/cancel",
        endpoint=anthropic.cancel,
        summary="Cancel a batch of messages.",
        model=bodies.MessageBatch,
    ),
    Route(
        method="DELETE",
        path=f"{_MESSAGES}/{{id}}",
        endpoint=anthropic.delete,
        summary="Delete a batch of messages.",
        model=bodies.DeletedMessageBatch,
    ),
    Route(
        method="GET",
        path=f"{_MESSAGES}/{{id}}/results",
        endpoint=anthropic.results,
        summary="The results of a batch.",
        model=None,
    ),
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
                raise ApiError(
                    501,
                    "This server stores no batches; start it with --batch-dir DIR, where it keeps "
                    "their files.",
                    code="not_implemented",
                )
            if reads_json:
                await reply.read_body(serving, http)
            return await endpoint(serving, runner, (owner(http) or b"").hex(), http)
        except Exception as error:
            return reply.error_response(serving, http, error)

    return serve
