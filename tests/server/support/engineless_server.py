"""A server's parts without an engine; tests provide the events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.server.engine_process.client import EngineClient, Generation
from strobe.server.engine_process.engine_messages import Ready, Submit
from strobe.server.http.guards import Shutdown
from strobe.server.server_settings import LogSettings, ServerConfig
from strobe.server.serving import Formats, Serving
from strobe.server.telemetry.server_metrics import ServerMetrics
from strobe.step import RequestStart, TokenEvent
from strobe.text.tokenizer import Tokenizer

START = RequestStart("dflash", None, 0, 0.0, (), frozenset({2}))


class RecordingClient(EngineClient):
    """A client without an engine that records the messages to it. at_submit: called with each
    submitted prompt's generation."""

    def __init__(self, at_submit: Callable[[Generation], None] = lambda generation: None):
        super().__init__(EngineConfig(), LogSettings())
        self.sent: list[Any] = []
        self.at_submit = at_submit
        self.facts = Ready(2048, 2, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 100)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            self.at_submit(self._generations[message.key])


def serving(tokenizer: Tokenizer | None = None, **settings: Any) -> Serving:
    return Serving(
        settings=ServerConfig(**settings),
        client=RecordingClient(),
        tokenizer=tokenizer or Tokenizer(DEMO_MODELS / "target"),
        names=("m",),
        root="m",
        chat_template=None,
        formats=Formats(None, None),
        metrics=ServerMetrics("m"),
        shutdown=Shutdown(),
    )


def event(tokens: Sequence[int], choice: int = 0, **more: Any) -> TokenEvent:
    return TokenEvent(0, choice, list(tokens), num_computed_tokens=5)._replace(**more)


def samples(metrics: ServerMetrics, name: str) -> list[Any]:
    """Return a metric's samples in /metrics, each with `labels` and a `value`."""
    families = text_string_to_metric_families(metrics.render(None)[0].decode())
    return [sample for family in families if family.name == name for sample in family.samples]
