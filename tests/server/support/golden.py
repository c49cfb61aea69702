"""Golden transcripts: requests with the engine's events and the response's bytes, recorded once and
replayed without an engine. `python -m scripts.golden` writes them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.hub.locate import locate_models
from strobe.request import SchedulingOptions, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.server.app import make_app
from strobe.server.engine_process.client import (
    EngineClient,
    EngineDead,
    EngineStopped,
    EngineUnavailable,
    Generation,
    PromptRejected,
)
from strobe.server.engine_process.engine_messages import Ready, Submit
from strobe.server.launch import make_serving, served_names
from strobe.server.server_settings import LogSettings, ServerConfig
from strobe.step import RequestStart, TokenEvent
from strobe.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
TRANSCRIPTS = GOLDEN / "transcripts"
OPENAPI = GOLDEN / "openapi.json"

CONFIG = EngineConfig(device="cpu", dtype="float32", adaptive=False)
FACTS = Ready(
    max_model_len=2048,
    max_num_seqs=8,
    vocab_size=2048,
    num_drafts=15,
    methods=("dflash", "none"),
    sampling={},
    dtype="float32",
    device="cpu",
    pages=1024,
)
STEP_SECONDS = 0.01
"""The duration of a replayed step by the engine's clock."""

Exchange = dict[str, Any]
"""A request with its response. name, path, body (JSON, or text that is none); method: POST unless
named; headers; engine: the prompts that reach the engine, with its events; fails: how the engine
fails; status, response_headers, response."""

FAILURES: Mapping[str, Callable[[], Exception]] = {
    "engine_dead": lambda: EngineDead("The engine's process ended while it was answering."),
    "engine_restarting": lambda: EngineUnavailable(
        "The engine's process ended while it was answering; send the request again.",
        "engine_restarting",
    ),
    "server_stopping": lambda: EngineStopped("The server stops before this answer has ended."),
    "timeout": TimeoutError,
    "internal": lambda: RuntimeError("a bug"),
}
"""Ways in which an answer fails, other than a step's error."""

_PLACEHOLDERS = re.compile(
    r"""(?P<name>"(?:created|created_at|decode_seconds|total_duration|prompt_eval_duration
        |eval_duration|prompt_ms|predicted_ms|prompt_per_second|predicted_per_second
        |modified_at|completed_at)":[ ]?)(?:"[^"]*"|[-\d.e+]+)
      |fp_[0-9a-f]{12}
      |(?P<id>req-[0-9a-f]{32}|\b(?:call|fc|rs|msg|toolu)_[0-9a-f]{24}\b)
    """,
    re.VERBOSE,
)


class Placeholders:
    """Replaces values that differ from run to run. Equal ids get equal placeholders."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def apply(self, text: str) -> str:
        return _PLACEHOLDERS.sub(self._replace, text.replace(str(DEMO_MODELS), "DEMO_MODELS"))

    def resolved(self, exchange: Exchange) -> Exchange:
        """Return the exchange with this run's ids in place of placeholders in its path and body."""
        originals = {placeholder: value for value, placeholder in self._ids.items()}

        def resolve(text: str) -> str:
            return re.sub(r"<[a-z]+-\d+>", lambda match: originals[match[0]], text)

        return {
            **exchange,
            "path": resolve(exchange["path"]),
            "body": json.loads(resolve(json.dumps(exchange.get("body")))),
        }

    def _replace(self, match: re.Match[str]) -> str:
        if match["name"]:
            return f'{match["name"]}"VOLATILE"'
        if match["id"] is None:
            return "fp_VOLATILE"
        kind = re.split(r"[-_]", match["id"])[0]
        return self._ids.setdefault(match["id"], f"<{kind}-{len(self._ids) + 1}>")


