"""GET /events: the engine's state as a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.counters import DraftCounts, EngineStats
from strobe.server.app import make_app
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.page import events as page_events
from strobe.server.page.events import engine_events
from strobe.server.serving import Serving
from strobe.text.tokenizer import Tokenizer
from tests.server.support.answer_checks import check_body
from tests.server.support.asgi_client import call
from tests.server.support.engineless_server import serving

COUNTS = DraftCounts(steps=4, num_verified=28, num_accepted=9)
SNAPSHOT = EngineSnapshot(2, 1, 0.25, EngineStats(generation_tokens=40, draft_counts=COUNTS))


@pytest.fixture
def served() -> Serving:
    return serving(Tokenizer(DEMO_MODELS / "target"))


def take(served: Serving, *changes: Any) -> list[Any]:
    """Return an event per change of the server, each made before the event is awaited; None for a
    comment."""

    async def main() -> list[Any]:
        stream, events = engine_events(served), list[Any]()
        for change in changes:
            change()
            text = (await anext(stream)).decode()
            assert text.endswith("\n\n")
            events.append(json.loads(text[6:]) if text.startswith("data: ") else None)
        await stream.aclose()
        return events

    return asyncio.run(main())


def test_events_follow_the_engine(served: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_events, "EVENT_SECONDS", 0.0)

    def snapshot() -> None:
        served.client.snapshot = SNAPSHOT

    def restart() -> None:
        served.client.facts, served.client.restarting = None, True

    first, loaded, restarting = take(served, lambda: None, snapshot, restart)
    check_body(list[page_events.EngineState], [first, loaded, restarting])
    assert first.pop("time") <= loaded.pop("time") <= restarting.pop("time")
    assert first == {"problem": None}
    assert loaded == {
        "problem": None, "running": 2, "waiting": 1, "kv_used": 0.25, "tokens": 40,
        "draft_steps": 4, "verified": 28, "accepted": 9,
    }  # fmt: skip
    assert restarting == {"problem": "The engine is restarting."}


def test_silence_is_broken_by_comments(served: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_events, "EVENT_SECONDS", 0.0)
    monkeypatch.setattr(page_events, "SILENT_SECONDS", 0.0)
    assert take(served, *[lambda: None] * 3)[1:] == [None, None]


def test_stream_ends_when_the_server_stops(served: Serving):
    served.shutdown.stopping = True
    answer = call(make_app(served), "/events", method="GET")
    assert answer.status == 200
    assert answer.header("content-type") == "text/event-stream; charset=utf-8"
    assert json.loads(answer.body[6:])["problem"] == "The server is stopping."


def test_events_need_the_api_key(served: Serving):
    locked = serving(served.tokenizer, api_key=("secret",))
    assert call(make_app(locked), "/events", method="GET").status == 401
