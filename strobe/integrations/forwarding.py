"""Sends HTTP requests to the application in another process, and its responses back."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic_core import from_json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strobe.server.anthropic import error_body as anthropic
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.reply import encode_event, encode_typed_event
from strobe.server.http.error_responses import format_of
from strobe.server.http.guards import route
from strobe.server.ollama import error_body as ollama
from strobe.server.openai.chunks import DONE
from strobe.server.openai.responses import error_event

PROMPT_FIELDS = ("cache_salt", "system", "instructions", "tools", "messages", "prompt", "input")
"""Fields of a request that its prompt consists of, in that order: if these texts of two requests
share a prefix, so do their prompts. Requests with different salts share no cached prefix."""
MAX_PROMPT = 1 << 16
"""Characters of a prompt to compare."""
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
_response_id = re.compile(r"resp_([a-z0-9]+)_")


SILENT_SECONDS = 30.0
"""How long the router avoids a replica that did not accept a request in time."""


@dataclass(eq=False)
class ForwardedRequest:
    """An HTTP request: ASGI's scope and the body.

    prompt: the text that the router compares with earlier prompts; empty: any replica can answer
    equally well. owner: the replica that has to answer, such as the one that stores the response
    that the request names. excluded: replicas that are chosen only if there are no others.
    answered: whether the ingress has the whole response, or waits for none.
    """

    scope: dict[str, Any]
    body: bytes
    prompt: str = ""
    owner: str = ""
    excluded: tuple[str, ...] = ()
    answered: bool = False

    @staticmethod
    def of(scope: Scope, body: bytes) -> ForwardedRequest:
        """Return the request with what its router needs, from a body that is a JSON object."""
        try:
            fields = from_json(body) if scope["method"] == "POST" else None
        except ValueError:
            fields = None
        fields = fields if isinstance(fields, dict) else {}
        texts = [_text(fields[name]) for name in PROMPT_FIELDS if fields.get(name)]
        owner = _response_id.search(f"{scope['path']} {fields.get('previous_response_id')}")
        headers = scope["headers"]
        if route(scope) == "/metrics":  # merge_metrics reads the plain format
            headers = [header for header in headers if header[0] != b"accept"]
        return ForwardedRequest(
            scope={name: scope[name] for name in _SCOPE if name in scope} | {"headers": headers},
            body=body,
            prompt="\n".join(texts)[:MAX_PROMPT],
            owner=owner[1] if owner else "",
        )


class RoutingState:
    """The state of replicas as an ingress and its router know it: the running ones, the requests
    that each one answers, and the ones that accept none. Used by the threads of both."""

    def __init__(self) -> None:
        self.replicas: frozenset[str] = frozenset()
        self._replica_of: dict[ForwardedRequest, str] = {}
        self._silent_until: dict[str, float] = {}
        self._lock = threading.Lock()

    def record_sent(self, request: ForwardedRequest, replica: str) -> None:
        """Record the replica that gets a request, in place of an earlier one."""
        with self._lock:
            if not request.answered:
                self._replica_of[request] = replica

    def record_answered(self, request: ForwardedRequest) -> None:
        """Record that a request has its response, or will have none."""
        with self._lock:
            request.answered = True
            self._replica_of.pop(request, None)

    def replica_of(self, request: ForwardedRequest) -> str:
        """Return the replica that got a request, "" if none did."""
        return self._replica_of.get(request, "")

    def num_open(self) -> Counter[str]:
        """Return the number of requests that each replica has not answered yet."""
        with self._lock:
            return Counter(self._replica_of.values())

    def record_silent(self, replica: str) -> None:
        """Record that a replica did not accept a request in time."""
        self._silent_until[replica] = time.monotonic() + SILENT_SECONDS

    def is_silent(self, replica: str) -> bool:
        """Whether a replica should be avoided."""
        return self._silent_until.get(replica, 0.0) > time.monotonic()


ROUTING = RoutingState()
"""The state of this process's ingress and router. Ray makes the router, so that the ingress cannot
pass it anything."""


def _text(value: object) -> str:
    """Return the texts in a JSON value, without the names of its fields."""
    if isinstance(value, dict | list):
        return "\n".join(map(_text, value.values() if isinstance(value, dict) else value))
    return str(value)


async def read_body(receive: Receive, limit: int) -> bytes | None:
    """Return the body, or its beginning if it is longer than `limit` bytes, which the replica then
    rejects; None if the client disconnected."""
    body = bytearray()
    while len(body) <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


async def respond(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[list[Message]]:
    """Yield the application's messages, several at once if the caller reads more slowly. If the
    generator is closed, the application sees that the client disconnected."""
    connection = _Connection(request.body)
    scope = {**request.scope, "state": {}}
    task = asyncio.ensure_future(app(scope, connection.receive, connection.send))
    task.add_done_callback(lambda _: connection.wake.set())
    try:
        while not task.done() or connection.messages:
            await connection.wake.wait()
            connection.wake.clear()
            if connection.messages:
                batch = connection.messages
                connection.messages = []  # before the caller runs: more can come meanwhile
                yield batch
        await task
    finally:
        connection.disconnected.set()


class _Connection:
    """The application's end of a request. messages: sent by the application and not yet read; wake:
    set when there are some."""

    def __init__(self, body: bytes):
        self.bodies: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self.messages: list[Message] = []
        self.wake = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def receive(self) -> Message:
        """Return the body, then wait for the client to disconnect."""
        if self.bodies:
            return self.bodies.pop()
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.wake.set()


def _add_loads(bodies: Mapping[str, bytes], silent: Collection[str] = ()) -> bytes:
    """Add the numbers of answers of /load."""
    load = sum(from_json(body)["server_load"] for body in bodies.values())
    missing = {"silent_replicas": sorted(silent)} if silent else {}
    return json.dumps({"server_load": load, **missing}).encode()


def merge_metrics(pages: Mapping[str, bytes], silent: Collection[str] = ()) -> bytes:
    """Merge the replicas' pages of metrics; each sample gets the label `replica`, also
    strobe:replica_up, which is 0 for a silent replica."""
    families: dict[str, dict[str, None]] = {}  # lines by family; the inner one is an ordered set
    for replica, page in pages.items():
        family: dict[str, None] = {}
        for line in page.decode().splitlines():
            if line.startswith("#"):
                family = families.setdefault(line.split(" ")[2], {})
            else:
                end = len(re.split("[{ ]", line, maxsplit=1)[0])
                rest = f",{line[end + 1 :]}" if line[end] == "{" else f"}}{line[end:]}"
                line = f'{line[:end]}{{replica="{replica}"{rest}'
            family[line] = None
    families["strobe:replica_up"] = dict.fromkeys(
        [
            "# HELP strobe:replica_up Whether the replica has answered in time with its metrics.",
            "# TYPE strobe:replica_up gauge",
            *(f'strobe:replica_up{{replica="{replica}"}} 1.0' for replica in pages),
            *(f'strobe:replica_up{{replica="{replica}"}} 0.0' for replica in sorted(silent)),
        ]
    )
    return "".join(f"{line}\n" for family in families.values() for line in family).encode()


def _no_body(bodies: Mapping[str, bytes], silent: Collection[str] = ()) -> bytes:
    """Merge empty bodies. Raises ValueError with the silent replicas, whose caches may stay."""
    if silent:
        names = " and ".join(sorted(silent))
        raise ValueError(
            f"The cache of {names} may not be cleared, because there was no answer in time; those "
            "of the other replicas are. Send the request again."
        )
    return b""


MERGED: Mapping[str, Callable[[Mapping[str, bytes], Collection[str]], bytes]] = {
    "/metrics": merge_metrics,
    "/load": _add_loads,
    "/reset_prefix_cache": _no_body,
}
"""Paths that all replicas answer; each function merges the replicas' bodies into one, which names
the replicas that did not answer. Raises ValueError if they leave the request undone."""


def merge(
    path: str, responses: Mapping[str, Sequence[Message]], silent: Collection[str] = ()
) -> list[Message]:
    """Return one response for a path in MERGED: an error if one of the replicas' is an error.
    silent: replicas without a response. Raises ValueError if they leave the request undone."""
    for messages in responses.values():
        if messages[0]["status"] != 200:
            return list(messages)
    start = next(iter(responses.values()))[0]
    body = MERGED[path](
        {
            replica: b"".join(message.get("body", b"") for message in messages[1:])
            for replica, messages in responses.items()
        },
        silent,
    )
    headers = [header for header in start["headers"] if header[0] != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    return [{**start, "headers": headers}, {"type": "http.response.body", "body": body}]


def without_request_id(send: Send) -> Send:
    """Return `send` without the header of the request's id, for a proxy that adds it."""
    return partial(_send_without_id, send)


