"""The endpoints /v1/messages/batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from strobe.server.batches.batch_lookup import find_batch
from strobe.server.batches.batch_runner import BatchRunner
from strobe.server.batches.batch_store import RUNNING, succeeded
from strobe.server.batches.bodies import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    MessageBatchResult,
)
from strobe.server.batches.lines import read_requests
from strobe.server.batches.protocol import MAX_ITEMS, MessageBatchRequest
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.http.listing import listed
from strobe.server.serving import Serving

PATH = "/v1/messages"


async def create(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer POST /v1/messages/batches."""
    request = MessageBatchRequest.read(await http.body(), lenient=serving.settings.lenient)
    lines = [
        {"custom_id": r.custom_id, "method": "POST", "url": PATH, "body": r.params}
        for r in request.requests
    ]
    known = {"endpoint": PATH, "total": len(lines), "errors": None, "status": "in_progress"}
    record = runner.store.add("msgbatch", owner, known)
    record["lines"] = record["id"]
    content = b"".join([json.dumps(line).encode() + b"\n" for line in lines])
    runner.store.write_lines(record["id"], content)
    runner.store.save({**record, "owner": owner})
    runner.start(record["id"])
    body = _batch(runner, record, http)
    if warnings := request.warnings():
        body["warnings"] = warnings
    return JSONResponse(body)


async def batches(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/messages/batches."""
    records = runner.store.records("msgbatch", owner)
    described = [_batch(runner, record, http) for record in records]
    page, ends = listed(described, http, MAX_ITEMS, after="after_id")
    body: MessageBatchList = {"data": page, **ends}
    return JSONResponse(body)


async def batch(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/messages/batches/ID."""
    return JSONResponse(_batch(runner, find_batch(runner.store, owner, http, "msgbatch_"), http))


async def cancel(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer POST /v1/messages/batches/ID/cancel."""
    record = find_batch(runner.store, owner, http, "msgbatch_")
    if record["status"] in RUNNING:
        record = runner.cancel(record)
    return JSONResponse(_batch(runner, record, http))


async def delete(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer DELETE /v1/messages/batches/ID."""
    record = _ended(find_batch(runner.store, owner, http, "msgbatch_"), "cancel it first")
    runner.store.delete(record["id"])
    body: DeletedMessageBatch = {"id": record["id"], "type": "message_batch_deleted"}
    return JSONResponse(body)


async def results(serving: Serving, runner: BatchRunner, owner: str, http: Request) -> Response:
    """Answer GET /v1/messages/batches/ID/results."""
    record = _ended(find_batch(runner.store, owner, http, "msgbatch_"), "ask again later")
    lines = [reply.compact(line).encode() + b"\n" for line in _results(runner, record)]
    return Response(b"".join(lines), media_type="application/x-jsonl")


def _results(runner: BatchRunner, record: Mapping[str, Any]) -> Iterator[MessageBatchResult]:
    """Yield the result of each request, in the order of the answers."""
    answered: set[str] = set()
    for answer in runner.store.answers(record["id"]):
        body = answer["response"]["body"]
        name = answer["custom_id"]
        answered.add(name)
        if succeeded(answer):
            yield {"custom_id": name, "result": {"type": "succeeded", "message": body}}
        else:
            yield {"custom_id": name, "result": {"type": "errored", "error": body}}
    for line in read_requests(runner.store.lines_path(record["lines"]), None, (PATH,)):
        if line.custom_id not in answered:
            yield {"custom_id": line.custom_id, "result": {"type": "canceled"}}


def _ended(record: dict[str, Any], hint: str) -> dict[str, Any]:
    if record["status"] in RUNNING:
        raise ApiError(
            400,
            f"The batch {record['id']} has not ended; {hint}.",
            code="batch_not_ended",
        )
    return record


def _batch(runner: BatchRunner, record: Mapping[str, Any], http: Request) -> MessageBatch:
    """Return a batch in Anthropic's format."""
    status = record["status"]
    name = record["id"]
    ended = status not in RUNNING
    succeeded, errored = runner.counts(name)
    left = record["total"] - succeeded - errored
    running = "canceling" if status == "cancelling" else "in_progress"
    ended_at = next((record[key] for key in _ENDS if record.get(key)), None)
    cancelled_at = record.get("cancelling_at")
    return {
        "id": name,
        "type": "message_batch",
        "processing_status": "ended" if ended else running,
        "request_counts": {
            "processing": 0 if ended else left,
            "succeeded": succeeded,
            "errored": errored,
            "canceled": left if ended else 0,
            "expired": 0,
        },
        "created_at": _time(record["created_at"]),
        "ended_at": None if ended_at is None else _time(ended_at),
        "expires_at": _time(record["created_at"] + 86400),
        "archived_at": None,
        "cancel_initiated_at": None if cancelled_at is None else _time(cancelled_at),
        "results_url": f"{http.base_url}v1/messages/batches/{name}/results" if ended else None,
    }


_ENDS = ("completed_at", "cancelled_at", "failed_at")


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
