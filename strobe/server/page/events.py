"""The endpoint that only the page needs: /events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import NotRequired

from fastapi import FastAPI
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from strobe.server.generation import reply
from strobe.server.serving import Serving

EVENT_SECONDS = 0.5
"""Time between two looks at the engine's state for /events."""
SILENT_SECONDS = 15.0
"""Time without an event until /events sends a comment, so that a broken connection is noticed."""


class EngineLoad(TypedDict, total=False):
    """Requests, the share of the K/V cache in use, and totals since the engine's start."""

    running: int
    waiting: int
    kv_used: float
    tokens: int
    draft_steps: int
    verified: int
    accepted: int


class EngineState(EngineLoad):
    """Why the engine cannot answer, null if it can; then its load. time: of an event, in seconds by
    the server's clock."""

    problem: str | None
    time: NotRequired[float]


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
            event: EngineState = {**state, "time": round(now, 3)}
            yield reply.encode_event(event)
        elif now - sent_at >= SILENT_SECONDS:
            sent_at = now
            yield b": nothing new\n\n"
        if serving.shutdown.stopping:
            return
        await asyncio.sleep(EVENT_SECONDS)


def engine_state(serving: Serving) -> EngineState:
    """Return why the engine cannot answer, None if it can, and its load and totals."""
    client = serving.client
    problem = None
    if serving.shutdown.stopping:
        problem = "The server is stopping."
    elif not client.can_answer:
        problem = client.state
    if problem is None and (snapshot := client.snapshot) is not None:
        counts = snapshot.stats.draft_counts
        return {
            "problem": None,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "kv_used": round(snapshot.kv_used, 4),
            "tokens": snapshot.stats.generation_tokens,
            "draft_steps": counts.steps,
            "verified": counts.num_verified,
            "accepted": counts.num_accepted,
        }
    return {"problem": problem}
