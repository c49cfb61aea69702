"""The endpoints /api/chat and /api/generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.request import CUT_SHORT, TokenLogprob
from strobe.server.generation import bodies, reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.logprobs import chat_logprob
from strobe.server.generation.prepare import Prepared, prepare, warnings
from strobe.server.generation.reply import Codec, Event
from strobe.server.generation.run import Progress, PromptRun
from strobe.server.ollama.error_body import error_body
from strobe.server.ollama.protocol.bodies import (
    AnswerEnd,
    AnswerMessage,
    Call,
    ChatAnswer,
    GenerateAnswer,
    GenerateText,
    Logprobs,
)
from strobe.server.ollama.protocol.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from strobe.server.openai.chat import (
    AssistantMessage,
    ToolCallCollector,
)
from strobe.server.parsers.call_arguments import read_object
from strobe.server.parsers.segment import text_of
from strobe.server.serving import Serving

MEDIA_TYPE = "application/x-ndjson"


class Part(NamedTuple):
    """A part of an answer, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[Call] = ()


Render = Callable[[str, Part, AnswerEnd], ChatAnswer | GenerateAnswer]
"""Returns a line, or a whole body, from the model's name, a part and the last fields."""


async def ollama_chat(
    serving: Serving, request: OllamaChatRequest, http: Request
) -> OllamaCodec | Response:
    """Answer POST /api/chat."""
    return await _answer(serving, request, http, _chat_answer)


async def ollama_generate(
    serving: Serving, request: OllamaGenerateRequest, http: Request
) -> OllamaCodec | Response:
    """Answer POST /api/generate."""
    return await _answer(serving, request, http, _generate_answer)


def _chat_answer(model: str, part: Part, end: AnswerEnd) -> ChatAnswer:
    message: AnswerMessage = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = list(part.calls)
    return {"model": model, "created_at": _now(), "message": message, **end}


def _generate_answer(model: str, part: Part, end: AnswerEnd) -> GenerateAnswer:
    text: GenerateText = {"response": part.content}
    if part.thinking:
        text["thinking"] = part.thinking
    return {"model": model, "created_at": _now(), **text, **end}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def _answer(
    serving: Serving, request: OllamaRequest, http: Request, render: Render
) -> OllamaCodec | Response:
    name = request.model or serving.name(None)
    if request.is_load:
        serving.name(request.model)
        sentences = [*warnings(serving, request), *_context_warning(serving, request)]
        end: AnswerEnd = {
            "done": True,
            "done_reason": "load",
            **reply.extras([], False, sentences),
        }
        return JSONResponse(render(name, Part(), end))
    prepared = await _prepare(serving, request, http)
    return OllamaCodec(
        serving,
        request=request,
        prepared=replace(prepared, name=name),
        run=PromptRun(serving, prepared.job),
        render=render,
        report=reply.wants_report(http, request),
    )


async def _prepare(serving: Serving, request: OllamaRequest, http: Request) -> Prepared:
    prepared = await prepare(serving, request, http)
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


class OllamaCodec(Codec):
    """An answer of /api/chat or /api/generate, whole or streamed as lines."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        serving: Serving,
        request: OllamaRequest,
        prepared: Prepared,
        run: PromptRun,
        render: Render,
        report: bool,
    ):
        super().__init__([run], prepared.deadline)
        self.serving = serving
        self.request = request
        self.prepared = prepared
        self.run = run
        self.render = render
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
            logprobs: Logprobs = {}
            if self.request.logprobs and progress.delta.logprobs:
                entries = self._logprobs(progress.delta.logprobs)
                self.message.logprobs += entries
                logprobs["logprobs"] = entries
            elif not (content or reasoning or calls):
                continue
            part = Part(content, reasoning, calls)
            unsent = reply.extras([], False, self.unsent_warnings)
            self.unsent_warnings = []
            end: AnswerEnd = {**logprobs, "done": False, **unsent}
            lines.append(self.render(self.prepared.name, part, end))
        return lines

    def end(self) -> list[Event]:
        return [self.render(self.prepared.name, Part(), self._ended(self.unsent_warnings))]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

    def body(self) -> Event:
        message = self.message
        part = Part(message.content, message.reasoning, self._calls(0))
        logprobs: Logprobs = {"logprobs": message.logprobs} if self.request.logprobs else {}
        end: AnswerEnd = {**logprobs, **self._ended(self.prepared.warnings)}
        return self.render(self.prepared.name, part, end)

    def encode(self, event: Event) -> bytes:
        return f"{reply.compact(event)}\n".encode("utf-8", "replace")

    def _calls(self, num_sent: int) -> list[Call]:
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

    def _logprobs(self, entries: list[TokenLogprob]) -> list[bodies.TokenLogprob]:
        return [chat_logprob(entry, self.serving.tokenizer, False) for entry in entries]

    def _ended(self, warnings: list[str]) -> AnswerEnd:
        """Return the last fields: the reason of the end, counts, durations and warnings."""
        ending_warnings = reply.ending_warnings(self.run)
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
            **reply.extras(self.runs, self.report, [*warnings, *ending_warnings]),
        }


def _nanoseconds(seconds: float) -> int:
    """Return a duration, at least 1 because clients divide by it."""
    return max(1, int(seconds * 1e9))
