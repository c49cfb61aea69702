"""/tokenize and /detokenize."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.server.generation import reply
from strobe.server.generation.prepare import render_prompt
from strobe.server.openai.protocol.response_bodies import DetokenizeResponse, TokenizeResponse
from strobe.server.openai.protocol.token_requests import DetokenizeRequest, TokenizeRequest
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving


async def tokenize(serving: Serving, request: TokenizeRequest, http: Request) -> Response:
    """Answer POST /tokenize."""
    serving.name(request.model)
    max_length = serving.facts.max_model_len

    def encode() -> bytes:
        tokenizer = serving.tokenizer
        add_special_tokens = request.adds_special_tokens
        warnings = request.warnings()
        try:
            if request.prompt is None:
                chat = render_prompt(serving, request.generation)
                warnings += chat.warnings
                ids = tokenizer.encode_chat(chat, add_special_tokens=add_special_tokens)
            else:
                ids = tokenizer.encode(request.prompt, add_special_tokens=add_special_tokens)
        except FieldError:
            raise
        except ValueError as error:
            field = "prompt" if request.messages is None else "messages"
            raise FieldError(str(error), field) from None
        body: TokenizeResponse = {"count": len(ids), "max_model_len": max_length, "tokens": ids}
        if request.return_token_strs:
            body["token_strs"] = [tokenizer.fast.id_to_token(token) or "" for token in ids]
        if warnings:
            body["warnings"] = warnings
        return reply.compact(body).encode("utf-8", "replace")

    return Response(await serving.in_thread(encode), media_type="application/json")


async def detokenize(serving: Serving, request: DetokenizeRequest, http: Request) -> Response:
    """Answer POST /detokenize."""
    serving.name(request.model)
    size = serving.facts.vocab_size
    invalid = next((token for token in request.tokens if token >= size), None)
    if invalid is not None:
        raise FieldError(
            f"tokens holds {invalid}, but the vocabulary has ids 0 to {size - 1}.", "tokens"
        )
    ids = list(request.tokens)
    text = await serving.in_thread(lambda: serving.tokenizer.decode(ids, skip_special_tokens=False))
    body: DetokenizeResponse = {"prompt": text}
    if warnings := request.warnings():
        body["warnings"] = warnings
    return JSONResponse(body)
