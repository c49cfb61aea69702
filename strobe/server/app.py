"""The application: which path leads where. What holds for every request is in `middleware`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from strobe.server import page
from strobe.server.anthropic.messages import count_tokens, messages
from strobe.server.anthropic.protocol import message_bodies as bodies
from strobe.server.anthropic.protocol.messages_request import CountTokensRequest, MessagesRequest
from strobe.server.middleware import OPEN_PATHS, MiddlewareSettings, wrap
from strobe.server.openai import held_responses, replies
from strobe.server.openai.api_page import api_page
from strobe.server.openai.chat import chat
from strobe.server.openai.completions import completions
from strobe.server.openai.openapi import Post, describe
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.errors import error_body
from strobe.server.openai.protocol.responses_request import ResponsesRequest
from strobe.server.openai.protocol.token_requests import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from strobe.server.openai.responses import responses
from strobe.server.openai.tokens import detokenize, tokenize
from strobe.server.serving import Serving

Handler = Callable[[Serving, Request], Awaitable[Response]]

POSTS: dict[Handler, Post] = {
    chat: Post(
        "/v1/chat/completions",
        "An answer to a conversation.",
        ChatCompletionRequest,
        answers.ChatCompletion,
    ),
    completions: Post(
        "/v1/completions", "The continuation of a text.", CompletionRequest, answers.Completion
    ),
    responses: Post(
        "/v1/responses",
        "An answer in the form of OpenAI's Responses.",
        ResponsesRequest,
        answers.Response,
    ),
    messages: Post(
        "/v1/messages",
        "An answer in the form of Anthropic's Messages.",
        MessagesRequest,
        bodies.Message,
        bodies.MessageErrorResponse,
    ),
    count_tokens: Post(
        "/v1/messages/count_tokens",
        "How many tokens the prompt of a message has.",
        CountTokensRequest,
        bodies.MessageTokens,
        bodies.MessageErrorResponse,
    ),
    tokenize: Post(
        "/tokenize", "Token ids of a text or a conversation.", TokenizeRequest, TokenizeResponse
    ),
    detokenize: Post(
        "/detokenize", "The text of token ids.", DetokenizeRequest, DetokenizeResponse
    ),
}
"""Handlers read the body themselves, so that every mistake in it is one sentence and nothing is
left out in silence."""

READ_ERRORS: dict[str, tuple[str, ...]] = {
    "/health": ("503",),
    "/v1/models": ("401", "503"),
    "/v1/models/{name}": ("401", "404", "503"),
    "/v1/responses/{id}": ("400", "401", "404", "503"),
    "/v1/responses/{id}/input_items": ("400", "401", "404"),
}
"""What a GET or a DELETE may answer instead of what was asked for."""


def make_app(serving: Serving) -> ASGIApp:
    """The whole server but for its socket."""
    app = FastAPI(title="Strobe", version=version("strobe"), docs_url=None, redoc_url=None)
    for handler, post in POSTS.items():
        route = _bound(handler, serving, generates="stream" in post.asked.model_fields)
        app.add_api_route(post.path, route, methods=["POST"], include_in_schema=False)
    _add_reads(app, serving)
    _add_held(app, serving)
    _add_page(app)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_allowed)
    settings = serving.settings
    keyless = OPEN_PATHS if settings.api_key else None
    document = functools.cache(
        lambda: describe(app, POSTS.values(), READ_ERRORS, keyless, lenient=settings.lenient)
    )
    app.openapi = document  # pyright: ignore[reportAttributeAccessIssue]
    return wrap(
        app,
        MiddlewareSettings(
            api_keys=tuple(settings.api_key),
            open_paths=OPEN_PATHS | page.files().keys() | {"/docs", "/openapi.json"},
            max_body_bytes=settings.max_body_bytes,
            cors_origins=tuple(settings.cors_origin),
            access_log=settings.access_log,
        ),
        drain=serving.drain,
        refused=serving.metrics.refused,
    )


def _bound(
    handler: Handler, serving: Serving, *, generates: bool
) -> Callable[[Request], Awaitable[Response]]:
    """The handler behind what comes before it. generates: whether it needs the engine's."""

    async def serve(http: Request) -> Response:
        try:
            await replies.read_body(serving, http)
            if generates:
                serving.check_room(1)  # a full server spends no time on what it will refuse
        except Exception as error:
            return replies.failed(serving, error)
        serving.handling += 1
        try:
            return await handler(serving, http)
        finally:
            serving.handling -= 1

    serve.__name__ = handler.__name__
    return serve


def _add_reads(app: FastAPI, serving: Serving) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 once the server can answer, else 503."""
        if serving.drain.stopping:
            state = "The server is stopping."
        elif serving.client.can_answer:
            return PlainTextResponse("")
        else:
            state = f"The engine {'has ended' if serving.client.dead else 'is still starting'}."
        return JSONResponse(error_body(state, status=503, code="not_ready"), 503)

    @app.get("/version")
    async def show_version() -> answers.Version:  # pyright: ignore[reportUnusedFunction]
        """The version of Strobe."""
        return answers.Version(version=version("strobe"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:  # pyright: ignore[reportUnusedFunction]
        return HTMLResponse(api_page(app.openapi()))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Counters and histograms in Prometheus' format."""
        body, kind = serving.metrics.render(http.headers.get("accept"))
        return Response(body, headers={"Content-Type": kind})

    def card(name: str) -> dict[str, Any]:
        facts = serving.facts
        return {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "strobe",
            "root": serving.root,
            "max_model_len": facts.max_model_len,
        }

    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The names of the served model."""
        try:
            cards = [card(name) for name in serving.names]
            return JSONResponse({"object": "list", "data": cards})
        except Exception as error:
            return replies.failed(serving, error)

    @app.get("/v1/models/{name:path}", response_model=answers.ModelCard)
    async def model(name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """One of the names of the served model."""
        try:
            return JSONResponse(card(serving.name(name)))
        except Exception as error:
            return replies.failed(serving, error)


def _add_held(app: FastAPI, serving: Serving) -> None:
    held = "/v1/responses/{id}"

    @app.get(held, response_model=answers.Response)
    async def retrieve(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A response that the server holds."""
        return await held_responses.retrieve(serving, http)

    @app.delete(held, response_model=answers.DeletedResponse)
    async def delete(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Forget a response."""
        return await held_responses.delete(serving, http)

    listing = {"parameters": held_responses.PARAMETERS}

    @app.get(f"{held}/input_items", response_model=answers.ItemList, openapi_extra=listing)
    async def items(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """What a response was asked, item by item, the responses before it included."""
        return await held_responses.input_items(serving, http)


def _add_page(app: FastAPI) -> None:
    for path, (kind, body) in page.files().items():

        def show(kind: str = kind, body: bytes = body) -> Response:
            return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-cache"})

        app.add_route(path, _static(show), methods=["GET"], include_in_schema=False)


def _static(show: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(http: Request) -> Response:
        return show()

    return serve


async def _not_found(http: Request, error: Exception) -> Response:
    sentence = f"There is nothing at {http.url.path[:200]!r}; GET /docs lists what there is."
    return JSONResponse(error_body(sentence, status=404, code="not_found"), 404)


async def _not_allowed(http: Request, error: Exception) -> Response:
    sentence = (
        f"{http.url.path[:200]!r} does not take {http.method}; GET /docs lists what it takes."
    )
    headers = getattr(error, "headers", None)
    return JSONResponse(error_body(sentence, status=404, code="wrong_method"), 405, headers)
