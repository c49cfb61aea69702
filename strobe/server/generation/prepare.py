"""Preparation of a chat: from messages and options to a job for the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request

from strobe.sampling_params import Speculation
from strobe.server.generation import reply
from strobe.server.generation.constraints import schema_warnings, structured_outputs
from strobe.server.generation.run import (
    GenerationJob,
)
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.conversation import Conversation
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.parsers import Parser, Tool, make_parser
from strobe.server.schema.field_errors import FieldError, counted
from strobe.server.serving import Formats, Serving
from strobe.text.tokenizer import RenderedChat


@dataclass(frozen=True)
class Prepared:
    """A chat that is ready for the engine."""

    job: GenerationJob
    name: str
    warnings: list[str]
    deadline: reply.Deadline


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
    deadline = reply.Deadline(serving, request.timeout)
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
    sentences += shadow_warnings(serving, chat.speculation)
    if chat.toolbox.tools and serving.formats.tools is None:
        sentences.append(
            "tools are shown to the model, but its form of calls is not known: they are text."
        )
    return sentences


def shadow_warnings(serving: Serving, speculation: object) -> list[str]:
    """One sentence if a request asks for drafts that shadow mode does not verify."""
    asked = Speculation.of(speculation)
    drafts = asked.method not in (None, "none") or asked.num_drafts or asked.always
    if not (serving.client.config.shadow and drafts):
        return []
    return ["speculation has no effect: this server runs in shadow mode."]


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