class TapedGeneration(Generation):
    """Yields recorded events step by step."""

    steps: deque[list[TokenEvent]]
    failure: Exception | None = None

    async def __anext__(self) -> list[TokenEvent]:
        while self.open and not self.closed:
            if not self.steps:
                if self.failure is not None:
                    self.fail(self.failure)
                break
            self.num_steps = getattr(self, "num_steps", 0) + 1
            self.add_events(self.steps.popleft(), STEP_SECONDS * self.num_steps)
            if self._events:
                break
        return await super().__anext__()


class TapedClient(EngineClient):
    """A client without an engine, which answers the prompts of one exchange as recorded."""

    def __init__(self) -> None:
        super().__init__(locate_models(CONFIG), LogSettings())
        self.facts = FACTS
        self.exchange: Exchange = {}
        self.prompts: list[dict[str, Any]] = []
        self.tokenizer = Tokenizer(DEMO_MODELS / "target")

    def send(self, message: Any) -> None:
        pass

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingOptions,
    ) -> Generation:
        prompt = describe_prompt(self.tokenizer, prompt_ids, params, scheduling)
        tape = self.exchange["engine"][len(self.prompts)]
        self.prompts.append(prompt)
        generation = TapedGeneration(
            self, Submit(len(self.prompts), prompt_ids, params, request_id, scheduling)
        )
        steps = [[to_event(entry) for entry in step] for step in tape.get("steps", [])]
        fails = self.exchange.get("fails")
        if fails is not None:
            steps = steps[: fails["after"]]
            if fails["error"] in FAILURES:
                generation.failure = FAILURES[fails["error"]]()
            else:
                start = None if steps else to_event(tape["steps"][0][0]).start
                steps.append([TokenEvent(0, 0, [], "error", None, fails["error"], start=start)])
        generation.steps = deque(steps)
        if "rejected" in tape:
            generation.failure = PromptRejected(tape["rejected"])
        return generation


