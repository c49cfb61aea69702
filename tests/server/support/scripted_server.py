"""A server with a scripted engine: the test chooses the answer's text and steps."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strobe import demo_models
from strobe.config import EngineConfig
from strobe.request import FinishReason, SchedulingOptions, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.server.app import make_app
from strobe.server.engine_process.client import Generation
from strobe.server.engine_process.engine_messages import Ready, Submit
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import Formats, Serving
from strobe.server.telemetry.server_metrics import ServerMetrics
from strobe.step import RequestStart, TokenEvent
from strobe.text.tokenizer import Tokenizer
from tests.server.support.asgi_client import Answer, call

END = 2
"""The demo models' end token."""


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(demo_models.__file__).parent / "target")


class Steps(Generation):
    """Yields its events step by step, even if several steps are available."""

    async def __anext__(self) -> list[TokenEvent]:
        return self._events.popleft() if self._events else await super().__anext__()


class Script:
    """Replaces the engine client. text: the answer; size: tokens per step; ends: the finish reason,
    or an exception to raise at the end; error: the message of an answer that ends with "error"."""

    facts = Ready(2048, 8, 2048, 15, ("dflash", "none"), {"top_p": 0.9}, "float32", "cpu", 64)
    dead, num_open = False, 0
    config = EngineConfig()

    def __init__(
        self,
        text: str,
        size: int = 1,
        ends: FinishReason | Exception = "stop",
        error: str = "The step failed.",
    ):
        self.error = error
        self.ids = list(tokenizer().fast.encode(text, add_special_tokens=False).ids)
        self.ids += [END] if ends == "stop" else []
        self.size, self.ends = size, ends
        self.received: list[SamplingParams] = []
        self.prompts: list[str] = []

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        place: SchedulingOptions,
    ) -> Generation:
        self.received.append(params)
        self.prompts.append(tokenizer().decode(prompt_ids, skip_special_tokens=False))
        prompt = Submit(0, prompt_ids, params, request_id, place)
        generation = Steps(self, prompt)  # pyright: ignore[reportArgumentType]
        groups = [self.ids[at : at + self.size] for at in range(0, len(self.ids), self.size)]
        for number, ids in enumerate(groups or [[]]):
            last = number + 1 >= len(groups)
            ends = self.ends if last and isinstance(self.ends, str) else None
            event = self._event(ids, number == 0, ends, params.logprobs is not None)
            generation.add_events([event] if ids or ends else [])
        if isinstance(self.ends, Exception):
            generation.fail(self.ends)
        return generation

    def send(self, message: Any) -> None:
        pass

    def release(self, generation: Generation) -> None:
        pass

    def _event(
        self, ids: Sequence[int], first: bool, ends: FinishReason | None, logprobs: bool
    ) -> TokenEvent:
        start = RequestStart("dflash", None, 3, 0.0, (), frozenset({END})) if first else None
        entries = [TokenLogprob(token, -0.5, 1, ((token, -0.5), (9, -2.0))) for token in ids]
        drafted, error = 0 if first else 15, self.error if ends == "error" else None
        accepted = max(0, len(ids) - 1) if drafted else 0
        return TokenEvent(
            0, 0, list(ids), ends, None, error, drafted, accepted, entries if logprobs else [], 10,
            start,
        )  # fmt: skip


def _serving(script: Script, template: str | None, **options: Any) -> Serving:
    settings = ServerConfig(access_log=False, **options)
    return Serving(
        settings=settings,
        client=script,  # pyright: ignore[reportArgumentType]
        tokenizer=tokenizer(),
        names=("scripted",),
        root="demo",
        chat_template=template,
        formats=Formats.of(
            settings,
            template or tokenizer().hf.chat_template,
            tokenizer().capabilities(template),
        ),
        metrics=ServerMetrics("scripted"),
    )


def app(script: Script, template: str | None = None, **options: Any) -> Any:
    """A server of its own with a scripted engine. template: replaces the demo models' chat
    template; options: of ServerConfig."""
    return make_app(_serving(script, template, **options))


_shared: dict[str, tuple[Serving, Any]] = {}


def shared_app(script: Script, template: str | None = None, **options: Any) -> Any:
    """As `app`, but a server that tests with the same options share: its stored responses and
    totals stay, and it has the script of the latest call."""
    key = repr((id(tokenizer()), template, sorted(options.items())))
    if key not in _shared:
        serving = _serving(script, template, **options)
        _shared[key] = (serving, make_app(serving))
    serving, application = _shared[key]
    serving.client = script  # pyright: ignore[reportAttributeAccessIssue]
    return application


def post(path: str, script: Script, *, template: str | None = None, **body: Any) -> Answer:
    """Post to a shared server with a scripted engine. template: replaces its chat template."""
    return call(shared_app(script, template), path, body=[json.dumps(body).encode()])
