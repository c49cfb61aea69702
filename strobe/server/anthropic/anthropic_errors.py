"""Anthropic's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strobe.server.anthropic.protocol.messages_request import THREAD_UNSUPPORTED

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
