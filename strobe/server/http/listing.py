"""Pages of a list of stored objects."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from fastapi import Request

from strobe.server.openai.protocol.response_bodies import PageEnds
from strobe.server.schema.field_errors import FieldError, short_json

DEFAULT_ITEMS = 20

Item = TypeVar("Item", bound=Mapping[str, Any])


def check_query(http: Request, allowed: Collection[str] = ()) -> None:
    """Raise FieldError for a query parameter that is not allowed."""
    for name in http.query_params:
        if name not in allowed:
            raise FieldError(
                f"{short_json(name)} is not a parameter of this path; leave it out.",
                name[:200],
                "unknown_parameter",
            )


def listed(
    items: list[Item],
    http: Request,
    max_items: int,
    others: Collection[str] = (),
    after: str = "after",
) -> tuple[list[Item], PageEnds]:
    """Return the items that the query selects, and their ends. items: newest first; others: query
    parameters that the caller reads; after: the name of the parameter that continues a list. Raises
    FieldError."""
    query = http.query_params
    check_query(http, ("limit", "order", after, *others))
    limit = query.get("limit", str(DEFAULT_ITEMS))
    order = query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit[:9]) <= max_items:
        raise FieldError.of_value("limit", limit, f"a whole number from 1 to {max_items}")
    if order not in ("asc", "desc"):
        raise FieldError.of_value("order", order, "asc or desc")
    items = items if order == "desc" else items[::-1]
    if (last := query.get(after)) is not None:
        places = [place for place, item in enumerate(items) if item["id"] == last]
        if not places:
            raise FieldError.of_value(after, last, "the id of an item in the list")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends: PageEnds = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
    return page, ends
