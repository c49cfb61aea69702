"""Error responses, in the format of the path's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from strobe.server.anthropic import error_body as anthropic
from strobe.server.generation.api_errors import ApiError
from strobe.server.ollama import error_body as ollama
from strobe.server.openai import error_body as openai

ToBody = Callable[[ApiError, str | None], Mapping[str, object]]
"""Renders an error; the second argument is the request's id."""

FORMATS: dict[str, ToBody] = {
    anthropic.PATH: anthropic.error_body,
    ollama.PATH: ollama.error_body,
}
"""The error object of each API other than OpenAI's, by the beginning of its paths."""


def format_of(path: str) -> ToBody:
    """Return the error format of a path's API."""
    matching = [FORMATS[start] for start in FORMATS if f"{path}/".startswith(f"{start}/")]
    return matching[0] if matching else openai.error_body


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    """Return the HTTP response for an error."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    body = format_of(path)(error, scope.get("state", {}).get("request_id"))
    return JSONResponse(body, error.status, error.headers)


async def send_error(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answer with an error and end the response."""
    await error_response(scope, error)(scope, receive, send)
