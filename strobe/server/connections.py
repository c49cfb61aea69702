"""Connections that cannot starve the server: headers have their time, and descriptors suffice."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from strobe.server.openai.protocol.errors import error_body

logger = logging.getLogger(__name__)

HEADER_SECONDS = 10.0
"""After which a request's headers must be in, from its first byte or the connection's beginning."""
AT_ONCE = 16
"""Connections that are accepted before any of them is looked at."""
SPARE = 64 + 4 * AT_ONCE
"""Descriptors that are not for connections: files, pipes, the engine's process, and connections
that are accepted while others are being closed."""


def most_connections() -> int:
    """How many may be open, by the descriptors that the process may have."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = limit == resource.RLIM_INFINITY
    return 1 << 20 if endless else max(limit - SPARE, 1)


class Connection(HttpToolsProtocol):
    """One that is closed where headers take too long. Where there are too many, that which has
    waited longest for headers makes room; where none waits, the new one is refused."""

    most = most_connections()
    _waits: asyncio.TimerHandle | None = None
    _until = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        if len(self.connections) <= self.most:
            return
        every = [one for one in self.connections if isinstance(one, Connection)]
        _, _, oldest = min([(one._until, id(one), one) for one in every if one._waits is not None])
        oldest._refuse(
            503,
            "too_many_connections",
            "The server has as many connections as it can; try again later.",
        )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._waits is None:
            self._wait()

    def on_headers_complete(self) -> None:
        self._done()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waits = self.loop.call_later(HEADER_SECONDS, self._too_slow)
        self._until = self._waits.when()

    def _done(self) -> None:
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None

    def _too_slow(self) -> None:
        self._refuse(
            408, "timeout", f"The request's headers were not in after {HEADER_SECONDS:g} s."
        )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, and let the connection go at once: it counts no more."""
        self._done()
        self.connections.discard(self)
        body = json.dumps(error_body(message, status=status, code=code)).encode()
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()


class Quiet:
    """An event loop's exception handler that says once a second at most that connections cannot be
    accepted, which the loop finds with each one."""

    def __init__(self) -> None:
        self._said = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._said + 1:
            self._said = time.monotonic()
            logger.error("No connection can be accepted: %s.", context.get("exception"))
