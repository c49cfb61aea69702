"""Warnings and errors of `strobe serve` before it loads a model."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.server import launch
from strobe.server.engine_process.engine_messages import Ready
from strobe.server.launch import serve
from strobe.server.server_settings import LogSettings, ServerConfig


@pytest.mark.parametrize(
    ("host", "more", "warns"),
    [
        ("0.0.0.0", {}, True),
        ("0.0.0.0", {"api_key": ("secret",)}, False),
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
    ],
)
def test_network_server_without_key_warns(
    host: str,
    more: dict[str, Any],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(LogSettings, "configure", lambda self: None)
    monkeypatch.delenv("STROBE_API_KEY", raising=False)
    with pytest.raises(ValueError, match="/nowhere"):
        serve(EngineConfig(target="/nowhere"), ServerConfig(host=host, port=0, **more))
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert [("0.0.0.0" in text, "--api-key" in text) for text in warnings] == [(True, True)] * warns


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("tool_call_parser", "nope", "tool_call_parser is 'nope'"),
        ("reasoning_parser", "nope", "reasoning_parser is 'nope'"),
        ("cors_origin", ("nope",), "CORS origin 'nope'"),
        ("api_key", ("a key ",), "API key 1"),
        ("batch_dir", "/dev/null/batches", "batch_dir is '/dev/null/batches'"),
        ("chat_template", "{% if %}", "template does not compile"),
    ],
)
def test_unusable_setting_starts_no_engine(
    setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LogSettings, "configure", lambda self: None)
    monkeypatch.setattr(launch, "make_client", None)
    with pytest.raises(ValueError, match=message):
        serve(EngineConfig(), ServerConfig(port=0, **{setting: value}))


def test_startup_line_names_memory_for_keys_and_values():
    facts = Ready(8192, 32, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 513, 410_000_000)
    assert launch.description(facts, num_engines=2, page_size=16) == (
        "2 engines, cpu, float32, drafting with dflash, K/V memory 410 MB for 8,208 tokens"
    )
