"""Converts error responses to the error object of each path's API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strobe.server.anthropic import anthropic_errors as anthropic
from strobe.server.guards import route
from strobe.server.ollama import ollama_errors as ollama

ToBody = Callable[[Mapping[str, Any], str], dict[str, Any]]
"""Converts OpenAI's error object; the second argument is the request's id."""

FORMS: Mapping[str, ToBody] = {
    anthropic.PATH: anthropic.error_body,
    ollama.PATH: ollama.error_body,
}
"""The error object of each API, by the beginning of its paths."""


class ErrorForms:
    """On the paths of FORMS, converts all errors and adds Anthropic's header `request-id` to
    responses. Only an error's headers wait for its body."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = f"{route(scope)}/"
            for prefix, to_body in FORMS.items():
                if path.startswith(f"{prefix}/"):
                    send = _converting(scope["state"]["request_id"], send, to_body)
        await self.app(scope, receive, send)


def _converting(request_id: str, send: Send, to_body: ToBody) -> Send:
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
            start = error_start
            error_start = None
            body = _convert_body(message.get("body", b""), request_id, to_body)
            headers = [h for h in start["headers"] if h[0].lower() != b"content-length"]
            length = (b"content-length", str(len(body)).encode())
            await send({**start, "headers": [*headers, length]})
            message = {**message, "body": body}
        await send(message)

    return convert


def _convert_body(body: bytes, request_id: str, to_body: ToBody) -> bytes:
    """Convert an error's body; a body of another kind is returned as it is."""
    try:
        return json.dumps(to_body(json.loads(body), request_id)).encode()
    except (ValueError, LookupError, TypeError):
        return body
