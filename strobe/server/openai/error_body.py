"""OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping

from strobe.server.generation.api_errors import ApiError
from strobe.server.openai.protocol.response_bodies import ErrorDetail, ErrorResponse

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_found_error",
    408: "timeout",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable",
    504: "timeout",
}
"""The error object's `type` for each HTTP error status."""


def error_body(error: ApiError, request_id: str | None = None) -> ErrorResponse:
    """Return OpenAI's error object, also for a chunk of a stream."""
    details: ErrorDetail = {
        "message": str(error),
        "type": TYPES[error.status],
        "param": error.field,
        "code": error.code,
    }
    return {"error": details}