def describe_prompt(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams, scheduling: SchedulingOptions
) -> dict[str, Any]:
    """Return a prompt and its options, other than the defaults, as JSON."""
    options = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != getattr(SamplingParams(), field.name)
    }
    described: dict[str, Any] = {
        "prompt": tokenizer.decode(ids, skip_special_tokens=False),
        "num_tokens": len(ids),
        "params": options,
    }
    if scheduling != SchedulingOptions():
        described["scheduling"] = repr(scheduling)
    return json.loads(json.dumps(described, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if getattr(value, field.name) is not None
        }
    return dict(value) if isinstance(value, Mapping) else repr(value)


def to_json(event: TokenEvent) -> list[Any]:
    """Return an event without its key, as JSON. Numbers are rounded, as their last digits depend on
    the machine."""
    start = None
    if event.start is not None:
        start = list(event.start._replace(queue_time=0.0, stop_ids=frozenset()))
        start[-1] = sorted(event.start.stop_ids)
    entry = [list(value) if isinstance(value, tuple) else value for value in event[1:]]
    entry[TokenEvent._fields.index("start") - 1] = start
    return json.loads(json.dumps(entry, default=_number), parse_float=lambda x: round(float(x), 4))


def _number(value: Any) -> Any:
    return value.item()


def to_event(entry: list[Any]) -> TokenEvent:
    """Return the event of `to_json`."""
    event = TokenEvent(0, *entry)
    start = event.start
    if start is not None:
        *facts, prompt_logprobs, stop_ids = start
        start = RequestStart(*facts, list(map(_logprob, prompt_logprobs)), frozenset(stop_ids))
    return event._replace(start=start, logprobs=list(map(_logprob, event.logprobs)))


def _logprob(entry: list[Any] | None) -> TokenLogprob | None:
    if entry is None:
        return None
    token, value, rank, top = entry
    return TokenLogprob(token, value, rank, tuple([(id_, other) for id_, other in top]))


def make_app_of(client: EngineClient, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> ASGIApp:
    """Return a server's application with a transcript's settings."""
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
    config = ServerConfig(access_log=False, **options)
    return make_app(make_serving(served_names(EngineConfig(), config), client, tokenizer, None))


class Replay:
    """An application that answers exchanges in their order."""

    def __init__(self, settings: Mapping[str, Any]):
        self.client = TapedClient()
        self.app = make_app_of(self.client, self.client.tokenizer, settings)
        self.placeholders = Placeholders()

    def answer(self, exchange: Exchange) -> Exchange:
        """Return the exchange with the prompts and the response of this application."""
        self.client.exchange = exchange
        self.client.prompts = []
        response = asyncio.run(ask(self.app, self.placeholders, exchange))
        tapes = exchange.get("engine", [])
        engine = [
            {**prompt, **{name: tape[name] for name in ("steps", "rejected") if name in tape}}
            for prompt, tape in zip(self.client.prompts, tapes, strict=False)
        ]
        return {
            **{name: exchange[name] for name in REQUEST if name in exchange},
            "engine": engine,
            **response,
        }


REQUEST = ("name", "method", "path", "headers", "body", "fails")
"""The keys of an exchange's request."""


async def ask(app: ASGIApp, placeholders: Placeholders, exchange: Exchange) -> dict[str, Any]:
    """Send a request to an application. Returns the response's status, headers and lines."""
    exchange = placeholders.resolved(exchange)
    body = exchange.get("body")
    content = (
        b"" if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    )
    headers = {"host": "localhost", "content-type": "application/json"}
    headers |= exchange.get("headers", {})
    path, _, query = exchange["path"].partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": exchange.get("method", "POST"),
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            *((name.encode(), value.encode()) for name, value in headers.items()),
            (b"content-length", str(len(content)).encode()),
        ],
        "client": ("192.0.2.7", 40000),
        "server": ("test", 80),
        "state": {},
    }
    messages: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Any:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Any) -> None:
        messages.append(dict(message))

    await asyncio.wait_for(app(scope, receive, send), timeout=60)
    start, *rest = messages
    text = b"".join(message.get("body", b"") for message in rest).decode()
    lines = placeholders.apply(text).splitlines(keepends=True)
    named = [f"{name.decode()}: {value.decode()}" for name, value in start["headers"]]
    kept = [placeholders.apply(line) for line in named if not line.startswith("content-length")]
    return {"status": start["status"], "response_headers": kept, "response": lines}


def load(path: Path) -> dict[str, Any]:
    """Return a file of transcripts: the server's `settings` and `exchanges`."""
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, transcript: Mapping[str, Any]) -> None:
    """Write a file of transcripts."""
    path.write_text(_pretty(transcript, 5) + "\n", encoding="utf-8")


def _pretty(value: Any, levels: int, indent: str = "") -> str:
    """Return JSON with a line for each entry of the outer levels."""
    flat = json.dumps(value, ensure_ascii=False, separators=(",", ": " if levels else ":"))
    if len(indent) + len(flat) <= 100 or not levels or not isinstance(value, (dict, list)):
        return flat
    deeper = f"{indent} "
    if isinstance(value, dict):
        fields: Sequence[str] = [
            f"{json.dumps(name)}: {_pretty(entry, levels - 1, deeper)}"
            for name, entry in value.items()
        ]
        opening, closing = "{}"
    else:
        fields = [_pretty(entry, levels - 1, deeper) for entry in value]
        opening, closing = "[]"
    lines = f",\n{deeper}".join(fields)
    return f"{opening}\n{deeper}{lines}\n{indent}{closing}"


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with all its endpoints."""
    replay = Replay({"api_key": ["secret"]})
    exchange = {
        "method": "GET",
        "path": "/openapi.json",
        "headers": {"authorization": "Bearer secret"},
    }
    response = asyncio.run(ask(replay.app, replay.placeholders, exchange))
    document = json.loads("".join(response["response"]))
    document["info"]["version"] = "VERSION"
    return document
