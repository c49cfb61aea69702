"""The endpoints of stored responses, /v1/responses/ID."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.http.listing import DEFAULT_ITEMS, check_query, listed
from strobe.server.openai.protocol.response_bodies import DeletedResponse, ItemList
from strobe.server.openai.response_store import StoredResponse
from strobe.server.serving import Serving

MAX_ITEMS = 100
"""Limit of a page of /v1/responses/ID/input_items."""

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""Prefixes of the ids of items; of items that the model does not read, `item`."""


PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": "query", "required": False, "schema": shape}
    for name, shape in {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "Only items after the one with this id."},
    }.items()
]
"""Query parameters of the list of input items, for the OpenAPI document."""


async def retrieve(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID."""
    try:
        check_query(http)
        return Response(find(serving, http, _name(http)).body, media_type="application/json")
    except Exception as error:
        return reply.error_response(serving, http, error)


async def delete(serving: Serving, http: Request) -> Response:
    """Answer DELETE /v1/responses/ID."""
    try:
        check_query(http)
        response = find(serving, http, _name(http))
        serving.responses.delete(_name(http), response.owner)
        body: DeletedResponse = {"id": _name(http), "object": "response", "deleted": True}
        return JSONResponse(body)
    except Exception as error:
        return reply.error_response(serving, http, error)


async def input_items(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID/input_items."""
    try:
        stored = [from_json(item) for item in reversed(find(serving, http, _name(http)).items)]
        items, ends = listed(stored, http, MAX_ITEMS)
        body: ItemList = {"object": "list", "data": items, **ends}
        return JSONResponse(body)
    except Exception as error:
        return reply.error_response(serving, http, error)


def find(serving: Serving, http: Request, name: str, param: str | None = None) -> StoredResponse:
    """Return the client's response with that id. Raises ApiError if it is not stored."""
    response = serving.responses.get(name, owner(http))
    if response is None:
        raise ApiError(
            404,
            f"There is no response {name[:200]!r}: responses are held in memory, and this one may "
            "have expired, been deleted, or been made with store: false; send the whole "
            "conversation as input.",
            code="response_not_found",
            field=param,
        )
    return response


def owner(http: Request) -> bytes | None:
    """Return the digest of the client's API key, None without keys."""
    return http.scope["state"].get("api_key")


def complete_items(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's input as items with types, ids and content in parts."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_complete_item(item) for item in items]


def _complete_item(item_fields: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in item_fields.items() if value is not None}
    kind = fields.get("type", "message")
    prefix = PREFIXES.get(kind, "item")
    item = {"id": f"{prefix}_{secrets.token_hex(12)}", "type": kind, **fields}
    if kind == "message" and isinstance(content := item["content"], str):
        content_type = "output_text" if item["role"] == "assistant" else "input_text"
        extra = {"annotations": []} if content_type == "output_text" else {}
        item["content"] = [{"type": content_type, "text": content, **extra}]
    return item


def _name(http: Request) -> str:
    return http.path_params["id"]
