"""The endpoints /v1/messages and /v1/messages/count_tokens. The events of content blocks are in
content_blocks.py, their order in generation/output_items.py."""

from __future__ import annotations

import functools

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.server.anthropic.content_blocks import make_block
from strobe.server.anthropic.error_body import error_body
from strobe.server.anthropic.protocol.message_bodies import (
    ContentBlock,
    Message,
    MessageEnd,
    MessageHead,
    MessageTokens,
    MessageUsage,
    StopReason,
)
from strobe.server.anthropic.protocol.message_events import (
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
)
from strobe.server.anthropic.protocol.messages_request import (
    CountTokensRequest,
    MessagesRequest,
)
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.output_items import ItemCodec
from strobe.server.generation.prepare import Prepared, count_prompt_tokens, prepare
from strobe.server.generation.reply import Event
from strobe.server.generation.run import speculation, usage
from strobe.server.serving import Serving


async def messages(serving: Serving, request: MessagesRequest, http: Request) -> MessageCodec:
    """Answer POST /v1/messages."""
    prepared = await prepare(serving, request, http, whole_calls=not request.stream)
    return MessageCodec(serving, request, prepared, reply.wants_report(http, request))


async def count_tokens(serving: Serving, request: CountTokensRequest, http: Request) -> Response:
    """Answer POST /v1/messages/count_tokens, which counts the prompt's tokens."""
    serving.name(request.model)
    number, sentences = await count_prompt_tokens(serving, request)
    body: MessageTokens = {"input_tokens": number}
    if sentences:
        body["warnings"] = sentences
    return JSONResponse(body)


class MessageCodec(ItemCodec[ContentBlock]):
    """A message of /v1/messages, whole or streamed."""

    def __init__(
        self, serving: Serving, request: MessagesRequest, prepared: Prepared, report: bool
    ):
        make = functools.partial(make_block, shows_thinking=request.shows_thinking)
        super().__init__(serving, request, prepared, make)
        self.request = request
        self.report = report

    def start(self) -> list[Event]:
        message: Message = {
            **self._head(),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        start: MessageStart = {"type": "message_start", "message": message}
        ping: Ping = {"type": "ping"}
        return [start, ping]

    def end(self) -> list[Event]:
        end = self._end()
        delta: MessageDelta = {
            "type": "message_delta",
            "delta": {"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]},
            "usage": end["usage"],
            **reply.extras(self.runs, self.report, reply.ending_warnings(self.run)),
        }
        stop: MessageStop = {"type": "message_stop"}
        return [delta, stop]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error, self.prepared.job.request_id)]

    def body(self) -> Message:
        return {**self._head(), "content": self.items.output, **self._end()}

    def _head(self) -> MessageHead:
        """Return the message's first fields, before any content."""
        head: MessageHead = {
            "id": f"msg_{self.prepared.job.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.prepared.name,
            "content": [],
        }
        if warnings := [*self.prepared.warnings, *reply.ending_warnings(self.run)]:
            head["warnings"] = warnings
        return head

    def _end(self) -> MessageEnd:
        """Return the message's last fields: stop reason and usage."""
        stop = self.run.choices[0].output.stop_reason
        sequence = stop if isinstance(stop, str) else None
        end: MessageEnd = {
            "stop_reason": self._stop_reason(sequence),
            "stop_sequence": sequence,
            "usage": self._usage(),
        }
        if self.report:
            end["speculation"] = speculation(self.runs)
        return end

    def _stop_reason(self, sequence: str | None) -> StopReason:
        if self.status == "incomplete":
            return "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.items.calls_are_complete else "end_turn"

    def _usage(self) -> MessageUsage:
        counted = usage(self.runs)
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }
