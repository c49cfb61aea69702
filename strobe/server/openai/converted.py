"""Prompts of requests that are answered as a chat."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request

from strobe.server.generation.prepare import Prepared, prepare, prompt_ids, render_prompt, warnings
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving
from strobe.text.tokenizer import RenderedChat


async def prepare_converted(
    serving: Serving,
    request: ConvertedRequest,
    http: Request,
    *,
    clamp_max_tokens: bool = False,
    raw_prompt: str | None = None,
    whole_calls: bool = True,
) -> Prepared:
    """Prepare the request as a chat, with its own field names in errors and warnings, by the
    options of `prepare`. Raises FieldError, ApiError."""
    try:
        prepared = await prepare(
            serving,
            request.to_chat(),
            http,
            request,
            clamp_max_tokens=clamp_max_tokens,
            raw_prompt=raw_prompt,
            whole_calls=whole_calls,
        )
    except FieldError as error:
        raise request.with_own_names(error) from None
    job = prepared.job
    if job.constraint == "response_format":
        job = replace(job, constraint=request.format_field)
    return replace(prepared, job=job, warnings=request.own_names(prepared.warnings))


async def count_tokens(serving: Serving, request: ConvertedRequest) -> tuple[int, list[str]]:
    """Return the number of the prompt's tokens, and the request's warnings. Raises FieldError."""
    chat = request.to_chat()

    def encode() -> tuple[RenderedChat, list[int]]:
        prompt = render_prompt(serving, chat)
        return prompt, prompt_ids(serving, prompt, chat)

    try:
        prompt, ids = await serving.in_thread(encode)
    except FieldError as error:
        raise request.with_own_names(error) from None
    sentences = [*warnings(serving, request, chat), *prompt.warnings]
    return len(ids), request.own_names(sentences)
