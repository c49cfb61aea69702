"""/v1/responses."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from strobe.server.serving import Serving


async def responses(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/responses."""
    raise NotImplementedError
