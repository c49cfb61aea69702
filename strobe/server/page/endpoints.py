"""Endpoints that only the page needs: /markdown and /events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, ClassVar, NotRequired

from fastapi import FastAPI, Request
from pydantic import Field, ValidatorFunctionWrapHandler
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from strobe.server.generation import reply
from strobe.server.page.markdown import blocks
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import HERE, FieldError
from strobe.server.schema.values import Rule
from strobe.server.serving import Serving

MAX_CHARS = 200_000
"""Characters of the longest text that is rendered."""

EVENT_SECONDS = 0.5
"""Time between two looks at the engine's state for /events."""
SILENT_SECONDS = 15.0
"""Time without an event until /events sends a comment, so that a broken connection is noticed."""


class Renderable(Rule):
    """A text that is not too long to render."""

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        text = inner(value)
        if len(text) > MAX_CHARS:
            raise FieldError(
                f"{HERE} has {len(text)} characters, but at most {MAX_CHARS} are rendered; shorten "
                "it.",
                HERE,
            )
        return text

    def shown(self) -> dict[str, Any]:
        return {"maxLength": MAX_CHARS}


class MarkdownRequest(RequestModel):
    """The body of POST /markdown."""

    schema_key: ClassVar[str] = "markdown"

    text: Annotated[str, Renderable()] = Field(
        description="A text in Markdown, of at most 200,000 characters."
    )
    open: bool = Field(
        False, description="The text goes on: close its open emphasis, code and links."
    )


class MarkdownBlock(TypedDict):
    """line: the block's first line, from 0. node: a string, or a list of a tag, its attributes and
    its children."""

    line: int
    node: Any


class MarkdownResponse(TypedDict):
    """The response of /markdown."""

    blocks: list[MarkdownBlock]
    warnings: NotRequired[list[str]]


async def markdown(serving: Serving, request: MarkdownRequest, http: Request) -> Response:
    """Answer POST /markdown."""

    def render() -> bytes:
        body: MarkdownResponse = {
            "blocks": [
                {"line": block.line, "node": block.node}
                for block in blocks(request.text, is_open=request.open)
            ]
        }
        if warnings := request.warnings():
            body["warnings"] = warnings
        return reply.compact(body).encode("utf-8", "replace")

    return Response(await serving.in_thread(render), media_type="application/json")


def add_event_stream(app: FastAPI, serving: Serving) -> None:
    """Add GET /events, the engine's state whenever it has changed."""

    @app.get("/events", include_in_schema=False)
    async def events() -> Response:  # pyright: ignore[reportUnusedFunction]
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            engine_events(serving), media_type="text/event-stream", headers=headers
        )


async def engine_events(serving: Serving) -> AsyncGenerator[bytes]:
    """Yield the engine's state as server-sent events, until the server stops."""
    last = None
    sent_at = 0.0
    while True:
        now = time.monotonic()
        state = engine_state(serving)
        if state != last:
            last = state
            sent_at = now
            yield reply.encode_event({**state, "time": round(now, 3)})
        elif now - sent_at >= SILENT_SECONDS:
            sent_at = now
            yield b": nothing new\n\n"
        if serving.shutdown.stopping:
            return
        await asyncio.sleep(EVENT_SECONDS)


def engine_state(serving: Serving) -> dict[str, Any]:
    """Return why the engine cannot answer, None if it can, and its load and totals."""
    client = serving.client
    problem = None
    if serving.shutdown.stopping:
        problem = "The server is stopping."
    elif not client.can_answer:
        problem = client.state
    state: dict[str, Any] = {"problem": problem}
    if problem is None and (snapshot := client.snapshot) is not None:
        counts = snapshot.stats.draft_counts
        state |= {
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "kv_used": round(snapshot.kv_used, 4),
            "tokens": snapshot.stats.generation_tokens,
            "draft_steps": counts.steps,
            "verified": counts.num_verified,
            "accepted": counts.num_accepted,
        }
    return state
