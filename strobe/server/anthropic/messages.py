"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.server.anthropic.content import make_block
from strobe.server.anthropic.errors import error_body
from strobe.server.anthropic.protocol.messages_request import (
    CountTokensRequest,
    MessagesRequest,
)
from strobe.server.generation.errors import ApiError
from strobe.server.openai import converted, replies
from strobe.server.openai.chat import Prepared
from strobe.server.openai.output_items import OrderedAnswer, OutputItems
from strobe.server.openai.runs import usage
from strobe.server.serving import Serving


async def messages(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/messages."""
    try:
        request = MessagesRequest.read(await http.body(), lenient=serving.settings.lenient)
        prepared = await converted.prepare_converted(
            serving, request, http, clamp_max_tokens=True, whole_calls=not request.stream
        )
        make = functools.partial(make_block, shows_thinking=request.shows_thinking)
        items = OutputItems(make, parallel=request.to_chat().allows_several_calls)
        answer = OrderedAnswer(serving, request, prepared.job, items)
    except Exception as error:
        return replies.error_response(serving, http, error)
    report = replies.wants_report(http, request)
    reply = MessageReply(request, prepared, answer, report)
    runs = [answer.run]
    deadline = prepared.deadline
    if request.stream:
        failed = functools.partial(_error_event, prepared.job.request_id)
        ending = replies.StreamEnd(failed)
        return await replies.stream_response(
            serving, http, runs=runs, events=reply.events, deadline=deadline, ending=ending
        )
    return await replies.json_response(serving, http, runs=runs, body=reply.body, deadline=deadline)


async def count_tokens(serving: Serving, http: Request) -> Response:
    """Answer POST /v1/messages/count_tokens, which counts the prompt's tokens."""
    try:
        request = CountTokensRequest.read(await http.body(), lenient=serving.settings.lenient)
        serving.name(request.model)
        number, sentences = await converted.count_tokens(serving, request)
        return JSONResponse({"input_tokens": number} | replies.extras([], False, sentences))
    except Exception as error:
        return replies.error_response(serving, http, error)


def _error_event(request_id: str, error: ApiError) -> bytes:
    """Return the last event of a stream that fails."""
    return replies.typed_event(error_body(error, request_id))


class MessageReply:
    """Builds the response of /v1/messages, whole or streamed."""

    def __init__(
        self, request: MessagesRequest, prepared: Prepared, answer: OrderedAnswer, report: bool
    ):
        self.request = request
        self.prepared = prepared
        self.answer = answer
        self.run = answer.run
        self.report = report

    async def body(self) -> dict[str, Any]:
        """Return the whole message after the answer has ended."""
        async for _ in self.answer.steps():
            pass
        return self._message() | {"content": self.answer.items.output} | self._ended()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of the stream."""
        begun = False
        async for events in self.answer.steps():
            out = b""
            if not begun:
                begun = True
                message = {**self._message(), "stop_reason": None, "stop_sequence": None}
                message["usage"] = self._usage()
                out += replies.typed_event({"type": "message_start", "message": message})
                out += replies.typed_event({"type": "ping"})
            out += b"".join(map(replies.typed_event, events))
            if out:
                yield out
        if not self.run.abandoned:
            ended = self._ended() | replies.extras([], False, self._ending_warnings())
            delta = {name: ended.pop(name) for name in ("stop_reason", "stop_sequence")}
            yield replies.typed_event({"type": "message_delta", "delta": delta, **ended})
            yield replies.typed_event({"type": "message_stop"})

    def _message(self) -> dict[str, Any]:
        """Return the message's first fields, before any content."""
        return {
            "id": f"msg_{self.prepared.job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.prepared.name,
            "content": [],
        } | replies.extras([], False, [*self.prepared.warnings, *self._ending_warnings()])

    def _ending_warnings(self) -> list[str]:
        return self.request.own_names(replies.ending_warnings(self.run))

    def _ended(self) -> dict[str, Any]:
        """Return the message's last fields: stop reason and usage."""
        stop = self.run.choices[0].output.stop_reason
        sequence = stop if isinstance(stop, str) else None
        return {
            "stop_reason": self._stop_reason(sequence),
            "stop_sequence": sequence,
            "usage": self._usage(),
        } | replies.extras([self.run], self.report, [])

    def _stop_reason(self, sequence: str | None) -> str:
        if self.answer.status == "incomplete":
            return "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.answer.items.calls_are_complete else "end_turn"

    def _usage(self) -> dict[str, Any]:
        counted = usage([self.run])
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.answer.reasoning_tokens},
        }
