"""Connections with slow or large headers or bodies, and too many connections."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.server import ServerState

from strobe.server.http import connections
from strobe.server.http.connections import Connection, QuietErrorHandler, max_connections

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


SEEN: list[str] = []
"""The paths of all requests that the application has seen."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers 204; on /read after reading the body."""
    SEEN.append(scope["path"])
    while scope["path"] == "/read":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def with_server(client: Callable[[Callable[[], Awaitable[Stream]]], Awaitable[None]]) -> None:
    """Run a client with a server. The client gets a function that opens a connection."""

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=75)
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await client(lambda: asyncio.open_connection("127.0.0.1", port))
            for connection in list(state.connections):
                connection.transport.close()
            if state.tasks:
                await asyncio.wait(state.tasks)
        assert not state.tasks

    async def limited() -> None:
        await asyncio.wait_for(run(), 30)

    asyncio.run(limited())


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", REQUEST + b"GET / HT"])
def test_slow_headers_close_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.05)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        writer.write(sent)
        if sent.startswith(REQUEST):
            assert await status(reader) == 204
        assert await status(reader) == 408
        error = json.loads(await reader.read())["error"]
        assert error["message"] == "The request's headers were not in after 0.05 s."

    with_server(client)


def test_idle_keep_alive_connection_is_kept(monkeypatch: pytest.MonkeyPatch):
    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        connection = await connect()
        connection[1].write(REQUEST)
        assert await status(connection[0]) == 204
        monkeypatch.setattr(connections, "HEADER_SECONDS", 0.01)
        slow = await connect()
        assert await status(slow[0]) == 408  # so the time limit has passed
        connection[1].write(REQUEST)
        assert await status(connection[0]) == 204

    with_server(client)


def test_excess_connection_closes_the_longest_waiting_one(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Connection, "limit", 3)
    monkeypatch.setattr(connections, "RESERVED", 0)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        kept = await connect()
        kept[1].write(REQUEST)
        assert await status(kept[0]) == 204
        first, second, third = await connect(), await connect(), await connect()
        assert await status(first[0]) == 503
        for reader, writer in (second, third, kept):
            writer.write(REQUEST)
            assert await status(reader) == 204
        refused = await connect()  # it is the only one that waits for headers
        assert await status(refused[0]) == 503
        assert json.loads(await refused[0].read())["error"]["type"] == "service_unavailable"

    with_server(client)


def post(path: str, sent: bytes, length: int = 1000) -> bytes:
    return f"POST {path} HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode() + sent


@pytest.mark.parametrize("sent", [b"", b"half"])
def test_slow_body_is_408_and_ends_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.05)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        writer.write(post("/read", sent))
        assert await status(reader) == 408
        error = json.loads(await reader.read())["error"]
        assert error["message"].startswith("The request's body paused for 0.05 s or came at")

    with_server(client)


