"""The endpoint /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request

from strobe.request import TokenLogprob
from strobe.server.generation import bodies
from strobe.server.generation.logprobs import chat_logprob, prompt_logprobs
from strobe.server.generation.prepare import Prepared, prepare, reply
from strobe.server.generation.reply import Event
from strobe.server.generation.run import (
    ChoiceState,
    Progress,
    PromptRun,
    usage,
)
from strobe.server.openai.chunks import ChunkCodec, last_fields, reports_usage
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.response_bodies import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChunkHead,
    FinishReason,
    FirstChunk,
    FunctionCall,
    Origin,
    ToolCall,
    ToolCallDelta,
)
from strobe.server.openai.step_report import step_of
from strobe.server.parsers.call_arguments import read_object
from strobe.server.parsers.segment import Segment, text_of
from strobe.server.serving import Serving


async def chat(serving: Serving, request: ChatCompletionRequest, http: Request) -> ChatCodec:
    """Answer POST /v1/chat/completions."""
    prepared = await prepare(serving, request, http, whole_calls=not request.stream)
    return ChatCodec(
        serving,
        request=request,
        prepared=prepared,
        run=PromptRun(serving, prepared.job),
        report=reply.wants_report(http, request),
    )


class ToolCallCollector:
    """Collects the tool calls of one answer and gives each an id."""

    def __init__(self, *, parallel: bool):
        self.parallel = parallel
        self.calls: list[ToolCall] = []

    @property
    def is_complete(self) -> bool:
        """Whether there are calls and the last one is complete, not cut by a stop string."""
        return bool(self.calls) and read_object(self.calls[-1]["function"]["arguments"]) is not None

    def take(self, segments: list[Segment]) -> list[ToolCallDelta]:
        """Add the calls' segments and return them in OpenAI's format; without `parallel`, only the
        first call's."""
        sent: list[ToolCallDelta] = []
        for segment in segments:
            if segment.kind != "call" or (segment.call and not self.parallel):
                continue
            if segment.name is not None:
                function: FunctionCall = {"name": segment.name, "arguments": segment.text}
                name = f"call_{secrets.token_hex(12)}"
                self.calls.append({"id": name, "type": "function", "function": function})
                sent.append(
                    {
                        "index": segment.call,
                        "id": name,
                        "type": "function",
                        "function": {**function},
                    }
                )
            else:
                self.calls[segment.call]["function"]["arguments"] += segment.text
                sent.append({"index": segment.call, "function": {"arguments": segment.text}})
        return sent


@dataclass
class AssistantMessage:
    """One answer in the format of OpenAI's message."""

    calls: ToolCallCollector
    shows_reasoning: bool = True
    content: str = ""
    reasoning: str = ""
    begun: bool = False
    logprobs: list[bodies.TokenLogprob] = field(default_factory=list[bodies.TokenLogprob])

    def take(self, progress: Progress) -> ChatDelta:
        """Add a step's progress. Returns its delta."""
        content = text_of(progress.segments, "content")
        reasoning = text_of(progress.segments, "reasoning")
        self.content += content
        self.reasoning += reasoning
        delta: ChatDelta = {}
        if not self.begun:
            self.begun = True
            delta["role"] = "assistant"
            delta["content"] = ""
        if reasoning and self.shows_reasoning:
            delta["reasoning_content"] = reasoning
            delta["reasoning"] = reasoning
        if content:
            delta["content"] = content
        calls = self.calls.take(progress.segments)
        if calls:
            delta["tool_calls"] = calls
        return delta

    def finish_reason(self, choice: ChoiceState) -> FinishReason | None:
        reason = choice.output.finish_reason
        return "tool_calls" if reason == "stop" and self.calls.is_complete else reason

    def as_dict(self) -> ChatMessage:
        message: ChatMessage = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls.calls:
            message["content"] = self.content or None
            message["tool_calls"] = self.calls.calls
        if self.reasoning and self.shows_reasoning:
            message["reasoning_content"] = self.reasoning
            message["reasoning"] = self.reasoning
        return message


