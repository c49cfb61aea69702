"""Middleware that rejects requests: by host, by API key, while stopping, by the body's size.

A rejection is the path's error object; `on_reject` gets its status and a fixed word as the reason.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strobe.server.generation.api_errors import ApiError
from strobe.server.http.error_responses import send_error
from strobe.server.schema.field_errors import counted

OnReject = Callable[[int, str], None]
"""Called with the status and reason of each rejection, such as `ServerMetrics.record_rejected`."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_host = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:[0-9]*)?", re.IGNORECASE | re.ASCII)
_digits = re.compile(rb"[0-9]{1,4000}")  # int() reads no more


@dataclass
class Shutdown:
    """Whether the server is stopping. retry_after: seconds, sent to clients that are rejected."""

    stopping: bool = False
    retry_after: int = 30


class ApiKeyEntry(NamedTuple):
    """An API key. name: its owner's name for the log; max_concurrency: requests that may run with
    it at once, None for any number."""

    secret: str
    name: str = ""
    max_concurrency: int | None = None


def read_keys(path: Path) -> tuple[ApiKeyEntry, ...]:
    """Read a file of keys, one per line: a name, the key and optionally its max_concurrency. Empty
    lines and comments after # are ignored. Raises ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"api_key_file is {str(path)!r}, which cannot be read ({error})."
        ) from None
    keys: list[ApiKeyEntry] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        limit = words[2] if len(words) == 3 else "1"
        if not words:
            continue
        if len(words) not in (2, 3) or not limit.isdecimal() or not int(limit):
            raise ValueError(
                f"Line {number} of {path} is not a name, a key and optionally a number of requests "
                "at once, such as: alice sk-3f9a 8."
            )
        keys.append(ApiKeyEntry(words[1], words[0], int(limit) if len(words) == 3 else None))
    if not keys:
        raise ValueError(f"{path} holds no key; write a line such as: alice sk-3f9a 8.")
    return tuple(keys)


def host_name(text: str) -> str | None:
    """Return the normalized host of a Host header: lower case, without port, brackets and a dot at
    its end. None if it is not a host."""
    match = _host.fullmatch(text)
    if match is None:
        return None
    name = match["name"].strip("[]").lower().removesuffix(".")
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return None if text.startswith("[") else name or None


def allowed_host(text: str) -> str:
    """Return an entry of --allowed-hosts, normalized by `host_name`. Raises ValueError."""
    host = f"[{text}]" if text.count(":") > 1 and text[0] != "[" else text
    name = host_name(host)
    if name is None or ":" in host.rpartition("]")[2]:
        raise ValueError(
            f"The allowed host {text!r} matches no request; write a name or an address without "
            "scheme and port, such as strobe.example.com, or * for any."
        )
    return name


def is_loopback(host: str) -> bool:
    """Whether a host, normalized by `host_name`, is localhost or a loopback address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """Answers a request only if its Host header names one of `hosts`, with any port, or, with
    `loopback`, a loopback name or address; else 421. This prevents DNS rebinding, in which another
    site's page reaches the server by a name that resolves to this machine."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], loopback: bool, on_reject: OnReject):
        self.app = app
        self.loopback = loopback
        self.on_reject = on_reject
        self.hosts = {allowed_host(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        values = [value.decode("latin-1") for value in _values(scope, b"host")]
        host = host_name(values[0]) if len(values) == 1 else None
        if host is not None and (host in self.hosts or (self.loopback and is_loopback(host))):
            await self.app(scope, receive, send)
        elif host is None:
            self.on_reject(400, "host")
            problem = f"{values[0][:100]!r}" if len(values) == 1 else f"sent {len(values)} times"
            error = ApiError(
                400,
                f"The Host header is {problem}; send one, with the server's name or address.",
                code="invalid_host",
                headers={"connection": "close"},
            )
            await send_error(scope, receive, send, error)
        else:
            self.on_reject(421, "host")
            error = ApiError(
                421,
                f"This server does not answer for the host {host[:100]!r}; if that is its name, "
                f"start it with --allowed-hosts {host[:100]}.",
                code="host_not_allowed",
            )
            await send_error(scope, receive, send, error)


class ApiKeyGuard:
    """Requires `Authorization: Bearer KEY`, or Anthropic's `x-api-key: KEY`, except on the open
    paths; else 401. Requests beyond a key's max_concurrency are a 429; reads do not count.

    Sets scope["state"]["api_key"] to the key's digest, and adds its name to the log. Keys are
    compared in constant time. OPTIONS passes, because browsers send it without a key; no handler
    runs for it.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKeyEntry],
        open_paths: Collection[str],
        on_reject: OnReject,
    ):
        self.app = app
        self.keys = tuple(keys)
        self.digests = [hashlib.sha256(key.secret.encode()).digest() for key in keys]
        self.running = Counter[ApiKeyEntry]()
        self.open_paths = frozenset(open_paths)
        self.on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # no key is read there
            return
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self.app(scope, receive, send)
            return
        key = self._key(scope)
        if key is None and route(scope) not in self.open_paths:
            self.on_reject(401, "api_key")
            error = ApiError(
                401,
                "The API key is missing or wrong; send the header Authorization: Bearer KEY, or "
                "x-api-key: KEY.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await send_error(scope, receive, send, error)
        elif key is None or route(scope) in self.open_paths:
            await self.app(scope, receive, send)
        elif scope["method"] in SAFE_METHODS:
            await self._run(scope, receive, send, key=key, count=0)
        elif key.max_concurrency is not None and self.running[key] >= key.max_concurrency:
            self.on_reject(429, "api_key_busy")
            error = ApiError(
                429,
                f"This API key may run {counted(key.max_concurrency, 'request')} at once; try "
                "again when one has ended.",
                code="api_key_busy",
                headers={"retry-after": "1"},
            )
            await send_error(scope, receive, send, error)
        else:
            await self._run(scope, receive, send, key=key, count=1)

    async def _run(
        self, scope: Scope, receive: Receive, send: Send, *, key: ApiKeyEntry, count: int
    ) -> None:
        state = scope.setdefault("state", {})
        state["api_key"] = hashlib.sha256(key.secret.encode()).digest()
        if key.name:
            state.setdefault("log", {})["key"] = key.name
        self.running[key] += count
        try:
            await self.app(scope, receive, send)
        finally:
            self.running[key] -= count

    def _key(self, scope: Scope) -> ApiKeyEntry | None:
        # For constant time: digests are of equal length, and every key is compared.
        sent_digests = [hashlib.sha256(key).digest() for key in _keys(scope)]
        known_keys = list(zip(self.keys, self.digests, strict=True))
        matching = [
            key
            for sent in sent_digests
            for key, digest in known_keys
            if hmac.compare_digest(sent, digest)
        ]
        return matching[0] if matching else None


class ShutdownGuard:
    """Rejects new requests, except reads, with 503 and Retry-After while the server stops; running
    requests go on."""

    def __init__(self, app: ASGIApp, shutdown: Shutdown, on_reject: OnReject):
        self.app = app
        self.shutdown = shutdown
        self.on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.shutdown.stopping or scope["method"] in SAFE_METHODS:
            await self.app(scope, receive, send)
            return
        self.on_reject(503, "stopping")
        error = ApiError(
            503,
            "The server is stopping; send the request again to another, or later to this one.",
            code="server_stopping",
            headers={"retry-after": str(self.shutdown.retry_after), "connection": "close"},
        )
        await send_error(scope, receive, send, error)


class _BodyTooLong(BaseException):
    """Raised while the application reads a body that passes the limit. A BaseException, so that no
    handler catches it."""


class BodyLimit:
    """Rejects bodies above `limit` bytes with 413: at once if Content-Length says so, else when
    they pass it. An invalid Content-Length, or several that differ, are a 400."""

    def __init__(self, app: ASGIApp, limit: int, on_reject: OnReject):
        self.app = app
        self.limit = limit
        self.on_reject = on_reject

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        lengths = set(_values(scope, b"content-length"))
        if len(lengths) > 1 or not all(_digits.fullmatch(length) for length in lengths):
            self.on_reject(400, "content_length")
            error = ApiError(
                400,
                "Content-Length is not one whole number; send the body's length in bytes.",
                code="invalid_content_length",
                headers={"connection": "close"},
            )
            await send_error(scope, receive, send, error)
        elif lengths and int(lengths.pop()) > self.limit:
            await self._too_large(scope, receive, send)
        elif _values(scope, b"content-length") and not _values(scope, b"transfer-encoding"):
            await self.app(scope, receive, send)  # the HTTP parser enforces the length
        else:
            await self._counting(scope, receive, send)

    async def _counting(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0
        started = False

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self.limit:
                    raise _BodyTooLong
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, limited, watched)
        except _BodyTooLong:
            if started:  # too late for a status: the server closes the connection
                raise RuntimeError("A body passed its limit after the response began.") from None
            await self._too_large(scope, receive, send)

    async def _too_large(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.on_reject(413, "body_too_large")
        error = ApiError(
            413,
            f"The body is longer than this server's limit of {self.limit} bytes; send less.",
            code="request_too_large",
            headers={"connection": "close"},
        )
        await send_error(scope, receive, send, error)


def _keys(scope: Scope) -> list[bytes]:
    """Return the keys that a client sends. A header that is sent twice is ignored."""
    bearer = _values(scope, b"authorization")
    plain = _values(scope, b"x-api-key")
    keys = plain if len(plain) == 1 else []
    if len(bearer) == 1 and bearer[0].partition(b" ")[0].lower() == b"bearer":
        keys = [*keys, bearer[0].partition(b" ")[2]]
    return [key.strip() for key in keys]


def _values(scope: Scope, name: bytes) -> list[bytes]:
    """Return all values of a header, in order. `name` must be in lower case, as in ASGI."""
    return [value for key, value in scope["headers"] if key == name]


def route(scope: Scope) -> str:
    """Return the path that the router sees, without a proxy's prefix."""
    return scope["path"].removeprefix(scope.get("root_path", ""))
