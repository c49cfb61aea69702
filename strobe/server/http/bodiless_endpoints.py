"""GET endpoints: health, counters, models, tokenizer, settings and stored responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from strobe import __version__
from strobe.server.engine_process.engine_messages import Release
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.http.api_page import api_page
from strobe.server.http.error_responses import error_response
from strobe.server.openai import stored_responses
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.serving import Serving
from strobe.speculation.shadow.report import report_dict, report_text

_STARTING = ("401", "503")
READ_ERRORS: dict[str, tuple[str, ...]] = {
    "/health": ("503",),
    "/ping": ("503",),
    "/load": ("401",),
    "/shadow": ("401",),
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


def add_bodiless_endpoints(app: FastAPI, serving: Serving) -> None:
    """Add the GET endpoints, except the page's files, and /reset_prefix_cache."""
    endpoints = _GetEndpoints(app, serving)
    text = PlainTextResponse
    app.get("/health", response_class=text)(endpoints.health)
    app.head("/health", include_in_schema=False)(endpoints.health)
    app.get("/ping", response_class=text)(endpoints.health)
    app.post("/ping", include_in_schema=False)(endpoints.health)
    app.get("/load")(endpoints.load)
    app.get("/version")(endpoints.show_version)
    app.get("/docs", include_in_schema=False)(endpoints.docs)
    app.get("/metrics", response_class=text)(endpoints.metrics)
    app.get("/shadow")(endpoints.shadow)
    app.get("/v1/models", response_model=answers.ModelList)(endpoints.models)
    app.get("/v1/models/{name:path}", response_model=answers.ModelCard)(endpoints.model)
    app.get("/tokenizer_info")(endpoints.tokenizer_info)
    app.get("/server_info", response_model=answers.ServerInfo)(endpoints.server_info)
    app.post("/reset_prefix_cache", response_class=text)(endpoints.reset_prefix_cache)


def add_response_endpoints(app: FastAPI, serving: Serving) -> None:
    """Add the endpoints of stored responses."""
    endpoints = _ResponseEndpoints(serving)
    path = "/v1/responses/{id}"
    listing = {"parameters": stored_responses.PARAMETERS}
    app.get(path, response_model=answers.Response)(endpoints.retrieve)
    app.delete(path, response_model=answers.DeletedResponse)(endpoints.delete)
    app.get(f"{path}/input_items", response_model=answers.ItemList, openapi_extra=listing)(
        endpoints.items
    )


class _GetEndpoints:
    """The GET endpoints of one server; the docstrings are shown in its OpenAPI document."""

    def __init__(self, app: FastAPI, serving: Serving):
        self._app = app
        self._serving = serving

    async def health(self, http: Request) -> Response:
        """200 once the server can answer, else 503 with the reason."""
        grammar_fault = self._serving.client.grammar_fault
        if self._serving.shutdown.stopping:
            state = "The server is stopping."
        elif self._serving.client.can_answer and grammar_fault is None:
            return PlainTextResponse("")
        elif self._serving.client.can_answer:
            state = str(grammar_fault)
        else:
            state = self._serving.client.state
        return error_response(http.scope, ApiError(503, state, code="not_ready"))

    async def load(self) -> answers.Load:
        """The number of answers in progress or waiting."""
        return {"server_load": self._serving.client.num_open}

    async def show_version(self) -> answers.Version:
        """The version of Strobe."""
        return {"version": __version__}

    async def docs(self) -> Response:
        return HTMLResponse(api_page(self._app.openapi()))

    async def shadow(self, http: Request) -> Response:
        """Scores of the drafters in shadow mode and the speed-up that each would bring: JSON, or
        tables for Accept: text/plain."""
        tally = self._serving.shadow
        facts = self._serving.client.facts
        costs = None if facts is None else facts.shadow_costs
        if "text/plain" in http.headers.get("accept", ""):
            return PlainTextResponse(report_text(tally, costs))
        config = self._serving.client.config
        head = {"shadow": config.shadow, "share": config.shadow_share}
        return JSONResponse(head | report_dict(tally, costs))

    async def metrics(self, http: Request) -> Response:
        """Counters and histograms in Prometheus' format."""
        body, kind = self._serving.metrics.render(http.headers.get("accept"))
        return Response(body, headers={"Content-Type": kind})

    async def models(self, http: Request) -> Response:
        """The names of the served model."""
        try:
            cards = [_card(self._serving, name) for name in self._serving.names]
            body: answers.ModelList = {"object": "list", "data": cards}
            return JSONResponse(body)
        except Exception as error:
            return reply.error_response(self._serving, http, error)

    async def model(self, http: Request, name: str) -> Response:
        """One of the names of the served model."""
        try:
            return JSONResponse(_card(self._serving, self._serving.name(name)))
        except Exception as error:
            return reply.error_response(self._serving, http, error)

    async def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's class, special tokens, settings and chat template, from which a client
        can build the same prompts as the server."""
        return _tokenizer(self._serving)

    async def server_info(self, http: Request) -> Response:
        """The version, the engine's facts, and the settings without API keys."""
        try:
            facts = self._serving.facts
            settings = asdict(self._serving.settings)
            settings["api_key"] = len(self._serving.settings.api_key)
            engine = facts._asdict()
            del engine["shadow_costs"]
            info: answers.ServerInfo = {
                "version": __version__,
                "engine": _plain(engine),
                "config": _plain(asdict(self._serving.client.config)),
                "server": _plain(settings),
                "template": _template(self._serving),
            }
            return JSONResponse(info)
        except Exception as error:
            return reply.error_response(self._serving, http, error)

    async def reset_prefix_cache(self, http: Request) -> Response:
        """Clear the prefix cache; pages that running requests hold stay."""
        try:
            assert self._serving.facts
            self._serving.client.send(Release())
            return PlainTextResponse("")
        except Exception as error:
            return reply.error_response(self._serving, http, error)


class _ResponseEndpoints:
    """The endpoints of stored responses; they read the id from the request's path."""

    def __init__(self, serving: Serving):
        self._serving = serving

    async def retrieve(self, id: str, http: Request) -> Response:
        """A stored response."""
        return await stored_responses.retrieve(self._serving, http)

    async def delete(self, id: str, http: Request) -> Response:
        """Delete a stored response."""
        return await stored_responses.delete(self._serving, http)

    async def items(self, id: str, http: Request) -> Response:
        """A response's input items, including the items of previous responses."""
        return await stored_responses.input_items(self._serving, http)


def _card(serving: Serving, name: str) -> answers.ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "strobe",
        "root": serving.root,
        "max_model_len": serving.facts.max_model_len,
    }


def _template(serving: Serving) -> answers.TemplateInfo:
    forms = serving.formats
    reads = serving.template_reads
    return {
        "reasoning": None if forms.reasoning is None else forms.reasoning.name,
        "tools": None if forms.tools is None else forms.tools.name,
        "variables": None if reads is None else sorted(reads),
    }


def _tokenizer(serving: Serving) -> dict[str, Any]:
    hf = serving.tokenizer.hf
    settings = {name: value for name, value in hf.init_kwargs.items() if name not in _FILES}
    special_tokens = {name: str(token) for name, token in hf.special_tokens_map.items()}
    template = serving.chat_template or hf.chat_template
    about = {"tokenizer_class": type(hf).__name__, "chat_template": template}
    return _plain({**settings, **special_tokens, **about})


def _plain(value: object) -> Any:
    """Convert a value to JSON's types; anything else becomes its text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
