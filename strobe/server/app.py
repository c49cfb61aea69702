"""The application's routes. What applies to every request is in `middleware`."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from strobe import __version__
from strobe.server import page
from strobe.server.anthropic.messages import count_tokens, messages
from strobe.server.anthropic.protocol import message_bodies as bodies
from strobe.server.anthropic.protocol.messages_request import CountTokensRequest, MessagesRequest
from strobe.server.batches.batch_runner import BatchRunner
from strobe.server.batches.batch_store import BatchStore
from strobe.server.batches.endpoints import CREATES, add_batch_endpoints
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.reply import Codec
from strobe.server.http.access_log import RequestId
from strobe.server.http.bodiless_endpoints import (
    READ_ERRORS,
    UNSERVED,
    add_bodiless_endpoints,
    add_response_endpoints,
)
from strobe.server.http.error_responses import error_response
from strobe.server.http.guards import ApiKeyEntry, read_keys, route
from strobe.server.http.middleware import OPEN_PATHS, MiddlewareSettings, wrap
from strobe.server.http.openapi import Post, describe
from strobe.server.http.root_path import RootPath
from strobe.server.ollama.generate import MEDIA_TYPE, ollama_chat, ollama_generate
from strobe.server.ollama.models import add_ollama_endpoints, ollama_show, refusal
from strobe.server.ollama.protocol import bodies as ollama_bodies
from strobe.server.ollama.protocol.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from strobe.server.openai.chat import chat
from strobe.server.openai.completions import completions
from strobe.server.openai.infill import infill
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.openai.protocol.responses_request import InputTokensRequest, ResponsesRequest
from strobe.server.openai.protocol.token_requests import (
    DetokenizeRequest,
    TokenizeRequest,
)
from strobe.server.openai.responses import input_tokens, responses
from strobe.server.openai.tokens import detokenize, tokenize
from strobe.server.page.events import add_event_stream
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import Serving
from strobe.server.telemetry.traces import Traces

Handler = Callable[[Serving, Any, Request], Awaitable[Codec | Response]]
"""Answers a request, which is one of the endpoint's request model."""

POSTS: dict[Handler, Post] = {
    chat: Post(
        path="/v1/chat/completions",
        summary="An answer to a conversation.",
        request_model=ChatCompletionRequest,
        response_model=answers.ChatCompletion,
    ),
    completions: Post(
        path="/v1/completions",
        summary="The continuation of a prompt.",
        request_model=CompletionRequest,
        response_model=answers.Completion,
    ),
    infill: Post(
        path="/infill",
        summary="The text between a prefix and a suffix, in llama.cpp's form.",
        request_model=InfillRequest,
        response_model=answers.Infill,
    ),
    responses: Post(
        path="/v1/responses",
        summary="An answer in the form of OpenAI's Responses.",
        request_model=ResponsesRequest,
        response_model=answers.Response,
    ),
    input_tokens: Post(
        path="/v1/responses/input_tokens",
        summary="How many tokens the prompt of a response has.",
        request_model=InputTokensRequest,
        response_model=answers.InputTokens,
    ),
    messages: Post(
        path="/v1/messages",
        summary="An answer in the form of Anthropic's Messages.",
        request_model=MessagesRequest,
        response_model=bodies.Message,
        error_model=bodies.MessageErrorResponse,
    ),
    count_tokens: Post(
        path="/v1/messages/count_tokens",
        summary="How many tokens the prompt of a message has.",
        request_model=CountTokensRequest,
        response_model=bodies.MessageTokens,
        error_model=bodies.MessageErrorResponse,
    ),
    ollama_chat: Post(
        path="/api/chat",
        summary="An answer to a conversation, in Ollama's form.",
        request_model=OllamaChatRequest,
        response_model=ollama_bodies.ChatAnswer,
        error_model=ollama_bodies.OllamaError,
        stream_type=MEDIA_TYPE,
    ),
    ollama_generate: Post(
        path="/api/generate",
        summary="An answer to a prompt, in Ollama's form.",
        request_model=OllamaGenerateRequest,
        response_model=ollama_bodies.GenerateAnswer,
        error_model=ollama_bodies.OllamaError,
        stream_type=MEDIA_TYPE,
    ),
    ollama_show: Post(
        path="/api/show",
        summary="The served model, in Ollama's form.",
        request_model=ShowRequest,
        response_model=ollama_bodies.ShowResponse,
        error_model=ollama_bodies.OllamaError,
    ),
    tokenize: Post(
        path="/tokenize",
        summary="Token ids of a text or a conversation.",
        request_model=TokenizeRequest,
        response_model=answers.TokenizeResponse,
    ),
    detokenize: Post(
        path="/detokenize",
        summary="The text of token ids.",
        request_model=DetokenizeRequest,
        response_model=answers.DetokenizeResponse,
    ),
}
"""The POST endpoints. Bodies are read by their models and not by FastAPI, so that every error is
one sentence and no field is silently ignored."""


