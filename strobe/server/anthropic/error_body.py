"""Anthropic's error object."""

from __future__ import annotations

from collections.abc import Mapping

from strobe.server.anthropic.protocol.message_bodies import MessageErrorDetail, MessageErrorResponse
from strobe.server.anthropic.protocol.messages_request import THREAD_UNSUPPORTED
from strobe.server.generation.api_errors import ApiError

PATH = "/v1/messages"

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "api_error",
    501: "not_implemented_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The error object's `type` for each HTTP error status."""


def error_body(error: ApiError, request_id: str | None) -> MessageErrorResponse:
    """Return Anthropic's error object, also for an event of a stream."""
    details: MessageErrorDetail = {"type": TYPES[error.status], "message": str(error)}
    if error.code == THREAD_UNSUPPORTED:
        details["details"] = {"error_code": THREAD_UNSUPPORTED}
    return {"type": "error", "error": details, "request_id": request_id}
