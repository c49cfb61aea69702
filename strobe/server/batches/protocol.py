"""The requests that create batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from strobe.server.batches.lines import URLS
from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import RequestModel
from strobe.server.schema.values import TEXT_SCHEMA

MAX_ITEMS = 10_000
"""Limit of a page of files or batches."""

_METADATA: dict[str, Any] = {
    "type": "object",
    "maxProperties": 16,
    "additionalProperties": {"type": "string", "maxLength": 512},
}
_REQUESTS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"custom_id": TEXT_SCHEMA, "params": {"type": "object"}},
        "required": ["custom_id", "params"],
        "additionalProperties": {"type": "null"},
    },
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


class MessageBatchRequest(RequestModel):
    """The body of POST /v1/messages/batches."""

    schema_key: ClassVar[str] = "message_batches"

    requests: Annotated[list[Any], WithJsonSchema(_REQUESTS)] = Field(
        description="Objects with `custom_id` and `params`, the body of a request to /v1/messages."
    )

    def check(self) -> None:
        super().check()
        if not self.requests:
            raise invalid_value("requests", [], "a list of one or more requests")
        names: set[str] = set()
        for index, request in enumerate(self.requests):
            path = f"requests[{index}]"
            fields = self._warnings.split(request, ("custom_id", "params"), "", path)
            name = fields.get("custom_id")
            params = fields.get("params")
            if not isinstance(name, str) or not name:
                raise invalid_value(f"{path}.custom_id", name, "a string of one or more characters")
            if name in names:
                raise FieldError(
                    f"{path}.custom_id is {short_json(name)}, the name of an earlier request; "
                    "give each request its own.",
                    f"{path}.custom_id",
                )
            if not isinstance(params, Mapping):
                raise invalid_value(f"{path}.params", params, "the body of a request, as an object")
            if params.get("stream"):
                raise FieldError(
                    f"{path}.params.stream is true, but a batch has no stream; leave it out.",
                    f"{path}.params.stream",
                )
            names.add(name)
