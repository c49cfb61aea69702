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
from strobe.server.generation.request import ConversationRequest, GenerationRequest, Sampling
from strobe.server.generation.run import (
    GenerationJob,
)
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser
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
    serving: Serving, request: ConversationRequest, http: Request, *, whole_calls: bool = True
) -> Prepared:
    """Return the prompt as token ids, with sampling parameters and parsers. whole_calls: parse each
    call at its end only. Raises FieldError, ApiError."""
    generation = request.generation
    sampling = generation.sampling
    name = serving.name(generation.model)
    deadline = reply.Deadline(serving, generation.timeout)
    async with deadline():
        prompt, ids = await serving.in_thread(partial(_encode, serving, generation))
    fitted = _fit(serving, generation, ids)
    arguments = sampling.arguments(serving.sampling_defaults)
    arguments |= fitted.lowered
    toolbox = generation.toolbox
    tools = [_tool(tool) for tool in toolbox.tools]
    structured = structured_outputs(serving, generation, tools=tools, prompt=prompt.text)
    arguments["structured_outputs"] = structured
    if _keeps_special_tokens(serving, generation):
        arguments["skip_special_tokens"] = False
    sentences = [
        *warnings(serving, request),
        *prompt.warnings,
        *fitted.warnings,
        *schema_warnings(structured, generation, tools),
    ]
    forced = toolbox.choice.forced
    job = GenerationJob(
        prompt_ids=fitted.ids,
        params=serving.params(arguments, sampling.names),
        request_id=generation.request_id or http.scope["state"]["request_id"],
        parser=_parser(serving.formats, tools, prompt.text, forced=forced, whole_calls=whole_calls),
        names=generation.engine_names,
        started_at=http.scope["state"]["arrived_at"],
        scheduling=sampling.scheduling,
    )
    return Prepared(job=job, name=name, warnings=sentences, deadline=deadline)


async def count_prompt_tokens(
    serving: Serving, request: ConversationRequest
) -> tuple[int, list[str]]:
    """Return the number of the prompt's tokens, and the request's warnings. Raises FieldError."""

    def encode() -> tuple[RenderedChat, list[int]]:
        prompt = render_prompt(serving, request.generation)
        return prompt, prompt_ids(serving, prompt, request.generation)

    prompt, ids = await serving.in_thread(encode)
    return len(ids), [*warnings(serving, request), *prompt.warnings]


def _encode(serving: Serving, request: GenerationRequest) -> tuple[RenderedChat, list[int]]:
    """Return the prompt and its token ids. Raises FieldError."""
    raw_prompt = request.raw_prompt
    if raw_prompt is None:
        chat = render_prompt(serving, request)
    else:
        chat = RenderedChat(text=raw_prompt, marked=raw_prompt, spelled={})
    field = request.names["messages"]
    serving.check_length(chat.text, field, request.truncate_prompt_tokens)
    return chat, prompt_ids(serving, chat, request)


class _FittedPrompt(NamedTuple):
    """A prompt that fits the context with its answer. lowered: max_tokens if it was too large."""

    ids: list[int]
    lowered: dict[str, int]
    warnings: list[str]


def _fit(serving: Serving, request: GenerationRequest, ids: list[int]) -> _FittedPrompt:
    """Fit a prompt and its answer to the context. Raises FieldError."""
    keep = request.truncate_prompt_tokens
    sampling = request.sampling
    field = request.names["messages"]
    limit = request.names["max_tokens"]
    max_tokens = sampling.max_tokens
    max_model_len = serving.facts.max_model_len
    room = max_model_len - len(ids)
    if not request.clamp_max_tokens or max_tokens is None or not 0 < room < max_tokens:
        ids = serving.fit(ids, sampling.needed, keep, field)
        return _FittedPrompt(ids=ids, lowered={}, warnings=[])
    ids = serving.fit(ids, (limit, room), keep, field)
    warning = (
        f"{limit} is {max_tokens}, but the answer has at most {counted(room, 'token')}: the "
        f"context holds {max_model_len} and the prompt has {len(ids)}."
    )
    return _FittedPrompt(ids=ids, lowered={"max_tokens": room}, warnings=[warning])


def _keeps_special_tokens(serving: Serving, request: GenerationRequest) -> bool:
    """Whether a format that is parsed consists of special tokens."""
    forms = serving.formats
    formats = [forms.reasoning, forms.tools if request.toolbox.tools else None]
    return any(form is not None and form.keep_special for form in formats)


def render_prompt(serving: Serving, request: GenerationRequest) -> RenderedChat:
    """Render a conversation with the chat template. Raises FieldError."""
    options = serving.settings.template_variables | request.template_options()
    options["chat_template"] = serving.template(request.template.source)
    try:
        return serving.tokenizer.render(request.messages, **options)
    except ValueError as error:
        raise FieldError(str(error), request.names["messages"]) from None


def prompt_ids(serving: Serving, chat: RenderedChat, request: GenerationRequest) -> list[int]:
    """Encode a rendered prompt. Raises FieldError."""
    add_special_tokens = request.template.add_special_tokens
    try:
        return serving.tokenizer.encode_chat(chat, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise FieldError(str(error), request.names["messages"]) from None


def warnings(serving: Serving, request: ConversationRequest) -> list[str]:
    """One sentence for each field without effect."""
    generation = request.generation
    sampling = generation.sampling
    has_own_template = generation.template.source is not None
    sentences = request.warnings(None if has_own_template else serving.template_reads)
    if sampling.thinking_budget is not None and serving.formats.reasoning is None:
        budget = sampling.names["thinking_token_budget"]
        sentences.append(f"{budget} has no effect: this model has no known format of reasoning.")
    sentences += shadow_warnings(serving, sampling)
    if generation.toolbox.tools and serving.formats.tools is None:
        sentences.append(
            "tools are shown to the model, but its form of calls is not known: they are text."
        )
    return sentences


def shadow_warnings(serving: Serving, sampling: Sampling) -> list[str]:
    """One sentence if a request asks for drafts that shadow mode does not verify."""
    speculation = Speculation.of(sampling.options.get("speculation"))
    has_method = speculation.method not in (None, "none")
    drafts = has_method or speculation.num_drafts or speculation.always
    if not (serving.client.config.shadow and drafts):
        return []
    name = sampling.names["speculation"]
    return [f"{name} has no effect: this server runs in shadow mode."]


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