def make_app(serving: Serving) -> ASGIApp:
    """Return the ASGI application with all routes and middleware."""
    app = FastAPI(title="Strobe", version=__version__, docs_url=None, redoc_url=None)
    for handler, post in POSTS.items():
        route = _bound(handler, serving, post)
        app.add_api_route(post.path, route, methods=["POST"], include_in_schema=False)
    add_bodiless_endpoints(app, serving)
    add_response_endpoints(app, serving)
    add_ollama_endpoints(app, serving)
    runner: BatchRunner | None = None
    if (directory := serving.settings.batch_dir) is not None:
        runner = BatchRunner(serving, BatchStore(Path(directory)), RequestId(app))
        serving.background.append(runner)
    add_batch_endpoints(app, serving, runner)
    add_event_stream(app, serving)
    _add_page(app, serving.settings.root_path)
    app.add_exception_handler(404, _not_found)
    app.add_exception_handler(405, _not_allowed)
    settings = serving.settings
    guards = middleware_settings(settings)
    keyless = OPEN_PATHS if guards.api_keys else None
    posts = [*POSTS.values(), *([] if runner is None else CREATES.values())]
    document = functools.cache(
        lambda: describe(app, posts, READ_ERRORS, keyless, lenient=settings.lenient)
    )
    app.openapi = document  # pyright: ignore[reportAttributeAccessIssue]
    serving.metrics.paths = frozenset([post.path for post in POSTS.values()])
    endpoint = settings.otlp_traces_endpoint
    traces = None if endpoint is None else Traces(endpoint)
    wrapped = wrap(
        app,
        guards,
        shutdown=serving.shutdown,
        on_reject=serving.metrics.record_rejected,
        on_response=serving.metrics.record_http,
        traces=traces,
    )
    root_path = settings.root_path
    if not root_path or any(path.startswith(f"{root_path}/") for path in _paths(app)):
        return wrapped
    return RootPath(wrapped, root_path)


def _paths(app: FastAPI) -> list[str]:
    """Return the paths that the application serves, except paths with parameters."""
    paths = [getattr(route, "path", "") for route in app.routes]
    return [path for path in paths if path and "{" not in path]


def middleware_settings(settings: ServerConfig) -> MiddlewareSettings:
    """Return the middleware's part of the settings. Raises ValueError if it cannot be used."""
    keys = tuple([ApiKeyEntry(secret) for secret in settings.api_key])
    if settings.api_key_file is not None:
        keys += read_keys(Path(settings.api_key_file))
    return MiddlewareSettings(
        listens_on=settings.host,
        allowed_hosts=tuple(settings.allowed_hosts),
        api_keys=keys,
        open_paths=OPEN_PATHS | page.files().keys() | {"/docs", "/openapi.json"},
        max_body_bytes=settings.max_body_bytes,
        cors_origins=tuple(settings.cors_origin),
        access_log=settings.access_log,
    )


def _bound(
    handler: Handler, serving: Serving, post: Post
) -> Callable[[Request], Awaitable[Response]]:
    """Return the route of a POST endpoint: it reads the request, counts running handlers, and sends
    the answer or the error."""
    generates = "stream" in post.request_model.model_fields
    untyped = post.error_model is ollama_bodies.OllamaError

    async def serve(http: Request) -> Response:
        running = 0
        try:
            await reply.read_body(serving, http, untyped=untyped)
            if generates:
                serving.check_room(1)  # a full server spends no time on parsing
            serving.handling += (running := 1)
            request = post.request_model.read(await http.body(), lenient=serving.settings.lenient)
            answer = await handler(serving, request, http)
            if isinstance(answer, Response):
                return answer
            stream = getattr(request, "stream", False)
            return await reply.respond(serving, http, answer, stream=stream)
        except Exception as error:
            return reply.error_response(serving, http, error)
        finally:
            serving.handling -= running

    serve.__name__ = handler.__name__
    return serve


def _add_page(app: FastAPI, root_path: str) -> None:
    for path, (kind, body) in page.files(root_path).items():

        def show(kind: str = kind, body: bytes = body) -> Response:
            return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-cache"})

        app.add_route(path, _static(show), methods=["GET"], include_in_schema=False)


def _static(show: Callable[[], Response]) -> Callable[[Request], Awaitable[Response]]:
    async def serve(http: Request) -> Response:
        return show()

    return serve


async def _not_found(http: Request, error: Exception) -> Response:
    if http.url.path in UNSERVED:
        sentence = f"Strobe serves text generation; {http.url.path} is not among what it does."
        return _error(http, 501, sentence, "not_implemented")
    if (sentence := refusal(route(http.scope))) is not None:
        return _error(http, 501, sentence, "not_implemented")
    path = route(http.scope)
    prefixes = [path.removesuffix(served) for served in _paths(http.app) if path.endswith(served)]
    prefix = min(filter(None, prefixes), key=len, default="")
    if prefix.startswith("/") and not prefix.endswith("/"):
        served = path.removeprefix(prefix)
        sentence = (
            f"There is nothing at {http.url.path[:200]!r}, but at {served}. If a proxy shows this "
            f"server below {prefix[:200]}, let it strip that, or start the server with --root-path "
            f"{prefix[:200]}."
        )
    else:
        sentence = f"There is nothing at {http.url.path[:200]!r}; GET /docs lists what there is."
    return _error(http, 404, sentence, "not_found")


async def _not_allowed(http: Request, error: Exception) -> Response:
    sentence = (
        f"{http.url.path[:200]!r} does not take {http.method}; GET /docs lists what it takes."
    )
    return _error(http, 405, sentence, "wrong_method", getattr(error, "headers", None))


def _error(
    http: Request, status: int, sentence: str, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    return error_response(http.scope, ApiError(status, sentence, code=code, headers=headers))
