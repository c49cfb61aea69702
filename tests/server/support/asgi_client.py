"""A client for ASGI applications that records every message and can disconnect at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.server.support.polling import PATIENCE

Headers = Sequence[tuple[str, str]]


@dataclass
class Answer:
    """The messages that an application sent, and the request's scope."""

    scope: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    reads: int = 0

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    def header(self, name: str) -> str | None:
        values = [v for k, v in self.messages[0]["headers"] if k.lower() == name.encode()]
        assert len(values) < 2, values
        return values[0].decode() if values else None


def call(
    app: Any,
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    headers: Headers = (),
    body: Iterable[bytes] = (b"",),
    length: bool = True,
    root_path: str = "",
    query: bytes = b"",
    gone: bool = False,
    answer: Answer | None = None,
) -> Answer:
    """Send one request and return the answer. body: its parts. length: send a Content-Length.
    gone: the client disconnects after its body. Without `headers` the body is JSON and the host
    localhost."""
    parts = list(body)
    named = [(k.lower().encode(), v.encode()) for k, v in headers]
    if not any(name == b"host" for name, _ in named):
        named.append((b"host", b"localhost"))
    if not any(name == b"content-type" for name, _ in named):
        named.append((b"content-type", b"application/json"))
    if length:
        named.append((b"content-length", str(sum(map(len, parts))).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "root_path": root_path,
        "query_string": query,
        "headers": named,
        "client": ("192.0.2.7", 40000),
        "server": ("test", 80),
        "state": {},
    }
    answer = answer or Answer(scope)
    answer.scope = scope
    queue = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]
    if gone:
        queue.append({"type": "http.disconnect"})

    async def receive() -> Any:
        answer.reads += 1
        if queue:
            return queue.pop(0)
        last = answer.messages[-1] if answer.messages else {"type": None}
        if last["type"] != "http.response.body" or last.get("more_body", False):
            await asyncio.Event().wait()  # the client waits for its answer
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        answer.messages.append(dict(message))

    asyncio.run(asyncio.wait_for(app(scope, receive, send), timeout=PATIENCE))
    return answer


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body and send it back."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    length = str(len(body)).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
    )
    await send({"type": "http.response.body", "body": body})


async def untouched(scope: Any, receive: Any, send: Any) -> None:
    """An application that no request may reach."""
    raise AssertionError(f"{scope['method']} {scope['path']} reached the application")
