"""The server's responses and its OpenAPI document, byte for byte as recorded.

A deliberate change is written with `python -m scripts.golden --responses` or `--openapi`; read its
diff before committing it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.server.support.golden import OPENAPI, TRANSCRIPTS, Replay, load, openapi_document


def test_openapi_document_is_as_recorded():
    assert openapi_document() == json.loads(OPENAPI.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.json")), ids=lambda path: path.stem)
def test_responses_are_as_recorded(path: Path):
    transcript = load(path)
    replay = Replay(transcript["settings"])
    for exchange in transcript["exchanges"]:
        assert replay.answer(exchange) == exchange, exchange["name"]
