"""The endpoints of stored responses, /v1/responses/ID."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from strobe.server.openai import replies
from strobe.server.openai.protocol.errors import FieldError, invalid_value, short_json
from strobe.server.response_store import StoredResponse
from strobe.server.serving import RequestRejected, Serving

MAX_ITEMS, DEFAULT_ITEMS = 100, 20
"""Numbers of items on one page of /v1/responses/ID/input_items."""

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""Prefixes of the ids of items."""


PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": "query", "required": False, "schema": shape}
    for name, shape in {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "Only items after the one with this id."},
    }.items()
]
"""Query parameters of the list of input items, for the OpenAPI document."""


class Page(NamedTuple):
    """Query parameters that select the items to list."""

    limit: int
    order: str
    after: str | None


async def retrieve(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID."""
    try:
        _query(http, ())
        return Response(find(serving, http, _name(http)).body, media_type="application/json")
    except Exception as error:
        return replies.error_response(serving, error)


async def delete(serving: Serving, http: Request) -> Response:
    """Answer DELETE /v1/responses/ID."""
    try:
        _query(http, ())
        response = find(serving, http, _name(http))
        serving.responses.delete(_name(http), response.owner)
        return JSONResponse({"id": _name(http), "object": "response", "deleted": True})
    except Exception as error:
        return replies.error_response(serving, error)


async def input_items(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID/input_items."""
    try:
        page = _page(_query(http, Page._fields))
        items: list[Any] = [from_json(item) for item in find(serving, http, _name(http)).items]
        return JSONResponse(_list_page(items, page))
    except Exception as error:
        return replies.error_response(serving, error)


def find(serving: Serving, http: Request, name: str, param: str | None = None) -> StoredResponse:
    """Return the client's response with that id. Raises RequestRejected if it is not stored."""
    response = serving.responses.get(name, owner(http))
    if response is None:
        raise RequestRejected(
            404,
            f"There is no response {name[:200]!r}: responses are held in memory, and this one may "
            "have expired, been deleted, or been made with store: false; send the whole "
            "conversation as input.",
            code="response_not_found",
            param=param,
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
    item = {"id": f"{PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, **fields}
    if kind == "message" and isinstance(content := item["content"], str):
        content_type = "output_text" if item["role"] == "assistant" else "input_text"
        extra = {"annotations": []} if content_type == "output_text" else {}
        item["content"] = [{"type": content_type, "text": content, **extra}]
    return item


def _list_page(items: list[dict[str, Any]], page: Page) -> dict[str, Any]:
    if page.order == "desc":
        items = items[::-1]
    if page.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise invalid_value("after", page.after, "the id of one of the response's input items")
        items = items[places[0] + 1 :]
    data = items[: page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > len(data),
    }


def _page(query: Mapping[str, str]) -> Page:
    limit, order = query.get("limit", str(DEFAULT_ITEMS)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit[:9]) <= MAX_ITEMS:
        raise invalid_value("limit", limit, f"a whole number from 1 to {MAX_ITEMS}")
    if order not in ("asc", "desc"):
        raise invalid_value("order", order, "asc or desc")
    return Page(int(limit), order, query.get("after"))


def _query(http: Request, allowed: Sequence[str]) -> Mapping[str, str]:
    for name in http.query_params:
        if name not in allowed:
            raise FieldError(
                f"{short_json(name)} is not a parameter of this path; leave it out.",
                name[:200],
                "unknown_parameter",
            )
    return http.query_params


def _name(http: Request) -> str:
    return http.path_params["id"]
