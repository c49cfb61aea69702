"""The messages of Ollama's /api/chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from strobe.server.schema.base import RequestObject
from strobe.server.schema.messages import (
    Answer,
    CalledFunction,
    Content,
    Message,
    NoCalls,
    NoText,
    RequiredContent,
    check_role,
    content_text,
)
from strobe.server.schema.values import Must, OneOf, Text


class OllamaFunction(CalledFunction):
    """The function of an earlier call. Its index, its position in the answer, is ignored."""

    index: Any = None


class OllamaCall(RequestObject):
    """An earlier tool call."""

    schema_key: ClassVar[str] = "tool_call"

    function: Annotated[OllamaFunction, Must("a JSON object")]
    id: Text | None = None


class OllamaMessage(Message):
    """A message of any role."""

    schema_key: ClassVar[str] = "ollama.message"
    owners: ClassVar[Mapping[str, str]] = {
        "tool_calls": "assistant",
        "thinking": "assistant",
        "tool_call_id": "tool",
    }

    template_names: ClassVar[Mapping[str, str]] = {
        "tool_name": "name",
        "tool_call_id": "tool_call_id",
    }

    tool_name: Text | None = None


class OllamaPrompt(OllamaMessage):
    """A message of the system or the user."""

    role: Literal["system", "developer", "user"]
    content: RequiredContent
    tool_calls: NoCalls = None
    thinking: NoText = None
    tool_call_id: NoText = None

    def text(self) -> str | None:
        return content_text(self.content)


class OllamaToolResult(OllamaMessage):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content | None = None
    tool_calls: NoCalls = None
    thinking: NoText = None
    tool_call_id: Text | None = None

    def text(self) -> str | None:
        return content_text(self.content)


class OllamaAnswer(OllamaMessage, Answer):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[OllamaCall], Must("a list of tool calls")] | None = None
    thinking: Text | None = None
    tool_call_id: NoText = None

    def calls(self) -> list[dict[str, Any]]:
        return [call.function.for_template(call.id) for call in self.tool_calls or ()]

    def reasoning_text(self) -> str | None:
        return self.thinking

    def text(self) -> str | None:
        return content_text(self.content)


MESSAGES: Mapping[str, type[OllamaPrompt | OllamaToolResult | OllamaAnswer]] = {
    "system": OllamaPrompt,
    "developer": OllamaPrompt,
    "user": OllamaPrompt,
    "assistant": OllamaAnswer,
    "tool": OllamaToolResult,
}
"""The model of each role's messages."""


def _message(value: Mapping[str, Any]) -> type[OllamaPrompt | OllamaToolResult | OllamaAnswer]:
    return MESSAGES[check_role(value.get("role"))]


OllamaMessages = list[
    Annotated[OllamaPrompt | OllamaToolResult | OllamaAnswer, OneOf(choose=_message)]
]
