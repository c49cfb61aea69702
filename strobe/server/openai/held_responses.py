"""/v1/responses/ID: responses that the server holds."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from strobe.server.openai import replies
from strobe.server.openai.protocol.errors import BadField, shown, wrong
from strobe.server.response_memory import Held
from strobe.server.serving import Serving, Unserved

MOST_ITEMS, USUAL_ITEMS = 100, 20
"""In one answer of /v1/responses/ID/input_items."""

PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
"""What the ids of items begin with."""


PARAMETERS: list[dict[str, Any]] = [
    {"name": name, "in": "query", "required": False, "schema": shape}
    for name, shape in {
        "limit": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS, "default": USUAL_ITEMS},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "Only what comes behind the item of this id."},
    }.items()
]
"""Those of the list of input items, for the OpenAPI document."""


class Page(NamedTuple):
    """Which items to list."""

    limit: int
    order: str
    after: str | None


async def retrieve(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID."""
    try:
        _query(http, ())
        return Response(find(serving, http, _name(http)).body, media_type="application/json")
    except Exception as error:
        return replies.failed(serving, error)


async def delete(serving: Serving, http: Request) -> Response:
    """Answer DELETE /v1/responses/ID."""
    try:
        _query(http, ())
        held = find(serving, http, _name(http))
        serving.responses.drop(_name(http), held.owner)
        return JSONResponse({"id": _name(http), "object": "response", "deleted": True})
    except Exception as error:
        return replies.failed(serving, error)


async def input_items(serving: Serving, http: Request) -> Response:
    """Answer GET /v1/responses/ID/input_items."""
    try:
        page = _page(_query(http, Page._fields))
        items: list[Any] = [from_json(one) for one in find(serving, http, _name(http)).items]
        return JSONResponse(_listed(items, page))
    except Exception as error:
        return replies.failed(serving, error)


def find(serving: Serving, http: Request, name: str, param: str | None = None) -> Held:
    """The response of that id. Raises Unserved where it is not held for this client."""
    held = serving.responses.find(name, owner(http))
    if held is None:
        raise Unserved(
            404,
            f"There is no response {name[:200]!r}: responses are held in memory, and this one may "
            "have expired, been deleted, or been made with store: false; send the whole "
            "conversation as input.",
            code="response_not_found",
            param=param,
        )
    return held


def owner(http: Request) -> bytes | None:
    """Whose responses a client sees."""
    return http.scope["state"].get("api_key")


def named_items(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A request's input as items with types, ids and content in parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_named(one) for one in given]


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if value is not None}
    kind = fields.get("type", "message")
    item = {"id": f"{PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, **fields}
    if kind == "message" and isinstance(content := item["content"], str):
        said = "output_text" if item["role"] == "assistant" else "input_text"
        more = {"annotations": []} if said == "output_text" else {}
        item["content"] = [{"type": said, "text": content, **more}]
    return item


def _listed(items: list[dict[str, Any]], page: Page) -> dict[str, Any]:
    if page.order == "desc":
        items = items[::-1]
    if page.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise wrong("after", page.after, "the id of one of the response's input items")
        items = items[places[0] + 1 :]
    data = items[: page.limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(items) > len(data),
    }


def _page(given: Mapping[str, str]) -> Page:
    limit, order = given.get("limit", str(USUAL_ITEMS)), given.get("order", "desc")
    if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit[:9]) <= MOST_ITEMS:
        raise wrong("limit", limit, f"a whole number from 1 to {MOST_ITEMS}")
    if order not in ("asc", "desc"):
        raise wrong("order", order, "asc or desc")
    return Page(int(limit), order, given.get("after"))


def _query(http: Request, known: Sequence[str]) -> Mapping[str, str]:
    for name in http.query_params:
        if name not in known:
            raise BadField(
                f"{shown(name)} is not a parameter of this path; leave it out.",
                name[:200],
                "unknown_parameter",
            )
    return http.query_params


def _name(http: Request) -> str:
    return http.path_params["id"]
