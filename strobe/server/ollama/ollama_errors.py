"""Ollama's error object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATH = "/api"


def error_body(body: Mapping[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Convert OpenAI's error object to Ollama's."""
    return {"error": body["error"]["message"]}
