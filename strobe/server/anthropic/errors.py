"""Converts error responses to Anthropic's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strobe.server.anthropic.protocol.messages_request import THREAD_UNSUPPORTED
from strobe.server.guards import route

PATH = "/v1/messages"

ERROR_TYPES = {
    "server_error": "api_error",
    "service_unavailable": "overloaded_error",
    "timeout": "timeout_error",
}
"""OpenAI's error types, and Anthropic's where they differ."""


def error_body(body: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """Convert OpenAI's error object to Anthropic's."""
    details = body["error"]
    kind = ERROR_TYPES.get(details["type"], details["type"])
    error: dict[str, Any] = {"type": kind, "message": details["message"]}
    if details.get("code") == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": THREAD_UNSUPPORTED}
    return {"type": "error", "error": error, "request_id": request_id}


class AnthropicForm:
    """On Anthropic's paths, converts all errors to Anthropic's error object and adds the header
    `request-id` to responses. Only an error's headers wait for its body."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{route(scope)}/".startswith(f"{PATH}/"):
            send = _converting(scope["state"]["request_id"], send)
        await self.app(scope, receive, send)


def _converting(request_id: str, send: Send) -> Send:
    error_start: Message | None = None

    async def convert(message: Message) -> None:
        nonlocal error_start
        if message["type"] == "http.response.start":
            request_id_header = (b"request-id", request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), request_id_header]}
            if message["status"] >= 400:
                error_start = message
                return
        elif error_start is not None:
            start, error_start = error_start, None
            body = _convert_body(message.get("body", b""), request_id)
            headers = [h for h in start["headers"] if h[0].lower() != b"content-length"]
            length = (b"content-length", str(len(body)).encode())
            await send({**start, "headers": [*headers, length]})
            message = {**message, "body": body}
        await send(message)

    return convert


def _convert_body(body: bytes, request_id: str) -> bytes:
    """Convert an error's body; a body of another kind is returned as it is."""
    try:
        return json.dumps(error_body(json.loads(body), request_id)).encode()
    except (ValueError, LookupError, TypeError):
        return body
