"""The error of a request, which each API renders in its own format."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from strobe.server.engine_process.client import EngineDead, EngineStopped, EngineUnavailable
from strobe.server.schema.field_errors import FieldError

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is rejected or fails with an HTTP status. code: a fixed word; field: the
    request's field that is wrong; headers: of the response."""

    def __init__(
        self,
        status: int,
        sentence: str,
        *,
        code: str,
        field: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.field = field
        self.headers = dict(headers or {})


def retry_after(seconds: int) -> dict[str, str]:
    """Return the header that asks a client to wait."""
    return {"Retry-After": str(seconds)}


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client gets for an exception; unexpected ones are a logged 500."""
    if isinstance(error, ApiError):
        return error
    sentence = str(error)
    if isinstance(error, FieldError):
        return ApiError(400, sentence, code=error.code, field=error.param)
    if isinstance(error, EngineStopped):
        return ApiError(503, sentence, code="server_stopping", headers=retry_after(5))
    if isinstance(error, EngineUnavailable):
        return ApiError(503, sentence, code=error.code, headers=retry_after(5))
    if isinstance(error, EngineDead):
        return ApiError(500, sentence, code="engine_dead")
    if isinstance(error, TimeoutError):
        sentence = "The request took longer than its time limit; ask for less, or allow more time."
        return ApiError(504, sentence, code="timeout")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "The server failed at this request.", code="internal")
