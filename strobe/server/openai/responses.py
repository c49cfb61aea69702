"""The endpoints /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from strobe.server.generation.errors import ApiError
from strobe.server.openai import replies
from strobe.server.openai.chat import Prepared
from strobe.server.openai.converted import count_tokens, prepare_converted
from strobe.server.openai.output_items import Event, OrderedAnswer, OutputItems
from strobe.server.openai.protocol.responses_request import (
    InputTokensRequest,
    ResponsesPrompt,
    ResponsesRequest,
)
from strobe.server.openai.response_items import make_item
from strobe.server.openai.runs import speculation, usage
from strobe.server.openai.stored_responses import complete_items, find, owner
from strobe.server.response_store import ResponseStore, StoredResponse
from strobe.server.serving import Serving


async def responses(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/responses."""
    try:
        request = ResponsesRequest.read(await http.body(), lenient=serving.settings.lenient)
        previous_items = _follow(serving, request, http)
        prepared = await _prepare(serving, request, http)
        items = OutputItems(make_item, parallel=request.to_chat().allows_several_calls)
        answer = OrderedAnswer(serving, request, prepared.job, items)
    except Exception as error:
        return replies.error_response(serving, http, error)
    report = replies.wants_report(http, request)
    saver = _ResponseSaver(serving.responses, owner(http), previous_items)
    reply = ResponseReply(request, prepared=prepared, answer=answer, saver=saver, report=report)
    runs = [answer.run]
    deadline = prepared.deadline
    if request.stream:
        ending = replies.StreamEnd(reply.failed)
        return await replies.stream_response(
            serving, http, runs=runs, events=reply.events, deadline=deadline, ending=ending
        )
    return await replies.json_response(serving, http, runs=runs, body=reply.body, deadline=deadline)


async def _prepare(serving: Serving, request: ResponsesRequest, http: Request) -> Prepared:
    prepared = await prepare_converted(serving, request, http, whole_calls=not request.stream)
    if request.is_set("store") and request.store and not serving.responses.max_bytes:
        sentence = "store has no effect: this server was started with --response-memory 0."
        prepared.warnings.append(sentence)
    return prepared


async def input_tokens(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/responses/input_tokens, which counts the prompt's tokens."""
    try:
        request = InputTokensRequest.read(await http.body(), lenient=serving.settings.lenient)
        serving.name(request.model)
        _follow(serving, request, http)
        number, sentences = await count_tokens(serving, request)
        body = {"object": "response.input_tokens", "input_tokens": number}
        return JSONResponse(body | replies.extras([], False, sentences))
    except Exception as error:
        return replies.error_response(serving, http, error)


def _follow(serving: Serving, request: ResponsesPrompt, http: Request) -> tuple[bytes, ...]:
    """Continue the conversation of previous_response_id and return its items. Raises
    ApiError."""
    name = request.previous_response_id
    if name is None:
        return ()
    items = find(serving, http, name, "previous_response_id").conversation
    request.follow([from_json(item) for item in items])
    return items


def error_event(error: ApiError) -> Event:
    """Return the event of a stream that fails."""
    return {"type": "error", "code": error.code, "message": str(error), "param": error.field}


class _ResponseSaver(NamedTuple):
    """Stores a finished response. previous_items: the conversation before the request."""

    store: ResponseStore
    owner: bytes | None
    previous_items: tuple[bytes, ...]

    def save(self, request: ResponsesRequest, response: dict[str, Any]) -> None:
        """Store a finished response."""
        items = [*self.previous_items, *map(_json, complete_items(request.input))]
        output = tuple(map(_json, response["output"]))
        stored = StoredResponse(
            owner=self.owner, body=_json(response), items=tuple(items), output=output
        )
        self.store.put(response["id"], stored)


def _json(value: object) -> bytes:
    return replies.compact(value).encode("utf-8", "replace")


class ResponseReply:
    """Builds the response of /v1/responses, whole or streamed."""

    def __init__(
        self,
        request: ResponsesRequest,
        prepared: Prepared,
        answer: OrderedAnswer,
        saver: _ResponseSaver,
        report: bool,
    ):
        self.request = request
        self.prepared = prepared
        self.answer = answer
        self.run = answer.run
        self.items = answer.items
        self.report = report
        self._saver = saver
        self.stores = request.store and saver.store.max_bytes > 0
        self.created = int(time.time())
        self._sent = 0

    async def body(self) -> dict[str, Any]:
        """Return the whole response after the answer has ended."""
        async for _ in self.answer.steps():
            pass
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream."""
        begun = False
        async for events in self.answer.steps():
            out = b""
            if not begun:
                begun = True
                response = self._response("in_progress") | {"output": []}
                out += self._event({"type": "response.created", "response": response})
                out += self._event({"type": "response.in_progress", "response": response})
            out += b"".join(map(self._event, events))
            if out:
                yield out
        if not self.run.abandoned:
            response = self._ended() | {"speculation": speculation([self.run])}
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        """Return the last events of a stream that fails."""
        event = error_event(error)
        self.items.close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": str(error)}
        try:
            _json(response)
        except ValueError:  # the answer so far has NaN logprobs
            response["output"] = []
        return self._event(event) + self._event({"type": "response.failed", "response": response})

    def _ended(self) -> dict[str, Any]:
        """Return the finished response, and store it if the request asks for it."""
        response = self._response(self.answer.status)
        if response["status"] == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        counted = usage([self.run])
        response["usage"] = {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "total_tokens": counted["total_tokens"],
        }
        response |= {"speculation": speculation([self.run])} if self.report else {}
        if self.stores and not self.run.abandoned:
            self._saver.save(self.request, response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response so far, which echoes the request's options."""
        request = self.request
        params = self.prepared.job.params
        response: dict[str, Any] = {
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
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": self.stores,
            "temperature": params.temperature,
            "text": {"format": request.text_format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": None,
            "metadata": request.metadata or {},
        }
        ending_warnings = self.request.own_names(replies.ending_warnings(self.run))
        warnings = [*self.prepared.warnings, *ending_warnings]
        return response | ({"warnings": warnings} if warnings else {})

    def _event(self, event: Event) -> bytes:
        """Encode an event with its sequence number."""
        numbered = {"type": event["type"], "sequence_number": self._sent, **event}
        encoded = replies.typed_event(numbered)
        self._sent += 1
        return encoded
