"""HTTP responses of all endpoints: errors, disconnects, deadlines, event streams."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strobe.server.generation.api_errors import ApiError, to_api_error
from strobe.server.generation.bodies import Extras
from strobe.server.generation.run import Progress, PromptRun, speculation, usage
from strobe.server.http import error_responses
from strobe.server.http.access_log import CLIENT_CLOSED
from strobe.server.http.openapi import EVENT_STREAM
from strobe.server.serving import Serving

logger = logging.getLogger(__name__)

SPECULATION_HEADER = "x-strobe-speculation"
DONE = b"data: [DONE]\n\n"
_UNREAD_SECONDS = 5.0

Event = Mapping[str, Any]
"""A part of a stream, or a whole body, before it is encoded."""


def compact(value: object) -> str:
    """Return JSON without spaces. Raises ValueError for NaN and infinities, which JSON lacks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode_event(value: object) -> bytes:
    """Return a server-sent event."""
    return f"data: {compact(value)}\n\n".encode("utf-8", "replace")


def encode_typed_event(value: Mapping[str, Any]) -> bytes:
    """Return a server-sent event, named after its type."""
    return b"event: %s\n" % value["type"].encode() + encode_event(value)


def error_response(serving: Serving, http: Request, error: Exception) -> Response:
    """Return the HTTP response for an error before a response began."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED)
    api_error = to_api_error(error)
    serving.metrics.record_rejected(api_error.status, api_error.code)
    return error_responses.error_response(http.scope, api_error)


async def read_body(serving: Serving, http: Request, *, untyped: bool = False) -> None:
    """Read the body, which `http` then caches for the handler.

    untyped: clients of the endpoint send no Content-Type, or curl's. Raises ApiError if the
    Content-Type is not JSON, since any web page may post text, unless it is untyped and comes from
    no web page, or if it does not arrive within request_timeout; ClientDisconnect.
    """
    http.scope["state"]["arrived_at"] = time.monotonic()
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    accepted = untyped and "origin" not in http.headers
    if kind != "application/json" and not kind.endswith("+json") and not accepted:
        raise ApiError(
            415,
            f"The Content-Type is {kind[:100]!r}, but must be application/json; send that header.",
            code="unsupported_media_type",
        )
    limit = serving.settings.request_timeout
    try:
        async with asyncio.timeout(limit or None):
            await http.body()
    except TimeoutError:
        sentence = f"The body did not arrive within {limit:g} s; send it at once."
        raise ApiError(408, sentence, code="body_timeout") from None


class DisconnectWatcher:
    """Calls `on_disconnect` when the client disconnects before its response ends."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]):
        self.disconnected = False
        self._task = asyncio.ensure_future(self._wait(receive, on_disconnect))

    async def _wait(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        on_disconnect()

    def stop(self) -> None:
        self._task.cancel()


class StreamedResponse(Response):
    """A response that is sent in parts. at_end: called once, however the response ends. A client
    that does not read is disconnected _UNREAD_SECONDS after the deadline."""

    def __init__(
        self,
        first: bytes,
        *,
        rest: AsyncGenerator[bytes],
        deadline: Deadline,
        at_end: Callable[[], None],
        media_type: str,
    ):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._at_end = at_end
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            async with self._deadline(_UNREAD_SECONDS):
                await send(start)
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for chunk in self._rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            logger.info("a client did not read its stream to the end in time")
        finally:
            self._at_end()
            await self._rest.aclose()


class Deadline:
    """A request's deadline, by the server's time limit and its own, in seconds."""

    def __init__(self, serving: Serving, requested: float | None):
        limits = [requested, serving.settings.request_timeout or None]
        active_limits = [limit for limit in limits if limit is not None]
        now = asyncio.get_running_loop().time()
        self._at = now + min(active_limits) if active_limits else None

    def __call__(self, later: float = 0.0) -> asyncio.Timeout:
        """Return a timeout that ends at the deadline, or so many seconds later."""
        return asyncio.timeout_at(None if self._at is None else self._at + later)


class Codec:
    """The answer to a request in an API's format. runs: of its prompts, one or several.

    `delta` is called with each step, and `start` after the first of them. All return events, which
    `encode` turns into the bytes of a stream. The same events also build the body of a response
    that is not streamed. done: the last bytes of every stream.
    """

    media_type = EVENT_STREAM
    done = b""

    def __init__(self, runs: Sequence[PromptRun], deadline: Deadline):
        self.runs = runs
        self.deadline = deadline

    @property
    def abandoned(self) -> bool:
        return any(run.abandoned for run in self.runs)

    def start(self) -> Sequence[Event]:
        """Return the events before the first step's."""
        return ()

    def delta(self, place: int, steps: Sequence[Progress]) -> Sequence[Event]:
        """Add steps of a prompt's answers. Returns their events. Raises what `check_answers`
        raises."""
        raise NotImplementedError

    def end(self) -> Sequence[Event]:
        """Return the events after the last step."""
        raise NotImplementedError

    def error(self, error: ApiError) -> Sequence[Event]:
        """Return the last events of a stream that fails."""
        raise NotImplementedError

    def body(self) -> Event:
        """Return the whole body after the last step."""
        raise NotImplementedError

    def encode(self, event: Event) -> bytes:
        """Return an event as a part of the stream."""
        return encode_event(event)


async def respond(serving: Serving, http: Request, codec: Codec, *, stream: bool) -> Response:
    """Answer with a whole body or with a stream of events. Errors before the first event are HTTP
    errors."""
    watch = DisconnectWatcher(http.receive, lambda: _close(codec.runs))

    def at_end() -> None:
        watch.stop()
        _finish(serving, http, codec.runs, streams=stream)

    if not stream:
        try:
            async with codec.deadline():
                async for _ in _events(codec):
                    pass
                if watch.disconnected:  # perhaps before any answer began
                    return Response(status_code=CLIENT_CLOSED)
                body = codec.body()
            content = compact(body).encode("utf-8", "replace")
            return Response(content, media_type="application/json")
        except Exception as error:
            return error_response(serving, http, error)
        finally:
            at_end()

    def failing(error: Exception) -> bytes:
        api_error = to_api_error(error)
        serving.metrics.record_rejected(api_error.status, api_error.code)
        _log_fields(http)["error"] = api_error.code
        return b"".join(map(codec.encode, codec.error(api_error))) + codec.done

    source = _stream(codec)
    try:
        first = await anext(source)
    except StopAsyncIteration:
        at_end()
        return Response(status_code=CLIENT_CLOSED)
    except Exception as error:
        at_end()
        return error_response(serving, http, error)
    rest = _until_error(source, codec.runs, failing)
    return StreamedResponse(
        first, rest=rest, deadline=codec.deadline, at_end=at_end, media_type=codec.media_type
    )


async def _events(codec: Codec) -> AsyncGenerator[Sequence[Event]]:
    """Yield the events of each step, without the events at the end. Raises the errors of any run
    and of `check_answers`."""
    started = False
    async for place, steps in _steps(codec.runs):
        events = codec.delta(place, steps)
        if not started:
            started = True
            events = [*codec.start(), *events]
        if events:
            yield events
    check_answers(codec.runs)


async def _steps(runs: Sequence[PromptRun]) -> AsyncGenerator[tuple[int, list[Progress]]]:
    """Yield the steps of all runs as they come, each with its run's place."""
    if len(runs) == 1:
        async for steps in runs[0].steps():
            yield 0, steps
        return
    outputs: asyncio.Queue[tuple[int, list[Progress]] | Exception | None] = asyncio.Queue()

    async def follow(place: int, run: PromptRun) -> None:
        try:
            async for steps in run.steps():
                outputs.put_nowait((place, steps))
            outputs.put_nowait(None)
        except Exception as error:
            outputs.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(place, run)) for place, run in enumerate(runs)]
    num_running = len(tasks)
    try:
        while num_running:
            output = await outputs.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_running -= 1
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()


