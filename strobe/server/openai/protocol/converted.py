"""Base class of the requests that are answered as a chat."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError, Names, rename_fields


class ConvertedRequest(RequestModel):
    """A request that is converted to a chat request. names: its names of a chat's fields;
    format_field: of response_format."""

    names: ClassVar[Names]
    format_field: ClassVar[str]

    _chat: ChatCompletionRequest | None = None

    def to_chat(self) -> ChatCompletionRequest:
        """The same request as a chat request."""
        assert self._chat is not None, "checked requests have their chat"
        return self._chat

    def read_chat(self, body: Mapping[str, Any]) -> None:
        """Check and keep the chat request. Raises FieldError with this endpoint's field names."""
        try:
            self._chat = ChatCompletionRequest.read(body, lenient=self._warnings.lenient)
        except FieldError as error:
            raise self.with_own_names(error) from None

    def warnings(self, template_reads: Collection[str] | None = None) -> list[str]:
        """One sentence for each field without effect, as for a chat."""
        sentences = self.to_chat().warnings(template_reads)
        renamed = [rename_fields(sentence, self.names) for sentence in sentences]
        return list(dict.fromkeys(super().warnings() + renamed))  # both may warn of one field

    def with_own_names(self, error: FieldError) -> FieldError:
        """Return a chat's error with this endpoint's field names."""
        return error.with_names(self.names)

    def own_names(self, sentences: Sequence[str]) -> list[str]:
        """Return a chat's warnings with this endpoint's field names, of which two may be one."""
        return list(dict.fromkeys(rename_fields(sentence, self.names) for sentence in sentences))
