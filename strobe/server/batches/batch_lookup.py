"""Look-up of a stored batch, and the error for a file or batch that is not stored."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from strobe.server.batches.batch_store import BatchStore
from strobe.server.generation.api_errors import ApiError


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    """Return the error for a file or batch that is not stored."""
    return ApiError(
        404,
        f"There is no {kind} {name[:200]!r}; it may have been deleted, or belong to another key.",
        code=f"{kind}_not_found",
        field=param,
    )


def find_batch(store: BatchStore, owner: str, http: Request, prefix: str) -> dict[str, Any]:
    """Return the owner's batch that the path names. prefix: of the names of its interface. Raises
    ApiError."""
    name = http.path_params["id"]
    record = store.get(name, owner) if name.startswith(prefix) else None
    if record is None:
        raise not_found("batch", name)
    return record