async def _send_without_id(send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        headers = [h for h in message["headers"] if h[0] != b"x-request-id"]
        message = {**message, "headers": headers}
    await send(message)


async def send_failure(
    request: ForwardedRequest, send: Send, start: Message | None, sentence: str, code: str
) -> None:
    """End a response whose replica is lost, in the form of the path's API. start: the response's
    first message, if it was sent."""
    path = f"{route(request.scope)}/"
    error = ApiError(503, sentence, code=code)
    ids = [value.decode() for name, value in request.scope["headers"] if name == b"x-request-id"]
    body = format_of(route(request.scope))(error, ids[0] if ids else "")
    content = json.dumps(body).encode()
    if start is None:
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
        headers.append((b"content-length", str(len(content)).encode()))
        await send({"type": "http.response.start", "status": 503, "headers": headers})
    elif path.startswith(f"{anthropic.PATH}/"):
        content = encode_typed_event(body)
    elif path.startswith(f"{ollama.PATH}/"):
        content += b"\n"
    elif path.startswith("/v1/responses/"):
        content = encode_typed_event(error_event(error))
    elif any(b"event-stream" in value for _, value in start["headers"]):
        content = encode_event(body) + DONE
    else:
        raise ConnectionError(sentence)  # part of a body of known length: nothing can follow
    await send({"type": "http.response.body", "body": content})
