"""The routes of files and batches."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import FastAPI, Request
from starlette.responses import Response

from strobe.server.batches import anthropic, openai
from strobe.server.batches.runner import BatchRunner
from strobe.server.openai import replies
from strobe.server.openai.stored_responses import owner
from strobe.server.serving import RequestRejected, Serving

Endpoint = Callable[[Serving, BatchRunner, str, Request], Awaitable[Response]]
Method = Literal["GET", "POST", "DELETE"]

_BATCHES, _MESSAGES = "/v1/batches", "/v1/messages/batches"
CREATES: dict[str, Endpoint] = {_BATCHES: openai.create, _MESSAGES: anthropic.create}
"""The endpoints whose body is a JSON object."""

OTHERS: tuple[tuple[Method, str, Endpoint], ...] = (
    ("POST", "/v1/files", openai.upload),
    ("GET", "/v1/files", openai.files),
    ("GET", "/v1/files/{id}", openai.file),
    ("GET", "/v1/files/{id}/content", openai.content),
    ("DELETE", "/v1/files/{id}", openai.delete),
    ("GET", _BATCHES, openai.batches),
    ("GET", f"{_BATCHES}/{{id}}", openai.batch),
    ("POST", f"{_BATCHES}/{{id}}/cancel", openai.cancel),
    ("GET", _MESSAGES, anthropic.batches),
    ("GET", f"{_MESSAGES}/{{id}}", anthropic.batch),
    ("POST", f"{_MESSAGES}/{{id}}/cancel", anthropic.cancel),
    ("DELETE", f"{_MESSAGES}/{{id}}", anthropic.delete),
    ("GET", f"{_MESSAGES}/{{id}}/results", anthropic.results),
)
"""All other endpoints: method, path and handler."""


def add_batch_endpoints(app: FastAPI, serving: Serving, runner: BatchRunner | None) -> None:
    """Add the endpoints. runner: None if the server stores no batches."""
    for path, endpoint in CREATES.items():
        route = _bound(endpoint, serving, runner, reads_json=True)
        app.add_api_route(path, route, methods=["POST"], include_in_schema=False)
    for method, path, endpoint in OTHERS:
        route = _bound(endpoint, serving, runner)
        app.add_api_route(path, route, methods=[method], include_in_schema=False)


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
