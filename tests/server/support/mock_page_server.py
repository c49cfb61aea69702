"""A server for the page's tests: the page's files, and scripted answers.

A scripted stream waits at its gates, so that a test can check the page between chunks.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from strobe.server.page import files

Json = dict[str, Any]


class Gate:
    """A point in a stream that waits until it is opened."""

    def __init__(self):
        self._opened: Future[None] = Future()

    def open(self) -> None:
        self._opened.set_result(None)

    async def passed(self) -> None:
        await asyncio.wrap_future(self._opened)


@dataclass
class Reply:
    """One response of the API: parts, the chunks and gates of a stream, or a body.

    gone: set when the client disconnects before the end; done: set when all was sent.
    """

    parts: Sequence[Json | Gate] = ()
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    complete: bool = True
    gone: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


def step(
    *tokens: tuple[str, bool],
    drafted: int = 15,
    content: str | None = None,
    thinking: str | None = None,
    calls: list[Json] | None = None,
    finish: str | None = None,
    **more: list[Any],
) -> Json:
    """A chunk with one step. By default its content is the tokens' text. more: rejected drafts and
    confidence of each draft."""
    if content is None and thinking is None and calls is None:
        content = "".join(piece for piece, _ in tokens)
    fields = {"content": content, "reasoning_content": thinking, "tool_calls": calls}
    accepted = sum(is_draft for _, is_draft in tokens)
    choice: Json = {
        "index": 0,
        "delta": {name: value for name, value in fields.items() if value is not None},
        "finish_reason": finish,
    }
    choice["step"] = {"tokens": [list(t) for t in tokens], "drafted": drafted, "accepted": accepted}
    choice["step"] |= more
    return {"object": "chat.completion.chunk", "choices": [choice]}


def end(
    parts: Sequence[Json | Gate],
    off_reason: str | None = None,
    seconds: float | None = None,
    rested: bool = False,
) -> Json:
    """The last chunk after `parts`: usage and the speculation report. seconds: decoding time;
    rested: drafting was on, but rested in every step."""
    steps = [p["choices"][0]["step"] for p in parts if isinstance(p, dict) and p.get("choices")]
    verified = [s for s in steps if s["drafted"]]
    accepted = sum(s["accepted"] for s in verified)
    tokens = sum(len(s["tokens"]) for s in steps)
    report = {
        "used": bool(verified),
        "method": "dflash" if verified or rested else "none",
        "steps": len(verified),
        "drafted": sum(s["drafted"] for s in verified),
        "accepted": accepted,
        "acceptance_length": 1 + accepted / len(verified) if verified else None,
        "accepted_per_position": [],
        "rows_verified": sum(1 + s["drafted"] for s in steps[1:]),
        "drafts_made": sum(s["drafted"] for s in verified),
        "rested_steps": len(steps[1:]) - len(verified) if verified or rested else 0,
        "rest_reason": None,
        "decode_seconds": seconds,
        "off_reason": None if verified else off_reason or "the request turned speculation off",
    }
    usage = {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}
    return {"choices": [], "usage": usage, "speculation": report}


def answer(
    *parts: Json | Gate,
    off_reason: str | None = None,
    seconds: float | None = None,
    rested: bool = False,
) -> Reply:
    """A complete stream, including its last chunk."""
    return Reply([*parts, end(parts, off_reason, seconds, rested)])


def refusal(status: int, message: str, **headers: str) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return Reply(status=status, body={"error": error}, headers=headers)


class ThreadedServer:
    """Serves from a thread until closed."""

    def __init__(self):
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        config = uvicorn.Config(
            self._answer, interface="asgi3", lifespan="off", ws="none", log_config=None
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        raise NotImplementedError


class PathProxy(ThreadedServer):
    """Shows another server below a path, which the other server does not get to see."""

    def __init__(self, url: str, path: str):
        self._other, self._path = url, path
        super().__init__()
        self.url += path.lstrip("/") + "/"

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].startswith(f"{self._path}/"):
            await plain(send, refusal(404, f"There is nothing at {scope['path']}."))
            return
        url = self._other + scope["path"].removeprefix(self._path)
        headers = [(k, v) for k, v in scope["headers"] if k != b"connection"]
        body = await body_of(receive)
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream(scope["method"], url, headers=headers, content=body) as answer,
        ):
            start = {"status": answer.status_code, "headers": answer.headers.raw}
            await send({"type": "http.response.start", **start})
            leaving = asyncio.ensure_future(left(receive))
            passing = asyncio.ensure_future(self._pass(answer, send))
            await asyncio.wait((leaving, passing), return_when=asyncio.FIRST_COMPLETED)
            for task in (leaving, passing):
                task.cancel()

    async def _pass(self, answer: httpx.Response, send: Any) -> None:
        async for chunk in answer.aiter_raw():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})


class MockServer(ThreadedServer):
    """A scripted server. replies: the responses to the next chat requests.

    received: the bodies of the chat requests, keys: their Authorization headers. api_key: required
    unless None. state: what /events sends; with a problem, /server_info is a 503. template: what
    /server_info says about the chat template. missing: paths of the page's files that are not
    there. shadow: the report of /shadow, None without shadow mode.
    """

    def __init__(self):
        self.reset()
        self._files = files()
        super().__init__()

    def reset(self) -> None:
        """Clear received requests and scripted replies."""
        self.model = "strobe-demo"
        self.template: Json = {"reasoning": "qwen3", "tools": "hermes", "variables": None}
        self.missing: set[str] = set()
        self.shadow: str | None = None
        self.state: Json = {"problem": None}
        self.api_key: str | None = None
        self.replies: deque[Reply] = deque()
        self.received: list[Json] = []
        self.keys: list[str | None] = []

    def reply(self, *replies: Reply) -> None:
        self.replies.extend(replies)

    def _info(self) -> Json:
        return {
            "version": "0.1.0",
            "engine": {
                "max_model_len": 2048,
                "methods": ["dflash", "ngram", "none"],
                "sampling": {"top_p": 0.9},
            },
            "config": {"shadow": self.shadow is not None, "target": "a target", "draft": "draft"},
            "server": {"served_model_name": [self.model]},
            "template": self.template,
        }

    async def _events(self, receive: Any, send: Any) -> None:
        """Send the state whenever it has changed, until the client disconnects."""
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaving, last = asyncio.ensure_future(left(receive)), None
        while not leaving.done():
            if self.state != last:
                last = self.state
                event = f"data: {json.dumps(last)}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.wait([leaving], timeout=0.01)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path in self._files and path not in self.missing:
            kind, body = self._files[path]
            await respond(send, 200, body, {"content-type": kind})
            return
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        key = headers.get("authorization")
        if self.api_key not in (None, (key or "").removeprefix("Bearer ")):
            await plain(send, refusal(401, "The API key is missing or wrong."))
        elif path == "/server_info" and self.state["problem"]:
            await plain(send, refusal(503, self.state["problem"]))
        elif path == "/events":
            await self._events(receive, send)
        elif path == "/server_info":
            await plain(send, Reply(body=self._info()))
        elif path == "/shadow":
            await plain(send, Reply(body=self.shadow))
        elif path == "/v1/chat/completions":
            self.keys.append(key)
            self.received.append(json.loads(await body_of(receive)))
            reply = self.replies.popleft()
            await (stream(reply, receive, send) if reply.parts else plain(send, reply))
        else:
            await plain(send, refusal(404, f"There is nothing at {path}."))


async def body_of(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    return body


async def respond(send: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def plain(send: Any, reply: Reply) -> None:
    headers = {"content-type": "application/json"} | reply.headers
    await respond(send, reply.status, json.dumps(reply.body).encode(), headers)


async def stream(reply: Reply, receive: Any, send: Any) -> None:
    """Send the parts until the client disconnects."""
    writing = asyncio.ensure_future(write(reply, send))
    leaving = asyncio.ensure_future(left(receive))
    await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
    if writing.done():
        reply.done.set()
        leaving.cancel()
        writing.result()
        return
    writing.cancel()
    with suppress(asyncio.CancelledError):
        await writing
    reply.gone.set()


async def write(reply: Reply, send: Any) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in reply.parts:
        if isinstance(part, Gate):
            await part.passed()
            continue
        event = f"data: {json.dumps(part)}\n\n".encode()
        await send({"type": "http.response.body", "body": event, "more_body": True})
    last = b"data: [DONE]\n\n" if reply.complete else b""
    await send({"type": "http.response.body", "body": last})


async def left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
