"""The requests that create batches."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from strobe.server.batches.lines import URLS, BatchUrl
from strobe.server.schema.base import RequestModel, RequestObject
from strobe.server.schema.field_errors import HERE, FieldError, short_json
from strobe.server.schema.values import Must, Nonempty, SomeText

MAX_ITEMS = 10_000
"""Limit of a page of files or batches."""

_ShortText = Annotated[str, Field(max_length=512), Must("a string of at most 512 characters")]
Metadata = Annotated[
    dict[str, _ShortText], Field(max_length=16), Must("an object with at most 16 strings")
]


class BatchRequest(RequestModel):
    """The body of POST /v1/batches."""

    schema_key: ClassVar[str] = "batches"

    input_file_id: SomeText = Field(description="Id of an uploaded file with the purpose `batch`.")
    endpoint: Annotated[BatchUrl, Must(f"one of {', '.join(URLS)}")] = Field(
        description="The endpoint of all requests in the file."
    )
    metadata: Metadata | None = Field(
        None, description="Up to 16 strings, which the batch returns."
    )


class MessageBatchItem(RequestObject):
    """A request of a batch."""

    custom_id: SomeText
    params: Annotated[dict[str, Any], Must("the body of a request, as an object")]

    def check(self) -> None:
        super().check()
        if self.params.get("stream"):
            raise FieldError(
                f"{HERE}.params.stream is true, but a batch has no stream; leave it out.",
                f"{HERE}.params.stream",
            )


class MessageBatchRequest(RequestModel):
    """The body of POST /v1/messages/batches."""

    schema_key: ClassVar[str] = "message_batches"

    requests: Annotated[list[MessageBatchItem], Nonempty("a list of one or more requests")] = Field(
        description="Objects with `custom_id` and `params`, the body of a request to /v1/messages."
    )

    def check(self) -> None:
        super().check()
        names: set[str] = set()
        for index, request in enumerate(self.requests):
            if request.custom_id in names:
                path = f"requests[{index}].custom_id"
                raise FieldError(
                    f"{path} is {short_json(request.custom_id)}, the name of an earlier request; "
                    "give each request its own.",
                    path,
                )
            names.add(request.custom_id)
