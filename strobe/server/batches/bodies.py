"""The response bodies about files and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from strobe.server.openai.protocol.response_bodies import PageEnds


class File(TypedDict):
    """An uploaded file, or the answers of a batch."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    expires_at: int | None


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileList(PageEnds):
    """Part of a list, newest first unless the request orders otherwise."""

    object: Literal["list"]
    data: list[File]


class BatchError(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchResponse(TypedDict):
    """The response to one request of a batch."""

    status_code: int
    request_id: str
    body: Mapping[str, Any]


class BatchAnswer(TypedDict):
    """A line of an output file. error: the response's error object, whose form is its API's."""

    id: str
    custom_id: str
    response: BatchResponse
    error: Any


class Batch(TypedDict):
    """A batch in OpenAI's format. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int | None
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None
    warnings: NotRequired[list[str]]


class BatchList(PageEnds):
    object: Literal["list"]
    data: list[Batch]


class MessageBatchCounts(TypedDict):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """A batch in Anthropic's format."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    ended_at: str | None
    expires_at: str
    archived_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None
    warnings: NotRequired[list[str]]


class Succeeded(TypedDict):
    type: Literal["succeeded"]
    message: Mapping[str, Any]


class Errored(TypedDict):
    type: Literal["errored"]
    error: Mapping[str, Any]


class Canceled(TypedDict):
    type: Literal["canceled"]


class MessageBatchResult(TypedDict):
    """A line of the results of a batch in Anthropic's format."""

    custom_id: str
    result: Succeeded | Errored | Canceled


class MessageBatchList(PageEnds):
    data: list[MessageBatch]


class DeletedMessageBatch(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]
