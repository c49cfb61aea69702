"""The endpoint /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request

from strobe.request import TokenLogprob
from strobe.sampling_params import Speculation
from strobe.server.generation import bodies
from strobe.server.openai import replies
from strobe.server.openai.chunks import ChunkCodec, last_fields, reports_usage
from strobe.server.openai.constraints import schema_warnings, structured_outputs
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.conversation import Conversation
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.openai.protocol.request_errors import FieldError, counted
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
from strobe.server.openai.replies import Event
from strobe.server.openai.runs import (
    ChoiceState,
    GenerationJob,
    Progress,
    PromptRun,
    usage,
)
from strobe.server.openai.step_report import step_of
from strobe.server.parsers import Parser, Segment, Tool, make_parser, text_of
from strobe.server.parsers.call_arguments import read_object
from strobe.server.serving import Formats, Serving
from strobe.text.tokenizer import RenderedChat, Tokenizer


@dataclass(frozen=True)
class Prepared:
    """A chat that is ready for the engine."""

    job: GenerationJob
    name: str
    warnings: list[str]
    deadline: replies.Deadline


async def chat(serving: Serving, request: ChatCompletionRequest, http: Request) -> ChatCodec:
    """Answer POST /v1/chat/completions."""
    prepared = await prepare(serving, request, http, whole_calls=not request.stream)
    return ChatCodec(
        serving,
        request=request,
        prepared=prepared,
        run=PromptRun(serving, prepared.job),
        report=replies.wants_report(http, request),
    )


async def prepare(
    serving: Serving,
    request: ChatCompletionRequest,
    http: Request,
    original: ConvertedRequest | None = None,
    *,
    clamp_max_tokens: bool = False,
    raw_prompt: str | None = None,
    whole_calls: bool = True,
) -> Prepared:
    """Return the prompt as token ids, with sampling parameters and parsers.

    original: the other endpoint's request that `request` was converted from. clamp_max_tokens:
    lower max_tokens to what fits the context, with a warning. raw_prompt: the whole prompt, to
    which the chat template is not applied. whole_calls: parse each call at its end only. Raises
    FieldError, ApiError.
    """
    name = serving.name(request.model)
    deadline = replies.Deadline(serving, request.timeout)
    async with deadline():
        prompt, ids = await serving.in_thread(partial(_encode, serving, request, raw_prompt))
    fitted = _fit(serving, request, ids, clamp=clamp_max_tokens)
    arguments = request.sampling(serving.sampling_defaults)
    arguments |= fitted.lowered
    toolbox = request.toolbox
    tools = [_tool(tool) for tool in toolbox.tools]
    structured = structured_outputs(
        serving, request, tools=tools, prompt=prompt.text, arguments=arguments
    )
    arguments["structured_outputs"] = structured
    if _keeps_special_tokens(serving, request):
        arguments["skip_special_tokens"] = False
    sentences = [
        *warnings(serving, original or request, request),
        *prompt.warnings,
        *fitted.warnings,
        *schema_warnings(structured, request, tools),
    ]
    forced = toolbox.choice.forced
    job = GenerationJob(
        prompt_ids=fitted.ids,
        params=serving.params(arguments),
        request_id=request.request_id or http.scope["state"]["request_id"],
        parser=_parser(serving.formats, tools, prompt.text, forced=forced, whole_calls=whole_calls),
        constraint="tools" if forced else request.constraint,
        started_at=http.scope["state"]["arrived_at"],
        scheduling=request.scheduling,
    )
    return Prepared(job=job, name=name, warnings=sentences, deadline=deadline)


def _encode(
    serving: Serving, request: ChatCompletionRequest, raw_prompt: str | None
) -> tuple[RenderedChat, list[int]]:
    """Return the prompt and its token ids. Raises FieldError."""
    if raw_prompt is None:
        chat = render_prompt(serving, request)
    else:
        chat = RenderedChat(text=raw_prompt, marked=raw_prompt, spelled={})
    serving.check_length(chat.text, "messages", request.truncate_prompt_tokens)
    return chat, prompt_ids(serving, chat, request)


class _FittedPrompt(NamedTuple):
    """A prompt that fits the context with its answer. lowered: max_tokens if it was too large."""

    ids: list[int]
    lowered: dict[str, int]
    warnings: list[str]


def _fit(
    serving: Serving, request: ChatCompletionRequest, ids: list[int], *, clamp: bool
) -> _FittedPrompt:
    """Fit a prompt to the context. clamp: lower max_tokens to what is left. Raises FieldError."""
    keep = request.truncate_prompt_tokens
    limit, max_tokens = request.limit()
    max_model_len = serving.facts.max_model_len
    room = max_model_len - len(ids)
    if not clamp or max_tokens is None or not 0 < room < max_tokens:
        ids = serving.fit(ids, request.needed(), keep, "messages")
        return _FittedPrompt(ids=ids, lowered={}, warnings=[])
    ids = serving.fit(ids, (limit, room), keep, "messages")
    warning = (
        f"{limit} is {max_tokens}, but the answer has at most {counted(room, 'token')}: the "
        f"context holds {max_model_len} and the prompt has {len(ids)}."
    )
    return _FittedPrompt(ids=ids, lowered={"max_tokens": room}, warnings=[warning])


def _keeps_special_tokens(serving: Serving, request: ChatCompletionRequest) -> bool:
    """Whether a format that is parsed consists of special tokens."""
    forms = serving.formats
    formats = [forms.reasoning, forms.tools if request.toolbox.tools else None]
    return any(form is not None and form.keep_special for form in formats)


def render_prompt(serving: Serving, request: Conversation) -> RenderedChat:
    """Render a conversation with the chat template. Raises FieldError."""
    options = serving.settings.template_variables | request.template_options()
    options["chat_template"] = serving.template(request.chat_template)
    try:
        return serving.tokenizer.render(request.conversation, **options)
    except ValueError as error:
        raise FieldError(str(error), "messages") from None


def prompt_ids(serving: Serving, chat: RenderedChat, request: Conversation) -> list[int]:
    """Encode a rendered prompt. Raises FieldError."""
    add_special_tokens = request.add_special_tokens
    try:
        return serving.tokenizer.encode_chat(chat, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise FieldError(str(error), "messages") from None


def warnings(
    serving: Serving,
    request: ChatCompletionRequest | ConvertedRequest,
    chat: ChatCompletionRequest,
) -> list[str]:
    """One sentence for each field without effect. chat: the same request as a chat."""
    sentences = request.warnings(None if chat.chat_template is not None else serving.template_reads)
    if chat.thinking_budget is not None and serving.formats.reasoning is None:
        sentences.append(
            "thinking_token_budget has no effect: this model has no known format of reasoning."
        )
    asked = Speculation.of(chat.speculation)
    drafts = asked.method not in (None, "none") or asked.num_drafts or asked.always
    if serving.client.config.shadow and drafts:
        sentences.append("speculation has no effect: this server runs in shadow mode.")
    if chat.toolbox.tools and serving.formats.tools is None:
        sentences.append(
            "tools are shown to the model, but its form of calls is not known: they are text."
        )
    return sentences


def _parser(
    forms: Formats, tools: list[Tool], prompt: str, *, forced: bool, whole_calls: bool
) -> Callable[[], Parser]:
    opened = forms.reasoning is not None and forms.reasoning.opened_by(prompt)
    return lambda: make_parser(
        forms.tools.name if forms.tools is not None else None,
        forms.reasoning.name if forms.reasoning is not None else None,
        tools=tools or None,
        thinking_open=opened,
        forced=forced,
        whole_calls=whole_calls,
    )


def _tool(tool: dict[str, Any]) -> Tool:
    function = tool["function"]
    return Tool(function["name"], function.get("parameters"), bool(function.get("strict")))


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
                calls=ToolCallCollector(parallel=request.allows_several_calls),
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
            body["prompt_logprobs"] = replies.prompt_logprobs(self.run.prompt_logprobs, tokenizer)
        if request.return_token_ids:
            body["prompt_token_ids"] = self.prepared.job.prompt_ids
        return {**body, **replies.extras(self.runs, self.report, self.prepared.warnings)}

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


def chat_logprob(entry: TokenLogprob, tokenizer: Tokenizer, as_ids: bool) -> bodies.TokenLogprob:
    """Convert a token's log probability to OpenAI's chat format."""

    def convert(token: int, value: float) -> bodies.TopLogprob:
        text = f"token_id:{token}" if as_ids else tokenizer.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(tokenizer.token_bytes(token))}

    top = [convert(token, value) for token, value in entry.top]
    return {**convert(entry.token, entry.logprob), "top_logprobs": top}
