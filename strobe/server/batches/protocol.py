"""The requests that create batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from strobe.server.batches.lines import URLS
from strobe.server.schema.base import RequestModel, RequestObject
from strobe.server.schema.field_errors import HERE, FieldError, invalid_value, short_json
from strobe.server.schema.values import TEXT_SCHEMA, Must, Nonempty, SomeText

MAX_ITEMS = 10_000
"""Limit of a page of files or batches."""

_METADATA: dict[str, Any] = {
    "type": "object",
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "maxLength": 512},
}


class BatchRequest(RequestModel):
    """The body of POST /v1/batches."""

    schema_key: ClassVar[str] = "batches"

    input_file_id: Annotated[str, WithJsonSchema(TEXT_SCHEMA)] = Field(
        description="Id of an uploaded file with the purpose `batch`."
    )
    endpoint: Annotated[str, WithJsonSchema({"enum": list(URLS)})] = Field(
        description="The endpoint of all requests in the file."
    )
    metadata: Annotated[Any, WithJsonSchema(_METADATA)] = Field(
        None, description="Up to 16 strings, which the batch returns."
    )

    def check(self) -> None:
        super().check()
        if self.endpoint not in URLS:
            raise invalid_value("endpoint", self.endpoint, f"one of {', '.join(URLS)}")
        values = self.metadata
        if values is None:
            return
        if not isinstance(values, Mapping) or len(values) > 16:
            raise invalid_value("metadata", values, "an object with at most 16 strings")
        for name, value in values.items():
            if not isinstance(value, str) or len(value) > 512:
                requirement = "a string of at most 512 characters"
                raise invalid_value(f"metadata.{name}"[:200], value, requirement)


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
