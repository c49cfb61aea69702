"""Connections that send no headers, or that are too many."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from strobe.server import connections
from strobe.server.connections import Connection, Quiet, most_connections

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body"})


def with_server(client: Callable[[Callable[[], Awaitable[Stream]]], Awaitable[None]]) -> None:
    """Run a client, which gets what opens a connection."""

    async def run() -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await client(lambda: asyncio.open_connection("127.0.0.1", port))
            for connection in list(state.connections):
                connection.transport.close()
        assert not state.tasks

    async def limited() -> None:
        await asyncio.wait_for(run(), 30)

    asyncio.run(limited())


async def status(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n", REQUEST + b"GET / HT"])
def test_headers_that_do_not_come_end_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch):
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


def test_a_connection_that_waits_for_its_next_request_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.01)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        kept, slow = await connect(), await connect()
        kept[1].write(REQUEST)
        assert await status(kept[0]) == 204
        assert await status(slow[0]) == 408  # so that time has passed
        kept[1].write(REQUEST)
        assert await status(kept[0]) == 204

    with_server(client)


def test_one_connection_too_many_ends_that_which_has_waited_longest_for_headers(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Connection, "most", 3)

    async def client(connect: Callable[[], Awaitable[Stream]]) -> None:
        kept = await connect()
        kept[1].write(REQUEST)
        assert await status(kept[0]) == 204
        first, second, third = await connect(), await connect(), await connect()
        assert await status(first[0]) == 503
        for reader, writer in (second, third, kept):
            writer.write(REQUEST)
            assert await status(reader) == 204
        refused = await connect()  # nobody waits for headers but it
        assert await status(refused[0]) == 503
        assert json.loads(await refused[0].read())["error"]["type"] == "service_unavailable"

    with_server(client)


def limit_of(descriptors: int) -> Callable[[int], tuple[int, int]]:
    return lambda _: (descriptors, 4096)


@pytest.mark.parametrize(("descriptors", "most"), [(200, 72), (1024, 896), (10, 1), (-1, 1 << 20)])
def test_connections_leave_descriptors_for_the_rest(
    descriptors: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections.resource, "getrlimit", limit_of(descriptors))
    assert most_connections() == most


def test_what_cannot_be_accepted_is_said_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    times = iter([5.0, 5.0, 5.5, 5.9, 6.0, 6.0, 6.5])  # two where it says something
    monkeypatch.setattr(connections.time, "monotonic", lambda: next(times))
    loop, quiet = asyncio.new_event_loop(), Quiet()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24, "x")}
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            quiet(loop, context)
        assert caplog.text.count("No connection can be accepted") == 2
        quiet(loop, {"message": "something else"})
        assert "something else" in caplog.text
    loop.close()
