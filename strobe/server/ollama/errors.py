"""Ollama's error object."""

from __future__ import annotations

from typing import Any

from strobe.server.generation.errors import ApiError

PATH = "/api"


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """Return Ollama's error object, also for a line of a stream."""
    return {"error": str(error)}
