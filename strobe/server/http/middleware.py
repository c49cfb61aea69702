"""The middleware of every request: ids, the access log, hosts, keys, limits, stopping.

Each class is a plain ASGI application around another. None buffers, and `http.disconnect` always
reaches the handlers, because stopping an abandoned answer depends on it.

    RequestId > AccessLog > ResponseCounter > AllowedHosts > CORS > ApiKeyGuard > ShutdownGuard >
    BodyLimit > the application
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from strobe.server.http.access_log import AccessLog, RequestId, ResponseCounter
from strobe.server.http.guards import (
    AllowedHosts,
    ApiKeyEntry,
    ApiKeyGuard,
    BodyLimit,
    OnReject,
    Shutdown,
    ShutdownGuard,
    allowed_host,
    is_loopback,
)
from strobe.server.telemetry.traces import Traces

OPEN_PATHS = frozenset(
    {"/", "/page.css", "/page.js", "/favicon.ico", "/health", "/ping", "/metrics", "/version"}
)

_origin = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class MiddlewareSettings:
    """The operator's settings. Raises ValueError with a hint.

    listens_on: the server's address. On a loopback address it answers only for loopback names and
    allowed_hosts; elsewhere for allowed_hosts, or for any host if they are empty or contain "*".
    api_keys: the accepted keys; empty: no key is required. open_paths: paths that need no key.
    max_body_bytes: limit of one request's body. cors_origins: origins whose pages may call the API;
    "*" allows all; empty: CORS is off.
    """

    listens_on: str = ""
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[ApiKeyEntry, ...] = ()
    open_paths: frozenset[str] = OPEN_PATHS
    max_body_bytes: int
    cors_origins: tuple[str, ...] = ()
    access_log: bool = True

    def __post_init__(self) -> None:
        for place, (key, _, _) in enumerate(self.api_keys, 1):
            if not key.isprintable() or not key or key != key.strip():
                raise ValueError(
                    f"API key {place} is empty, begins or ends with a space or holds a character "
                    "that no header carries; give visible characters."
                )
        for host in self.allowed_hosts:
            _ = host == "*" or allowed_host(host)
        if self.max_body_bytes < 1:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, but must be at least 1; no request "
                "could be read."
            )
        for origin in self.cors_origins:
            if origin != "*" and not _origin.fullmatch(origin):
                raise ValueError(
                    f"The CORS origin {origin!r} matches no page; write scheme, host and port as "
                    "browsers send them, such as https://example.com:8443 without a path, or *."
                )


def wrap(
    app: ASGIApp,
    settings: MiddlewareSettings,
    *,
    shutdown: Shutdown | None = None,
    on_reject: OnReject | None = None,
    on_response: Callable[[str, str, int], None] | None = None,
    traces: Traces | None = None,
) -> ASGIApp:
    """Return the application wrapped in all middleware, in the order above.

    Rejections also have a request id, a line in the log and CORS headers.
    """
    on_refusal: OnReject = _ignore if on_reject is None else on_reject
    app = BodyLimit(app, settings.max_body_bytes, on_refusal)
    if shutdown is not None:
        app = ShutdownGuard(app, shutdown, on_refusal)
    if settings.api_keys:
        app = ApiKeyGuard(app, settings.api_keys, settings.open_paths, on_refusal)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    loopback = is_loopback(settings.listens_on)
    if "*" not in settings.allowed_hosts and (loopback or settings.allowed_hosts):
        app = AllowedHosts(app, settings.allowed_hosts, loopback, on_refusal)
    if on_response is not None:
        app = ResponseCounter(app, on_response)
    if settings.access_log or traces is not None:
        app = AccessLog(app, logs=settings.access_log, traces=traces)
    return RequestId(app)


def _ignore(status: int, reason: str) -> None:
    pass