async def _stream(codec: Codec) -> AsyncGenerator[bytes]:
    """Yield the parts of a stream. Raises TimeoutError after the deadline."""
    source = _events(codec)
    try:
        while True:
            async with codec.deadline():
                events = await anext(source, None)
            if events is None:
                break
            yield b"".join(map(codec.encode, events))
        if not codec.abandoned:
            last = b"".join(map(codec.encode, codec.end())) + codec.done
            if last:
                yield last
    finally:
        await source.aclose()


async def _until_error(
    parts: AsyncGenerator[bytes],
    runs: Sequence[PromptRun],
    failing: Callable[[Exception], bytes],
) -> AsyncGenerator[bytes]:
    """Yield the parts, and after an exception the result of `failing`."""
    try:
        async for part in parts:
            yield part
    except Exception as error:
        _close(runs)
        yield failing(error)
    finally:
        await parts.aclose()


def check_answers(runs: Sequence[PromptRun]) -> None:
    """Raise ApiError for an answer that failed in the engine, FieldError if its grammar is
    the reason."""
    for run in runs:
        for error in [choice.output.error for choice in run.choices if choice.output.error]:
            if error.startswith("structured_outputs"):
                raise run.to_field_error(error)
            raise ApiError(500, error, code="answer_failed")


class Reportable(Protocol):
    """A request that may ask for a speculation report."""

    @property
    def include_speculation(self) -> bool: ...


