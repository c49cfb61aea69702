"""Anthropic's error object, whoever refuses a request."""

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
"""Anthropic's words for the types of OpenAI's error object, where they differ."""


def error_body(body: Mapping[str, Any], request_id: str | None) -> dict[str, Any]:
    """What Anthropic's API answers in place of OpenAI's error object."""
    details = body["error"]
    kind = ERROR_TYPES.get(details["type"], details["type"])
    error: dict[str, Any] = {"type": kind, "message": details["message"]}
    if details.get("code") == THREAD_UNSUPPORTED:
        error["details"] = {"error_code": THREAD_UNSUPPORTED}
    return {"type": "error", "error": error, "request_id": request_id}


class AnthropicForm:
    """On Anthropic's paths all errors are of Anthropic's form, and responses also say their id as
    `request-id`. An error's headers wait for its body; nothing else does."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and f"{route(scope)}/".startswith(f"{PATH}/"):
            send = _formed(scope["state"]["request_id"], send)
        await self.app(scope, receive, send)


def _formed(request_id: str, send: Send) -> Send:
    held: Message | None = None

    async def formed(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start":
            request_id_header = (b"request-id", request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), request_id_header]}
            if message["status"] >= 400:
                held = message
                return
        elif held is not None:
            start, held = held, None
            body = _written(message.get("body", b""), request_id)
            headers = [h for h in start["headers"] if h[0].lower() != b"content-length"]
            length = (b"content-length", str(len(body)).encode())
            await send({**start, "headers": [*headers, length]})
            message = {**message, "body": body}
        await send(message)

    return formed


def _written(body: bytes, request_id: str) -> bytes:
    """An error's body; one of another kind stays as it is."""
    try:
        return json.dumps(error_body(json.loads(body), request_id)).encode()
    except (ValueError, LookupError, TypeError):
        return body
