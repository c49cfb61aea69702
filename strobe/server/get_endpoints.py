"""GET endpoints: health, counters, models, tokenizer, settings and stored responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from strobe import __version__
from strobe.server.engine_process.messages import Release
from strobe.server.openai import replies, stored_responses
from strobe.server.openai.api_page import api_page
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.protocol.errors import error_body
from strobe.server.serving import Serving

_STARTING = ("401", "503")
READ_ERRORS: dict[str, tuple[str, ...]] = {
    "/health": ("503",),
    "/ping": ("503",),
    "/load": ("401",),
    "/v1/models": _STARTING,
    "/v1/models/{name}": ("401", "404", "503"),
    "/v1/responses/{id}": ("400", "401", "404", "503"),
    "/v1/responses/{id}/input_items": ("400", "401", "404"),
    "/tokenizer_info": ("401",),
    "/server_info": _STARTING,
    "/api/tags": _STARTING,
    "/api/ps": _STARTING,
    "/api/version": ("401",),
    "/reset_prefix_cache": _STARTING,
}
"""Error statuses of these endpoints, for the OpenAPI document."""

UNSERVED = frozenset({
    *(
        f"{root}/{name}"
        for root in ("", "/v1", "/v2")
        for name in ("embeddings", "score", "rerank", "pooling", "classify")
    ),
    "/v1/moderations", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/v1/images/generations", "/v1/images/edits", "/v1/realtime", "/v1/fine_tuning/jobs",
})  # fmt: skip
"""Paths of OpenAI's API and of other servers that are not text generation."""

_FILES = ("name_or_path", "vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file")
"""Tokenizer settings that are paths of this machine and therefore not shown."""


def add_get_endpoints(app: FastAPI, serving: Serving) -> None:
    """Add the GET endpoints, except the page's files, and /reset_prefix_cache."""

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", response_class=PlainTextResponse)
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=PlainTextResponse)
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 once the server can answer, else 503 with the reason."""
        grammar_fault = serving.client.grammar_fault
        if serving.shutdown.stopping:
            state = "The server is stopping."
        elif serving.client.can_answer and grammar_fault is None:
            return PlainTextResponse("")
        elif serving.client.can_answer:
            state = str(grammar_fault)
        else:
            state = serving.client.state
        return JSONResponse(error_body(state, status=503, code="not_ready"), 503)

    @app.get("/load")
    async def load() -> answers.Load:  # pyright: ignore[reportUnusedFunction]
        """The number of answers in progress or waiting."""
        return answers.Load(server_load=serving.client.num_open)

    @app.get("/version")
    async def show_version() -> answers.Version:  # pyright: ignore[reportUnusedFunction]
        """The version of Strobe."""
        return answers.Version(version=__version__)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:  # pyright: ignore[reportUnusedFunction]
        return HTMLResponse(api_page(app.openapi()))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Counters and histograms in Prometheus' format."""
        body, kind = serving.metrics.render(http.headers.get("accept"))
        return Response(body, headers={"Content-Type": kind})

    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The names of the served model."""
        try:
            cards = [_card(serving, name) for name in serving.names]
            return JSONResponse({"object": "list", "data": cards})
        except Exception as error:
            return replies.error_response(serving, error)

    @app.get("/v1/models/{name:path}", response_model=answers.ModelCard)
    async def model(name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """One of the names of the served model."""
        try:
            return JSONResponse(_card(serving, serving.name(name)))
        except Exception as error:
            return replies.error_response(serving, error)

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
        """The tokenizer's class, special tokens, settings and chat template, from which a client
        can build the same prompts as the server."""
        return _tokenizer(serving)

    @app.get("/server_info", response_model=answers.ServerInfo)
    async def server_info() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The version, the engine's facts, and the settings without API keys."""
        try:
            facts = serving.facts
            settings = asdict(serving.settings)
            settings["api_key"] = len(serving.settings.api_key)
            parts = {"engine": facts._asdict(), "config": asdict(serving.client.config)}
            info = {"version": __version__, **parts, "server": settings}
            info["template"] = _template(serving)
            return JSONResponse(_plain(info))
        except Exception as error:
            return replies.error_response(serving, error)

    @app.post("/reset_prefix_cache", response_class=PlainTextResponse)
    async def reset_prefix_cache() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Clear the prefix cache; pages that running requests hold stay."""
        try:
            assert serving.facts
            serving.client.send(Release())
            return PlainTextResponse("")
        except Exception as error:
            return replies.error_response(serving, error)


def add_response_endpoints(app: FastAPI, serving: Serving) -> None:
    """Add the endpoints of stored responses."""
    path = "/v1/responses/{id}"

    @app.get(path, response_model=answers.Response)
    async def retrieve(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A stored response."""
        return await stored_responses.retrieve(serving, http)

    @app.delete(path, response_model=answers.DeletedResponse)
    async def delete(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Delete a stored response."""
        return await stored_responses.delete(serving, http)

    listing = {"parameters": stored_responses.PARAMETERS}

    @app.get(f"{path}/input_items", response_model=answers.ItemList, openapi_extra=listing)
    async def items(id: str, http: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A response's input items, including the items of previous responses."""
        return await stored_responses.input_items(serving, http)


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "strobe",
        "root": serving.root,
        "max_model_len": serving.facts.max_model_len,
    }


def _template(serving: Serving) -> dict[str, Any]:
    forms = serving.formats
    reads = serving.template_reads
    return {
        "reasoning": forms.reasoning and forms.reasoning.name,
        "tools": forms.tools and forms.tools.name,
        "variables": None if reads is None else sorted(reads),
    }


def _tokenizer(serving: Serving) -> dict[str, Any]:
    hf = serving.tokenizer.hf
    settings = {name: value for name, value in hf.init_kwargs.items() if name not in _FILES}
    special_tokens = {name: str(token) for name, token in hf.special_tokens_map.items()}
    template = serving.chat_template or hf.chat_template
    about = {"tokenizer_class": type(hf).__name__, "chat_template": template}
    return _plain({**settings, **special_tokens, **about})


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types; anything else becomes its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
