"""Limits that keep clients from starving the server: the time and size of headers, the pace of
bodies, and the number of connections."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import time
from http import HTTPStatus
from math import inf
from operator import attrgetter
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from strobe.server.generation.api_errors import ApiError
from strobe.server.http.error_responses import send_error
from strobe.server.openai.error_body import error_body

logger = logging.getLogger(__name__)

HEADER_SECONDS = 10.0
"""Time limit for a request's headers, from its first byte or the connection's beginning."""
HEADER_BYTES = 64 << 10
"""Size limit of a request line and its headers together."""
BODY_SECONDS = 30.0
"""Seconds that a body may pause or lag after BODY_RATE."""
BODY_RATE = 1024
"""Minimum rate of a body, in bytes per second."""
AT_ONCE = 16
"""Connections that the event loop accepts in one iteration."""
RESERVED = 16
"""Connections above the limit whose headers are still read, so that HEALTH_PATHS answer."""
HEALTH_PATHS = (b"/health", b"/ping", b"/metrics")
SPARE = 48 + RESERVED + 4 * AT_ONCE
"""File descriptors not available to other requests: files, pipes, the engine's process, reserved
connections, and connections accepted while others are being closed."""

TOO_MANY = (
    503,
    "too_many_connections",
    "The server has as many connections as it can; try again later.",
)
HEADERS_TOO_LARGE = (
    431,
    "headers_too_large",
    f"The request's headers have more than {HEADER_BYTES} bytes; send fewer or shorter ones.",
)


def max_connections() -> int:
    """The number of connections that the process's limit of file descriptors allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = limit == resource.RLIM_INFINITY
    return 1 << 20 if endless else max(limit - SPARE, 1)


class Connection(HttpToolsProtocol):
    """A connection that is closed if headers or a body arrive too slowly, or headers are too large.

    Connections above the limit are reserved: they only answer HEALTH_PATHS. Once the body of any
    other request is complete, a reserved connection replaces the one that has waited longest for
    headers or a body; if all are being answered, it is rejected. The application sees no request
    earlier.
    """

    limit = max_connections()
    _reserved = False
    _deferred: tuple[RequestResponseCycle, Any] | None = None
    _timer: asyncio.TimerHandle | None = None
    _reads_body = False
    _since = 0.0  # when waiting began, plus the time that the received bytes take at BODY_RATE
    _slow_since = inf  # the earlier of _since and the last arrival; infinite while not waiting
    _held = 0  # bytes received since complete headers or the last part of a body
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(HEADER_SECONDS)
        self._reserved = len(self.connections) > self.limit
        if len(self.connections) > self.limit + RESERVED:
            (self._slowest(self._others) or self)._refuse(*TOO_MANY)

    def data_received(self, data: bytes) -> None:
        self._held += len(data)
        super().data_received(data)
        if self._held > HEADER_BYTES and not self.transport.is_closing():
            self._refuse(*HEADERS_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        if self._timer is None:
            self._wait(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._held = 0
        if self._header_bytes > HEADER_BYTES:
            self.app = _refusal(*HEADERS_TOO_LARGE)
        super().on_headers_complete()
        self._wait(BODY_SECONDS, body=True)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self._start_deferred()  # uvicorn reads no more until the application does
        self._held = 0
        self._since += len(body) / BODY_RATE
        self._slow_since = min(self._since, self.loop.time())

    def on_message_complete(self) -> None:
        self._stop_waiting()
        self._held = 0
        super().on_message_complete()
        self._start_deferred()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reads_body:  # until now the client may have been kept from sending
            self._wait(BODY_SECONDS, body=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self._reserved:
            super()._start_asgi_task(cycle, app)
        elif self.url.partition(b"?")[0] in HEALTH_PATHS:
            cycle.keep_alive = False
            super()._start_asgi_task(cycle, app)
        else:
            self._deferred = cycle, app
            if self.expect_100_continue:  # the body does not come before the application asks
                self._start_deferred()

    def _start_deferred(self) -> None:
        if self._deferred is not None:
            cycle, app = self._deferred
            self._deferred = None
            self._reserved = not self._admit()
            super()._start_asgi_task(cycle, _refusal(*TOO_MANY) if self._reserved else app)

    def _admit(self) -> bool:
        """Make room for a reserved connection; False if no other can be closed."""
        admitted = [connection for connection in self._others if not connection._reserved]
        slowest = self._slowest(admitted)
        if len(admitted) >= self.limit and slowest is not None:
            slowest._refuse(*TOO_MANY)
        return len(admitted) < self.limit or slowest is not None

    @property
    def _others(self) -> list[Connection]:
        connections = cast("set[Connection]", self.connections)
        return [connection for connection in connections if connection is not self]

    def _slowest(self, connections: list[Connection]) -> Connection | None:
        """The connection that has waited longest for headers or a body, None if none waits."""
        waiting = [connection for connection in connections if connection._slow_since < inf]
        waiting.sort(key=attrgetter("_slow_since"))
        return next((c for c in waiting if not c._is_answering), None)

    @property
    def _is_answering(self) -> bool:
        """Whether the client waits for the response to an earlier or complete request."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return not self._reads_body or self.cycle.response_started or bool(self.pipeline)

    def _wait(self, seconds: float, *, body: bool = False) -> None:
        self._stop_waiting()
        self._reads_body = body
        self._since = self._slow_since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._check, seconds)

    def _stop_waiting(self) -> None:
        self._reads_body = False
        self._slow_since = inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, seconds: float) -> None:
        """Reject a client that is too slow, else wait on."""
        left = self._slow_since + seconds - self.loop.time()
        if self._is_answering:
            self._wait(seconds, body=self._reads_body)
        elif left > 0:
            self._timer = self.loop.call_later(left, self._check, seconds)
        elif self._reads_body:
            self._refuse(
                408,
                "body_timeout",
                f"The request's body paused for {BODY_SECONDS:g} s or came at less than "
                f"{BODY_RATE} bytes per second; send it faster.",
            )
        else:
            self._refuse(
                408, "timeout", f"The request's headers were not in after {HEADER_SECONDS:g} s."
            )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Send an error, unless a response has begun, and close the connection, which no longer
        counts."""
        answered = self._is_answering or (self._reads_body and self.cycle.response_complete)
        self._stop_waiting()
        self.connections.discard(self)
        if not answered:
            body = json.dumps(error_body(ApiError(status, message, code=code))).encode()
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
        self.transport.close()


def _refusal(status: int, code: str, message: str) -> Any:
    """Return an application that rejects its request and closes the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        error = ApiError(status, message, code=code, headers={"connection": "close"})
        await send_error(scope, receive, send, error)

    return app


class QuietErrorHandler:
    """An event loop's exception handler that logs at most once a second that connections cannot
    be accepted."""

    def __init__(self) -> None:
        self._logged = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif time.monotonic() >= self._logged + 1:
            self._logged = time.monotonic()
            logger.error("No connection can be accepted: %s.", context.get("exception"))
