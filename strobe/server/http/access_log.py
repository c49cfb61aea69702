"""Request ids and the access log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strobe.server.http.error_responses import format_of
from strobe.server.http.guards import route
from strobe.server.log_format import Fields, timestamp
from strobe.server.openai.error_body import error_body
from strobe.server.telemetry.traces import Traces

CLIENT_CLOSED = 499  # nginx's status for a client that disconnected before the response's end
MAX_PATH_CHARS = 256
POLLED = ("/health", "/metrics", "/ping", "/load")
PAGE_PARTS = ("/events", ".js", ".css", ".svg")
"""Requests that the chat page repeats while it is open."""

_log = logging.getLogger("strobe.access")
_visible = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestId:
    """Names each request: the client's X-Request-Id if it is 1 to 128 visible ASCII characters,
    else a new id. Handlers find it in scope["state"]["request_id"], the client in the response,
    outside OpenAI's API also as `request-id`."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_ids = [value for name, value in scope["headers"] if name == b"x-request-id"]
        fits = len(request_ids) == 1 and _visible.fullmatch(request_ids[0])
        name = request_ids[0] if fits else b"req-" + secrets.token_hex(16).encode()
        _state(scope)["request_id"] = name.decode("ascii")

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [h for h in message.get("headers", ()) if h[0].lower() != b"x-request-id"]
                if format_of(route(scope)) is not error_body:
                    headers.append((b"request-id", name))
                message = {**message, "headers": [*headers, (b"x-request-id", name)]}
            await send(message)

        await self.app(scope, receive, named)


class AccessLog:
    """Logs one line per request on "strobe.access" when its response has ended, at DEBUG for
    successful requests to the POLLED paths and to PAGE_PARTS, and exports the span of any other.

    Fields: time (of its arrival), request_id, client, method, path (its first 256 characters,
    without the query), status, duration_ms, bytes (of the body sent), error (the exception's type,
    if one was raised), and the handler's fields in scope["state"]["log"], which hold users' text
    only with --log-prompts. status is 499 if the client disconnected first, 500 if the handler
    failed.
    """

    def __init__(
        self,
        app: ASGIApp,
        clock: Callable[[], float] = time.perf_counter,
        *,
        logs: bool = True,
        traces: Traces | None = None,
    ):
        """logs: write the lines."""
        self.app = app
        self.clock = clock
        self.logs = logs
        self.traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        arrived = time.time()
        began = self.clock()
        _state(scope)["log"] = {}
        seen = _Exchange()

        async def watched() -> Message:
            message = await receive()
            # Servers also send "disconnect" after the response's end, which is no disconnect.
            if message["type"] == "http.disconnect" and not seen.complete:
                seen.disconnected = True
            return message

        async def counted(message: Message) -> None:
            try:
                await send(message)
            except OSError:  # ASGI 2.4: the client has disconnected
                seen.disconnected = True
                raise
            seen.add(message)

        try:
            await self.app(scope, watched, counted)
        except ClientDisconnect as caught:
            if not seen.disconnected:
                seen.error = type(caught).__name__
                raise
        except BaseException as caught:
            seen.error = type(caught).__name__
            raise
        finally:
            self._write(scope, seen, arrived, self.clock() - began)

    def _write(self, scope: Scope, seen: _Exchange, arrived: float, seconds: float) -> None:
        state = _state(scope)
        client = scope.get("client")
        line: dict[str, Any] = {
            "time": timestamp(arrived),
            "request_id": state.get("request_id"),
            "client": f"{client[0]}:{client[1]}" if client else None,
            "method": scope["method"],
            "path": scope["path"][:MAX_PATH_CHARS],
            "status": seen.outcome,
            "duration_ms": round(seconds * 1e3, 3),
            "bytes": 0 if scope["method"] == "HEAD" else seen.sent,
        }
        if seen.error is not None:
            line["error"] = seen.error
        quiet = _is_quiet(scope["path"], seen.outcome)
        fields = Fields(line | state["log"] | line)  # our fields come first and win
        if self.logs:
            _log.log(logging.DEBUG if quiet else logging.INFO, fields)
        if self.traces is not None and not quiet:
            self.traces.record(scope["headers"], fields, arrived, seconds)


class ResponseCounter:
    """Calls `count` with the path, method and status of each response."""

    def __init__(self, app: ASGIApp, count: Callable[[str, str, int], None]):
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                self.count(path, scope["method"], message["status"])
            await send(message)

        await self.app(scope, receive, counted)


@dataclass
class _Exchange:
    """A response's figures for the access log: status, bytes of the body, and kind of end."""

    status: int = 500
    sent: int = 0
    complete: bool = False
    disconnected: bool = False
    error: str | None = None

    def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body" and not self.disconnected:
            self.sent += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    @property
    def outcome(self) -> int:
        if self.disconnected:
            return CLIENT_CLOSED
        return self.status if self.complete and self.error is None else 500


def _is_quiet(path: str, status: int) -> bool:
    """Whether a request says nothing that an operator looks for."""
    if path.endswith(PAGE_PARTS):
        return status < 400 or status == CLIENT_CLOSED
    return path.endswith(POLLED) and status < 400


def _state(scope: Scope) -> dict[str, Any]:
    return scope.setdefault("state", {})