class ChatCodec(ChunkCodec):
    """A chat completion, whole or streamed."""

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        prepared: Prepared,
        run: PromptRun,
        report: bool,
    ):
        super().__init__([run], prepared.deadline)
        self.serving = serving
        self.request = request
        self.prepared = prepared
        self.run = run
        self.report = report
        self.id = f"chatcmpl-{prepared.job.request_id}"
        self.origin: Origin = {
            "created": int(time.time()),
            "model": prepared.name,
            "system_fingerprint": serving.fingerprint,
        }
        self.head: ChunkHead = {
            "id": self.id,
            "object": "chat.completion.chunk",
            **self.origin,
        }
        self.first: FirstChunk = self._first()
        self.messages = [
            AssistantMessage(
                calls=ToolCallCollector(parallel=request.generation.allows_several_calls),
                shows_reasoning=request.include_reasoning,
            )
            for _ in run.choices
        ]

    def _first(self) -> FirstChunk:
        """Return the fields of the first chunk alone."""
        first: FirstChunk = {}
        if self.request.return_token_ids:
            first["prompt_token_ids"] = self.prepared.job.prompt_ids
        if self.prepared.warnings:
            first["warnings"] = self.prepared.warnings
        return first

    def delta(self, place: int, steps: Sequence[Progress]) -> list[Event]:
        options = self.request.stream_options
        chunks: list[Event] = []
        for progress in steps:
            entry = self._chunk(progress)
            if entry is None:
                continue
            chunk: ChatCompletionChunk = {**self.head, **self.first, "choices": [entry]}
            self.first = {}
            if options is not None and options.include_usage:
                chunk["usage"] = usage(self.runs) if options.continuous_usage_stats else None
            chunks.append(chunk)
        return chunks

    def end(self) -> list[Event]:
        if not reports_usage(self.report, self.request.stream_options):
            return []
        last: ChatCompletionChunk = {**self.head, **last_fields(self.runs)}
        return [last]

    def body(self) -> ChatCompletion:
        tokenizer = self.serving.tokenizer
        request = self.request
        choices: list[ChatChoice] = []
        for choice, message in zip(self.run.choices, self.messages, strict=True):
            entry: ChatChoice = {
                "index": choice.index,
                "message": message.as_dict(),
                "logprobs": None,
                "finish_reason": message.finish_reason(choice) or "abort",
                "stop_reason": choice.output.stop_reason,
            }
            if request.logprobs:
                entry["logprobs"] = {"content": message.logprobs}
            if request.return_token_ids:
                entry["token_ids"] = choice.output.token_ids
            choices.append(entry)
        body: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            **self.origin,
            "choices": choices,
            "usage": usage(self.runs),
        }
        if self.run.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.run.prompt_logprobs, tokenizer)
        if request.return_token_ids:
            body["prompt_token_ids"] = self.prepared.job.prompt_ids
        return {**body, **reply.extras(self.runs, self.report, self.prepared.warnings)}

    def _chunk(self, progress: Progress) -> ChatChunkChoice | None:
        """Return a chunk's choice, None if there is nothing to send."""
        request = self.request
        choice = progress.choice
        message = self.messages[choice.index]
        begun = message.begun
        delta = message.take(progress)
        if not begun and request.echo_text:
            delta["content"] = request.echo_text + delta.get("content", "")
            message.content = request.echo_text + message.content
        entry: ChatChunkChoice = {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": message.finish_reason(choice) if progress.finished else None,
        }
        if progress.finished:
            entry["stop_reason"] = choice.output.stop_reason
        if request.logprobs and progress.delta.logprobs:
            logprobs = self._logprobs(progress.delta.logprobs)
            message.logprobs += logprobs
            entry["logprobs"] = {"content": logprobs}
        if request.return_token_ids:
            entry["token_ids"] = progress.delta.token_ids
        if self.report:
            entry["step"] = step_of(progress.delta, self.serving.tokenizer)
        filled = delta or progress.finished or entry["logprobs"] or len(entry) > 4
        return entry if filled else None

    def _logprobs(self, entries: list[TokenLogprob]) -> list[bodies.TokenLogprob]:
        as_ids = self.request.return_tokens_as_token_ids
        return [chat_logprob(entry, self.serving.tokenizer, as_ids) for entry in entries]
