"""The middleware in a real uvicorn, as seen by a client and a handler over a socket."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from strobe.server.http.guards import ApiKeyEntry
from strobe.server.http.middleware import MiddlewareSettings, wrap
from tests.server.support.polling import PATIENCE

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Lines(logging.Handler):
    """The access log as a queue that a test can wait on."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.queue.put_nowait(json.loads(record.getMessage()))


def serve(app: Any, parser: str, talk: Talk) -> dict[str, Any]:
    """Run a client with a new server. Returns the access log's first line."""

    async def main() -> dict[str, Any]:
        lines, log = Lines(), logging.getLogger("strobe.access")
        wrapped = wrap(app, MiddlewareSettings(max_body_bytes=100, api_keys=(ApiKeyEntry("k"),)))
        config = uvicorn.Config(
            wrapped, http=parser, log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            log.addHandler(lines)
            log.setLevel(logging.INFO)
            task = asyncio.create_task(server.serve(sockets=[listening]))
            try:
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                await talk(reader, writer)
                line = await lines.queue.get()
                writer.close()
            finally:
                server.should_exit = True
                await task
                log.removeHandler(lines)
                log.setLevel(logging.NOTSET)
        return line

    return asyncio.run(asyncio.wait_for(main(), timeout=PATIENCE))


def head(*headers: str) -> bytes:
    named = ("POST /v1 HTTP/1.1", "Host: t", "Authorization: Bearer k", *headers)
    return "\r\n".join((*named, "", "")).encode()


def application() -> FastAPI:
    app = FastAPI()

    @app.post("/v1")
    async def answer(request: Request) -> Any:
        async def forever() -> Any:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)

        body: dict[str, Any] = await request.json()
        return StreamingResponse(forever()) if body["stream"] else body

    return app


missing = importlib.util.find_spec("httptools") is None
httptools = pytest.param(
    "httptools", marks=pytest.mark.skipif(missing, reason="httptools is not installed")
)
pytestmark = pytest.mark.parametrize("parser", ["h11", httptools])


def test_chunked_body_over_limit_is_413_and_closes(parser: str):
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("Transfer-Encoding: chunked"))
        for _ in range(3):
            writer.write(b"28\r\n" + b"x" * 40 + b"\r\n")  # and more is announced
        seen.append(await reader.read())

    line = serve(application(), parser, talk)
    status, _, rest = seen[0].partition(b"\r\n")
    assert status.startswith(b"HTTP/1.1 413")
    assert json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    assert b"connection: close" in rest.lower()
    assert line["status"] == 413


def test_body_within_limit_keeps_the_connection(parser: str):
    body = json.dumps({"stream": False}).encode()
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(head(f"Content-Length: {len(body)}", "X-Request-Id: mine") + body)
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(len(body.replace(b" ", b"")))

    line = serve(application(), parser, talk)
    for response in seen:
        assert response.startswith(b"HTTP/1.1 200")
        assert b"x-request-id: mine" in response
        assert b"connection: close" not in response.lower()
    assert (line["status"], line["request_id"], line["bytes"]) == (200, "mine", 16)


def test_disconnect_stops_stream_and_logs_499(parser: str):
    body = json.dumps({"stream": True}).encode()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head(f"Content-Length: {len(body)}") + body)
        await reader.readuntil(b"data: x")
        writer.transport.abort()

    line = serve(application(), parser, talk)
    assert line["status"] == 499
    assert line["bytes"] >= 9
