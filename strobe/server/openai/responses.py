"""/v1/responses."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import Response

from strobe.server.openai import replies
from strobe.server.openai.chat import Prepared, prepare, warnings
from strobe.server.openai.ordered import Event, Items, OrderedAnswer
from strobe.server.openai.protocol.errors import BadField
from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.openai.response_items import make_item
from strobe.server.openai.runs import speculation, usage
from strobe.server.serving import Serving

_LIMIT = re.compile(r"\bmax_(?:completion_)?tokens\b")
"""max_output_tokens as a chat calls it."""


async def responses(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/responses."""
    try:
        body = await http.body()
        request = ResponsesRequest.read(body, lenient=serving.settings.lenient)
        prepared = await _prepare(serving, request, http)
        items = Items(make_item, parallel=request.parallel_tool_calls)
        answer = OrderedAnswer(serving, prepared.job, items)
    except Exception as error:
        return replies.failed(serving, error)
    report = replies.wants_report(http, request)
    reply = ResponseReply(request, prepared, answer, _metadata(body), report)
    runs, deadline = [answer.run], prepared.deadline
    if request.stream:
        ending = replies.Ending(reply.failed)
        return await replies.stream(serving, http, runs, reply.events, deadline, ending)
    return await replies.whole(serving, http, runs, reply.body, deadline)


async def _prepare(serving: Serving, request: ResponsesRequest, http: Request) -> Prepared:
    chat = request.to_chat()
    try:
        prepared = await prepare(serving, chat, http)
    except BadField as error:
        raise _in_own_words(error) from None
    said = warnings(serving, request, chat)
    said = [re.sub("^reasoning_effort", "reasoning.effort", warning) for warning in said]
    job = prepared.job
    if job.constraint == "response_format":
        job = replace(job, constraint="text.format")
    return replace(prepared, job=job, warnings=said)


def _in_own_words(error: BadField) -> BadField:
    """What is wrong with the chat, with the names that this endpoint has for its fields."""
    bad = error.renamed({_LIMIT: "max_output_tokens"})
    if bad.param == "messages":
        bad.param = "input"
    return bad


def _metadata(body: bytes) -> dict[str, str]:
    """The client's own notes, which the response gives back."""
    given = from_json(body).get("metadata") if b'"metadata"' in body else None
    if not isinstance(given, dict):
        return {}
    return {key: value for key, value in given.items() if isinstance(value, str)}


class ResponseReply:
    """OpenAI's form of the answer, whole or streamed."""

    def __init__(
        self,
        request: ResponsesRequest,
        prepared: Prepared,
        answer: OrderedAnswer,
        metadata: dict[str, str],
        report: bool,
    ):
        self.request, self.prepared, self.answer = request, prepared, answer
        self.metadata, self.report = metadata, report
        self.run, self.items = answer.run, answer.items
        self.created = int(time.time())
        self._sent = 0

    async def body(self) -> dict[str, Any]:
        """The whole response, once the answer has ended."""
        async for _ in self._steps():
            pass
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of the stream."""
        begun = False
        async for events in self._steps():
            out = b""
            if not begun:
                begun, response = True, self._response("in_progress") | {"output": []}
                out += self._event({"type": "response.created", "response": response})
                out += self._event({"type": "response.in_progress", "response": response})
            out += b"".join(map(self._event, events))
            if out:
                yield out
        if not self.run.given_up:
            response = self._ended() | {"speculation": speculation([self.run])}
            yield self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, body: dict[str, Any]) -> bytes:
        """The last events of a stream that an error has ended."""
        said = body["error"]
        event = {"type": "error", **{name: said[name] for name in ("code", "message", "param")}}
        self.items.close("incomplete")
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": said["message"]}
        return self._event(event) + self._event({"type": "response.failed", "response": response})

    async def _steps(self) -> AsyncGenerator[list[Event]]:
        """The answer's. Raises BadField, Unserved, EngineDead."""
        try:
            async for events in self.answer.steps():
                yield events
        except BadField as error:
            raise _in_own_words(error) from None

    def _ended(self) -> dict[str, Any]:
        """The response at its end."""
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
        return response | ({"speculation": speculation([self.run])} if self.report else {})

    def _response(self, status: str) -> dict[str, Any]:
        """The response so far; it repeats what was asked for."""
        request, params = self.request, self.prepared.job.params
        response: dict[str, Any] = {
            "id": f"resp_{self.prepared.job.request_id}",
            "object": "response",
            "created_at": self.created,
            "model": self.prepared.name,
            "status": status,
            "output": self.items.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": request.text_format},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "metadata": self.metadata,
        }
        warnings = self.prepared.warnings
        return response | ({"warnings": warnings} if warnings else {})

    def _event(self, event: Event) -> bytes:
        """An event on the wire, numbered."""
        numbered = {"type": event["type"], "sequence_number": self._sent, **event}
        self._sent += 1
        return replies.typed_event(numbered)
