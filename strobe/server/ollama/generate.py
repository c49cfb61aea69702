"""The endpoints /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.request import CUT_SHORT
from strobe.server.generation.errors import ApiError
from strobe.server.ollama.errors import error_body
from strobe.server.ollama.protocol.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from strobe.server.openai import replies
from strobe.server.openai.chat import (
    AssistantMessage,
    Prepared,
    ToolCallCollector,
    chat_logprob,
    warnings,
)
from strobe.server.openai.converted import prepare_converted
from strobe.server.openai.replies import Codec, Event
from strobe.server.openai.runs import Progress, PromptRun
from strobe.server.parsers import text_of
from strobe.server.parsers.call_arguments import read_object
from strobe.server.serving import Serving

MEDIA_TYPE = "application/x-ndjson"

Part = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""Returns the fields of some content, thinking and calls."""


async def ollama_chat(
    serving: Serving, request: OllamaChatRequest, http: Request
) -> OllamaCodec | Response:
    """Answer POST /api/chat."""
    return await _answer(serving, request, http, _message_part)


async def ollama_generate(
    serving: Serving, request: OllamaGenerateRequest, http: Request
) -> OllamaCodec | Response:
    """Answer POST /api/generate."""
    return await _answer(serving, request, http, _text_part)


def _message_part(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"thinking": thinking} if thinking else {}
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def _text_part(content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": content} | ({"thinking": thinking} if thinking else {})


async def _answer(
    serving: Serving, request: OllamaRequest, http: Request, part: Part
) -> OllamaCodec | Response:
    name = request.model or serving.name(None)
    if request.is_load:
        serving.name(request.model)
        sentences = request.own_names(warnings(serving, request, request.to_chat()))
        sentences += _context_warning(serving, request)
        return JSONResponse(
            _head(name)
            | {**part("", "", []), "done": True, "done_reason": "load"}
            | replies.extras([], False, sentences)
        )
    prepared = await _prepare(serving, request, http)
    return OllamaCodec(
        serving,
        request=request,
        prepared=replace(prepared, name=name),
        run=PromptRun(serving, prepared.job),
        part=part,
        report=replies.wants_report(http, request.to_chat()),
    )


async def _prepare(serving: Serving, request: OllamaRequest, http: Request) -> Prepared:
    prepared = await prepare_converted(
        serving, request, http, clamp_max_tokens=True, raw_prompt=request.raw_prompt
    )
    prepared.warnings.extend(_context_warning(serving, request))
    return prepared


def _context_warning(serving: Serving, request: OllamaRequest) -> list[str]:
    """Return a sentence if the client asks for a context of another length."""
    context = serving.facts.max_model_len
    if request.num_ctx in (None, context):
        return []
    return [
        f"options.num_ctx is {request.num_ctx}, but the context holds {context} tokens for every "
        "request; the server's --max-model-len sets it."
    ]


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class OllamaCodec(Codec):
    """An answer of /api/chat or /api/generate, whole or streamed as lines."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        serving: Serving,
        request: OllamaRequest,
        prepared: Prepared,
        run: PromptRun,
        part: Part,
        report: bool,
    ):
        super().__init__([run], prepared.deadline)
        self.serving = serving
        self.request = request
        self.prepared = prepared
        self.run = run
        self.part = part
        self.report = report
        self.message = AssistantMessage(calls=ToolCallCollector(parallel=True))
        self.num_sent = 0
        self.unsent_warnings = prepared.warnings

    def delta(self, place: int, steps: Sequence[Progress]) -> list[Event]:
        lines: list[Event] = []
        for progress in steps:
            content = text_of(progress.segments, "content")
            reasoning = text_of(progress.segments, "reasoning")
            self.message.take(progress)
            calls = self._calls(self.num_sent)
            self.num_sent += len(calls)
            fields = self.part(content, reasoning, calls)
            if self.request.logprobs and progress.delta.logprobs:
                fields["logprobs"] = self._logprobs(progress.delta.logprobs)
                self.message.logprobs += fields["logprobs"]
            elif not (content or reasoning or calls):
                continue
            fields |= {"done": False} | replies.extras([], False, self.unsent_warnings)
            self.unsent_warnings = []
            lines.append(_head(self.prepared.name) | fields)
        return lines

    def end(self) -> list[Event]:
        fields = self.part("", "", []) | self._ended(self.unsent_warnings)
        return [_head(self.prepared.name) | fields]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

    def body(self) -> Event:
        message = self.message
        fields = self.part(message.content, message.reasoning, self._calls(0))
        if self.request.logprobs:
            fields["logprobs"] = message.logprobs
        return _head(self.prepared.name) | fields | self._ended(self.prepared.warnings)

    def encode(self, event: Event) -> bytes:
        return f"{replies.compact(event)}\n".encode("utf-8", "replace")

    def _calls(self, num_sent: int) -> list[dict[str, Any]]:
        """Return the calls after the first `num_sent`."""
        calls = self.message.calls.calls
        return [
            {
                "id": call["id"],
                "function": {
                    "index": index,
                    "name": call["function"]["name"],
                    "arguments": read_object(call["function"]["arguments"]),
                },
            }
            for index, call in enumerate(calls[num_sent:], num_sent)
        ]

    def _logprobs(self, entries: list[Any]) -> list[dict[str, Any]]:
        return [chat_logprob(entry, self.serving.tokenizer, False) for entry in entries]

    def _ended(self, warnings: list[str]) -> dict[str, Any]:
        """Return the last fields: the reason of the end, counts, durations and warnings."""
        ending_warnings = self.request.own_names(replies.ending_warnings(self.run))
        choice = self.run.choices[0]
        first_ended, last_ended = self.run.decoded
        total = time.monotonic() - self.run.job.started_at
        first_token = total if choice.first_token_seconds is None else choice.first_token_seconds
        return {
            "done": True,
            "done_reason": "length" if choice.output.finish_reason in CUT_SHORT else "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": len(self.run.job.prompt_ids),
            "prompt_eval_duration": _nanoseconds(first_token - (choice.queue_time or 0.0)),
            "eval_count": len(choice.output.token_ids),
            "eval_duration": _nanoseconds(last_ended - first_ended),
        } | replies.extras(self.runs, self.report, [*warnings, *ending_warnings])


def _nanoseconds(seconds: float) -> int:
    """Return a duration, at least 1 because clients divide by it."""
    return max(1, int(seconds * 1e9))
