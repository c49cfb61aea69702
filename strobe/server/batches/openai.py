"""The endpoints /v1/files and /v1/batches."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email import message_from_bytes, policy
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.server.batches.batch_lookup import find_batch, not_found
from strobe.server.batches.batch_runner import BatchRunner
from strobe.server.batches.batch_store import ERRORS, OUTPUT, RUNNING
from strobe.server.batches.bodies import (
    Batch,
    BatchError,
    BatchList,
    DeletedFile,
    File,
    FileList,
)
from strobe.server.batches.lines import BrokenLines, read_requests
from strobe.server.batches.protocol import MAX_ITEMS, BatchRequest
from strobe.server.generation.api_errors import ApiError
from strobe.server.http.listing import listed
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving

_FORM = "multipart/form-data"


async def upload(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer POST /v1/files."""
    if "authorization" not in http.headers:
        raise ApiError(
            401,
            "An upload needs the header Authorization, even if the server takes any key, because "
            "other sites' pages can send forms; set it as OpenAI's clients do.",
            code="missing_authorization",
        )
    kind = http.headers.get("content-type", "")
    if not kind.lower().startswith(_FORM):
        raise ApiError(
            415,
            f"The Content-Type is {kind[:100]!r}, but must be {_FORM}; send the file as a form.",
            code="unsupported_media_type",
        )
    fields, filename, content = _form(kind, await http.body())
    if (purpose := fields.pop("purpose", None)) != "batch":
        raise FieldError.of_value("purpose", purpose, '"batch"', "other files have no use here")
    if fields:
        name = next(iter(fields))
        raise FieldError(
            f"{name[:60]!r} is not a field of an upload; leave it out.",
            name[:200],
            "unknown_parameter",
        )
    if content is None:
        raise FieldError(
            "file is missing; the upload needs it.", "file", "missing_required_parameter"
        )
    known = {"filename": filename, "bytes": len(content), "purpose": "batch"}
    record = runner.store.add("file", owner, known)
    runner.store.write_lines(record["id"], content)
    return JSONResponse(_file(record))


def _form(kind: str, body: bytes) -> tuple[dict[str, str], str, bytes | None]:
    """Return a form's texts, and the name and content of its file. Raises FieldError."""
    head = b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n"
    form = message_from_bytes(head + body, policy=policy.HTTP)
    if not form.is_multipart() or form.defects:
        raise FieldError("The body is not a multipart form; send the file as a form.", None)
    fields: dict[str, str] = {}
    filename = ""
    content = None
    for part in form.iter_parts():
        name = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        data = value if isinstance(value, bytes) else b""
        if name == "file":
            filename = part.get_filename() or ""
            content = data
        else:
            fields[str(name)] = data.decode(errors="replace")
    return fields, filename, content


async def files(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/files."""
    purpose = http.query_params.get("purpose", "batch")
    records = runner.store.records("file", owner) if purpose == "batch" else []
    page, ends = listed(list(map(_file, records)), http, MAX_ITEMS, ("purpose",))
    body: FileList = {"object": "list", "data": page, **ends}
    return JSONResponse(body)


async def file(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/files/ID."""
    name = http.path_params["id"]
    if (record := runner.store.get(name, owner)) is not None and name.startswith("file_"):
        return JSONResponse(_file(record))
    content = runner.store.content(name, owner)
    batch = runner.store.get(name.removesuffix(OUTPUT).removesuffix(ERRORS), owner)
    if content is None or batch is None:
        raise not_found("file", name)
    output = {"filename": f"{name}.jsonl", "bytes": len(content), "purpose": "batch_output"}
    return JSONResponse(_file({**batch, "id": name, **output}))


async def content(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/files/ID/content."""
    name = http.path_params["id"]
    lines = runner.store.content(name, owner)
    if lines is None:
        raise not_found("file", name)
    return Response(lines, media_type="application/jsonl")


async def delete(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer DELETE /v1/files/ID."""
    name = http.path_params["id"]
    if not name.startswith("file_") or runner.store.get(name, owner) is None:
        raise not_found("file", name)
    runner.store.delete(name)
    body: DeletedFile = {"id": name, "object": "file", "deleted": True}
    return JSONResponse(body)


async def create(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer POST /v1/batches."""
    request = BatchRequest.read(await http.body(), lenient=serving.settings.lenient)
    store = runner.store
    source = request.input_file_id
    if not source.startswith("file_") or store.get(source, owner) is None:
        raise not_found("file", source, "input_file_id")
    errors: list[BatchError] | None = None
    total = 0
    try:
        total = len(read_requests(store.lines_path(source), source, (request.endpoint,)))
    except BrokenLines as error:
        errors = [_error(sentence, line) for line, sentence in error.problems.items()]
    except ValueError as error:
        errors = [_error(str(error), None)]
    fields: dict[str, Any] = {
        "endpoint": request.endpoint,
        "lines": source,
        "metadata": request.metadata,
        "total": total,
        "errors": errors,
        "status": "validating" if errors is None else "failed",
    }
    fields |= {} if errors is None else {"failed_at": int(time.time())}
    record = store.add("batch", owner, fields)
    if errors is None:
        runner.start(record["id"])
    body = _batch(runner, record)
    if warnings := request.warnings():
        body["warnings"] = warnings
    return JSONResponse(body)


def _error(sentence: str, line: int | None) -> BatchError:
    return {"code": "invalid_request", "message": sentence, "param": None, "line": line}


async def batches(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/batches."""
    records = runner.store.records("batch", owner)
    page, ends = listed([_batch(runner, record) for record in records], http, MAX_ITEMS)
    body: BatchList = {"object": "list", "data": page, **ends}
    return JSONResponse(body)


async def batch(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/batches/ID."""
    return JSONResponse(_batch(runner, find_batch(runner.store, owner, http, "batch_")))


async def cancel(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer POST /v1/batches/ID/cancel."""
    record = find_batch(runner.store, owner, http, "batch_")
    if record["status"] in RUNNING:
        record = runner.cancel(record)
    return JSONResponse(_batch(runner, record))


def _file(record: Mapping[str, Any]) -> File:
    return {
        "object": "file",
        "id": record["id"],
        "bytes": record["bytes"],
        "created_at": record["created_at"],
        "filename": record["filename"],
        "purpose": record["purpose"],
        "status": "processed",
        "expires_at": None,
    }


def _batch(runner: BatchRunner, record: Mapping[str, Any]) -> Batch:
    """Return a batch in OpenAI's format."""
    name = record["id"]
    ended = record["status"] not in RUNNING
    completed, failed = runner.counts(name)
    errors = record["errors"]
    return {
        "id": name,
        "object": "batch",
        "endpoint": record["endpoint"],
        "errors": None if errors is None else {"object": "list", "data": errors},
        "input_file_id": record["lines"],
        "completion_window": "24h",
        "status": record["status"],
        "output_file_id": f"{name}{OUTPUT}" if ended and completed else None,
        "error_file_id": f"{name}{ERRORS}" if ended and failed else None,
        "created_at": record["created_at"],
        "expires_at": None,
        "in_progress_at": record.get("in_progress_at"),
        "finalizing_at": record.get("finalizing_at"),
        "completed_at": record.get("completed_at"),
        "failed_at": record.get("failed_at"),
        "expired_at": record.get("expired_at"),
        "cancelling_at": record.get("cancelling_at"),
        "cancelled_at": record.get("cancelled_at"),
        "request_counts": {"total": record["total"], "completed": completed, "failed": failed},
        "metadata": record["metadata"],
    }
