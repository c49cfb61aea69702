"""Ollama's error object."""

from __future__ import annotations

from strobe.server.generation.api_errors import ApiError
from strobe.server.ollama.protocol.bodies import OllamaError

PATH = "/api"


def error_body(error: ApiError, request_id: str | None = None) -> OllamaError:
    """Return Ollama's error object, also for a line of a stream."""
    return {"error": str(error)}
