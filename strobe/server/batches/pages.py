"""Pages of files and batches, and the error for one that is not stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from strobe.server.batches.store import BatchStore
from strobe.server.openai.protocol.errors import FieldError, invalid_value, short_json
from strobe.server.serving import RequestRejected

MAX_ITEMS, DEFAULT_ITEMS = 10_000, 20


def listed(
    items: list[dict[str, Any]],
    http: Request,
    others: Sequence[str] = (),
    after: str = "after",
) -> dict[str, Any]:
    """Return the page of items, newest first, that the query selects. others: query parameters that
    the caller reads; after: the name of the parameter that continues a list. Raises FieldError."""
    query = http.query_params
    for name in query:
        if name not in ("limit", "order", after, *others):
            raise FieldError(
                f"{short_json(name)} is not a parameter of this path; leave it out.",
                name[:200],
                "unknown_parameter",
            )
    limit, order = query.get("limit", str(DEFAULT_ITEMS)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit[:9]) <= MAX_ITEMS:
        raise invalid_value("limit", limit, f"a whole number from 1 to {MAX_ITEMS}")
    if order not in ("asc", "desc"):
        raise invalid_value("order", order, "asc or desc")
    items = items if order == "desc" else items[::-1]
    if (last := query.get(after)) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == last]
        if not places:
            raise invalid_value(after, last, "the id of an item in the list")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def not_found(kind: str, name: str, param: str | None = None) -> RequestRejected:
    """Return the error for a file or batch that is not stored."""
    return RequestRejected(
        404,
        f"There is no {kind} {name[:200]!r}; it may have been deleted, or belong to another key.",
        code=f"{kind}_not_found",
        param=param,
    )


def find_batch(store: BatchStore, owner: str, http: Request, prefix: str) -> dict[str, Any]:
    """Return the owner's batch that the path names. prefix: of the names of its interface. Raises
    RequestRejected."""
    name = http.path_params["id"]
    record = store.get(name, owner) if name.startswith(prefix) else None
    if record is None:
        raise not_found("batch", name)
    return record