def wants_report(http: Request, request: Reportable) -> bool:
    """Whether the client asks for a speculation report."""
    return request.include_speculation or http.headers.get(SPECULATION_HEADER, "") in ("1", "true")


def extras(runs: Sequence[PromptRun], report: bool, warnings: list[str]) -> Extras:
    """Return the fields of a whole response that OpenAI's API lacks."""
    fields: Extras = {}
    if report:
        fields["speculation"] = speculation(runs)
    if warnings:
        fields["warnings"] = warnings
    return fields


def ending_warnings(run: PromptRun) -> list[str]:
    """Return a sentence for an answer whose end these endpoints have no word for."""
    if all(choice.output.finish_reason != "repetition" for choice in run.choices):
        return []
    name = run.job.names["repetition_detection"]
    return [f"{name} ended the answer, because its last tokens repeat a pattern."]


def _close(runs: Sequence[PromptRun]) -> None:
    for run in runs:
        run.close()


def _finish(serving: Serving, http: Request, runs: Sequence[PromptRun], *, streams: bool) -> None:
    """End a request: abort and count unfinished answers, and add the outcome to the access log."""
    _close(runs)
    choices = [choice for run in runs for choice in run.choices]
    for choice in [c for run in runs if not run.rejected for c in run.choices]:
        if not choice.finished:
            choice.record_finished()
    report = speculation(runs)
    length = report["acceptance_length"]
    line = _log_fields(http)
    line.update(
        answer_id=runs[0].job.request_id,
        model=serving.names[0],
        stream=streams,
        **{key: value for key, value in usage(runs).items() if key.endswith("tokens")},
        finish_reason=",".join(dict.fromkeys(c.output.finish_reason or "abort" for c in choices)),
        speculation=report["method"],
        acceptance_length=None if length is None else round(length, 3),
        queue_ms=_earliest_ms([choice.queue_time for choice in choices]),
        first_token_ms=_earliest_ms([choice.first_token_seconds for choice in choices]),
    )
    if len(serving.metrics.engines) > 1:
        line["engine"] = ",".join(map(str, sorted({run.engine for run in runs})))
    if serving.settings.log_prompts:
        prompts = [run.job.prompt_ids for run in runs]
        decode = serving.tokenizer.decode
        line["prompts"] = [decode(ids, skip_special_tokens=False) for ids in prompts]
        line["answers"] = [choice.output.text for choice in choices]


def _earliest_ms(seconds: Sequence[float | None]) -> float | None:
    return min([round(1e3 * s, 3) for s in seconds if s is not None], default=None)


def _log_fields(http: Request) -> dict[str, Any]:
    """The handler's fields of this request's line in the access log."""
    return http.scope["state"].setdefault("log", {})