class Clock:
    """An event loop's clock, which the test advances; runs no tasks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[Mock, Callable[..., None], Any]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> Mock:
        timer = Mock(at=self.now + seconds)
        self.timers.append((timer, callback, arguments))
        return timer

    def create_task(self, task: Coroutine[Any, Any, None]) -> Mock:
        task.close()
        return Mock()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            self.timers = [timer for timer in self.timers if not timer[0].cancel.called]
            due = [timer for timer in self.timers if timer[0].at <= end]
            if not due:
                break
            first = min(due, key=lambda timer: timer[0].at)
            self.timers.remove(first)
            self.now = first[0].at
            first[1](*first[2])
        self.now = end


class Upload:
    """A connection that receives a body, by default of 1 MiB."""

    def __init__(self, head: bytes = post("/read", b"", 1 << 20)) -> None:
        self.clock, self.transport = Clock(), Mock()
        self.transport.get_extra_info.return_value = None
        self.transport.is_closing.side_effect = lambda: self.transport.close.called
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        self.connection = Connection(config, ServerState(), {}, self.clock)  # type: ignore[arg-type]
        self.connection.connection_made(self.transport)
        self.send(head)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    @property
    def refused(self) -> bool:
        return self.transport.close.called


def test_body_may_pause_for_30_seconds():
    upload = Upload()
    upload.clock.advance(29)
    upload.send(b"x" * 100000)
    upload.clock.advance(29)
    upload.send(b"x")
    assert not upload.refused
    upload.clock.advance(30)
    assert upload.refused
    assert upload.transport.write.call_args[0][0].startswith(b"HTTP/1.1 408 Request Timeout\r\n")


@pytest.mark.parametrize(("rate", "refused"), [(1, True), (900, True), (1100, False)])
def test_body_must_come_at_1024_bytes_per_second(rate: int, refused: bool):
    upload = Upload()
    for _ in range(300):
        upload.clock.advance(1)
        if not upload.refused:
            upload.send(b"x" * rate)
    assert upload.refused == refused


def test_complete_body_has_no_time_limit():
    upload = Upload()
    upload.send(b"x" * (1 << 20))
    upload.clock.advance(1000)
    assert not upload.refused


def test_unread_body_ends_the_connection_without_a_second_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.05)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        writer.write(post("/", b"unread"))
        assert await status(reader) == 204
        assert await reader.read() == b""

    with_server(client)


HEADER = b"x-long: " + b"y" * 1000 + b"\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n" + HEADER * 70,
        b"GET / HTTP/1.1\r\n" + HEADER * 70 + b"\r\n",
        b"GET / HTTP/1.1\r\nx-long: " + b"y" * 70000,
        b"GET /" + b"y" * 70000,
        REQUEST + b"GET / HTTP/1.1\r\n" + HEADER * 70,
    ],
    ids=["endless", "complete", "one header", "request line", "second request"],
)
def test_headers_beyond_64_kib_are_431(sent: bytes):
    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        if sent.startswith(REQUEST):
            writer.write(REQUEST)
            assert await status(reader) == 204
        writer.write(sent.removeprefix(REQUEST))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert b"connection: close" in head
        error = json.loads(await reader.read())["error"]
        assert "more than 65536 bytes" in error["message"]

    with_server(client)


def test_trailers_beyond_64_kib_end_the_connection():
    upload = Upload(b"POST /read HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    upload.send(b"1\r\nx\r\n0\r\n")
    upload.send(HEADER * 60)
    assert not upload.refused
    upload.send(HEADER * 10)
    assert upload.refused


def test_headers_of_63_kib_are_read():
    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n" + HEADER * 63 + b"\r\n")
        assert await status(reader) == 204

    with_server(client)


def test_request_replaces_the_slowest_body(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "limit", 2)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        first, second = await connect(), await connect()
        for _, writer in (first, second):
            writer.write(post("/read", b"x"))
            await writer.drain()
        third, fourth = await connect(), await connect()
        third[1].write(REQUEST)
        assert await status(third[0]) == 204
        assert await status(first[0]) == 503
        second[1].write(b"x" * 999)
        assert await status(second[0]) == 204
        fourth[1].write(REQUEST)  # no connection is slow now
        assert await status(fourth[0]) == 503
        third[1].write(REQUEST)  # and the third was admitted
        assert await status(third[0]) == 204

    with_server(client)


def test_incomplete_request_does_not_replace_a_slow_body(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "limit", 1)
    seen = len(SEEN)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        slow, late, whole = await connect(), await connect(), await connect()
        slow[1].write(post("/read", b"x"))
        await slow[1].drain()
        late[1].write(post("/read", b"x" * 200, 300_000))
        await late[1].drain()
        health = await connect()
        health[1].write(b"GET /health HTTP/1.1\r\n\r\n")
        assert await status(health[0]) == 204
        assert SEEN[seen:] == ["/read", "/health"]  # "/read" came from `slow`
        whole[1].write(post("/read", b"x" * 300_000, 300_000))
        assert await status(whole[0]) == 204
        assert await status(slow[0]) == 503
        late[1].write(b"x" * 299_800)
        assert await status(late[0]) == 503

    with_server(client)


def test_reserved_connection_gets_100_continue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "limit", 1)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        slow, whole = await connect(), await connect()
        slow[1].write(post("/read", b"x"))
        await slow[1].drain()
        whole[1].write(b"POST /read HTTP/1.1\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n")
        assert await status(whole[0]) == 100
        whole[1].write(b"x")
        assert await status(whole[0]) == 204

    with_server(client)


@pytest.mark.parametrize("path", ["/health", "/metrics?x=1", "/ping"])
def test_reserved_connections_answer_health(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "limit", 2)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        slots = [await connect(), await connect()]
        for reader, writer in slots:
            writer.write(REQUEST)
            assert await status(reader) == 204
        for _ in range(40):  # none of them stays open
            reader, writer = await connect()
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert await status(reader) == 204
            assert await reader.read() == b""
        for request in (REQUEST, REQUEST.replace(b"/", b"/health/no", 1)):
            reader, writer = await connect()
            writer.write(request)
            assert await status(reader) == 503
            error = json.loads(await reader.read())["error"]
            assert error["code"] == "too_many_connections"

    with_server(client)


def limit_of(descriptors: int) -> Callable[[int], tuple[int, int]]:
    return lambda _: (descriptors, 4096)


@pytest.mark.parametrize(("descriptors", "limit"), [(200, 72), (1024, 896), (10, 1), (-1, 1 << 20)])
def test_connection_limit_leaves_spare_descriptors(
    descriptors: int, limit: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections.resource, "getrlimit", limit_of(descriptors))
    assert max_connections() == limit


def test_accept_errors_are_logged_once_per_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    times = iter([5.0, 5.0, 5.5, 5.9, 6.0, 6.0, 6.5])  # it logs at two of them
    monkeypatch.setattr(connections.time, "monotonic", lambda: next(times))
    loop, quiet = asyncio.new_event_loop(), QuietErrorHandler()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "x")}
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            quiet(loop, context)
        assert caplog.text.count("No connection can be accepted") == 2
        quiet(loop, {"message": "something else"})
        assert "something else" in caplog.text
    loop.close()
