"""The endpoints /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.bodies import ItemStatus
from strobe.server.generation.output_items import ItemCodec
from strobe.server.generation.prepare import Prepared, count_prompt_tokens, prepare
from strobe.server.generation.reply import Event
from strobe.server.generation.run import speculation, usage
from strobe.server.openai.protocol import response_bodies as bodies
from strobe.server.openai.protocol.response_bodies import InputTokens
from strobe.server.openai.protocol.response_events import ErrorEvent, ResponseEvent
from strobe.server.openai.protocol.responses_request import (
    InputTokensRequest,
    ResponsesPrompt,
    ResponsesRequest,
)
from strobe.server.openai.response_items import make_item
from strobe.server.openai.response_store import ResponseStore, StoredResponse
from strobe.server.openai.stored_responses import complete_items, find, owner
from strobe.server.serving import Serving


async def responses(serving: Serving, request: ResponsesRequest, http: Request) -> ResponseCodec:
    """Answer POST /v1/responses."""
    previous_items = _follow(serving, request, http)
    prepared = await _prepare(serving, request, http)
    report = reply.wants_report(http, request)
    saver = _ResponseSaver(serving.responses, owner(http), previous_items)
    return ResponseCodec(serving, request=request, prepared=prepared, saver=saver, report=report)


async def _prepare(serving: Serving, request: ResponsesRequest, http: Request) -> Prepared:
    prepared = await prepare(serving, request, http, whole_calls=not request.stream)
    if request.is_set("store") and request.store and not serving.responses.max_bytes:
        sentence = "store has no effect: this server was started with --response-memory 0."
        prepared.warnings.append(sentence)
    return prepared


async def input_tokens(serving: Serving, request: InputTokensRequest, http: Request) -> Response:
    """Answer POST /v1/responses/input_tokens, which counts the prompt's tokens."""
    serving.name(request.model)
    _follow(serving, request, http)
    number, sentences = await count_prompt_tokens(serving, request)
    body: InputTokens = {"object": "response.input_tokens", "input_tokens": number}
    if sentences:
        body["warnings"] = sentences
    return JSONResponse(body)


def _follow(serving: Serving, request: ResponsesPrompt, http: Request) -> tuple[bytes, ...]:
    """Continue the conversation of previous_response_id and return its items. Raises
    ApiError."""
    name = request.previous_response_id
    if name is None:
        return ()
    items = find(serving, http, name, "previous_response_id").conversation
    request.follow([from_json(item) for item in items])
    return items


_ENDS: Mapping[ItemStatus, Literal["response.completed", "response.incomplete"]] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
}
"""The type of the last event, by the answer's status."""


def error_event(error: ApiError) -> ErrorEvent:
    """Return the event of a stream that fails."""
    return {"type": "error", "code": error.code, "message": str(error), "param": error.field}


class _ResponseSaver(NamedTuple):
    """Stores a finished response. previous_items: the conversation before the request."""

    store: ResponseStore
    owner: bytes | None
    previous_items: tuple[bytes, ...]

    def save(self, request: ResponsesRequest, response: bodies.Response) -> None:
        """Store a finished response."""
        items = [*self.previous_items, *map(_json, complete_items(request.sent["input"]))]
        output = tuple(map(_json, response["output"]))
        stored = StoredResponse(
            owner=self.owner, body=_json(response), items=tuple(items), output=output
        )
        self.store.put(response["id"], stored)


def _json(value: object) -> bytes:
    return reply.compact(value).encode("utf-8", "replace")


class ResponseCodec(ItemCodec[bodies.OutputItem]):
    """A response of /v1/responses, whole or streamed."""

    def __init__(
        self,
        serving: Serving,
        request: ResponsesRequest,
        prepared: Prepared,
        saver: _ResponseSaver,
        report: bool,
    ):
        super().__init__(serving, request, prepared, make_item)
        self.request = request
        self.report = report
        self._saver = saver
        self.stores = request.store and saver.store.max_bytes > 0
        self.created = int(time.time())
        self._sent = 0

    def start(self) -> list[Event]:
        response = self._response("in_progress")
        response["output"] = []
        created: ResponseEvent = {"type": "response.created", "response": response}
        in_progress: ResponseEvent = {"type": "response.in_progress", "response": response}
        return [created, in_progress]

    def end(self) -> list[Event]:
        response = self._ended()
        response["speculation"] = speculation(self.runs)
        event: ResponseEvent = {"type": _ENDS[self.status], "response": response}
        return [event]

    def error(self, error: ApiError) -> list[Event]:
        self.items.close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": str(error)}
        try:
            _json(response)
        except ValueError:  # the answer so far has NaN logprobs
            response["output"] = []
        failed: ResponseEvent = {"type": "response.failed", "response": response}
        return [error_event(error), failed]

    def body(self) -> bodies.Response:
        return self._ended()

    def encode(self, event: Event) -> bytes:
        """Encode an event with its sequence number."""
        numbered = {"type": event["type"], "sequence_number": self._sent, **event}
        encoded = super().encode(numbered)
        self._sent += 1
        return encoded

    def _ended(self) -> bodies.Response:
        """Return the finished response, and store it if the request asks for it."""
        response = self._response(self.status)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counted = usage(self.runs)
        response["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": counted["total_tokens"],
        }
        if self.report:
            response["speculation"] = speculation(self.runs)
        if self.stores and not self.run.abandoned:
            self._saver.save(self.request, response)
        return response

    def _response(self, status: ItemStatus | Literal["failed"]) -> bodies.Response:
        """Return the response so far, which echoes the request's options."""
        request = self.request
        params = self.prepared.job.params
        response: bodies.Response = {
            "id": self._saver.store.id_prefix + self.prepared.job.request_id,
            "object": "response",
            "created_at": self.created,
            "model": self.prepared.name,
            "status": status,
            "background": False,
            "output": self.items.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "reasoning": {
                "effort": request.reasoning and request.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": self.stores,
            "temperature": params.temperature,
            "text": {"format": request.shown_format},
            "tool_choice": request.sent.get("tool_choice", "auto"),
            "tools": request.sent.get("tools", []),
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": None,
            "metadata": request.metadata or {},
        }
        ending_warnings = reply.ending_warnings(self.run)
        if warnings := [*self.prepared.warnings, *ending_warnings]:
            response["warnings"] = warnings
        return response
