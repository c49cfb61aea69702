"""A chat's messages, and the form in which chat templates read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic_core import from_json

from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.tools import FunctionName
from strobe.server.schema.values import Must, Nonempty, OneOf, OrText, Text


class TextPart(RequestObject):
    """A text of a message's content."""

    schema_key: ClassVar[str] = "part"

    type: Literal["text", "input_text", "output_text"] = "text"
    text: Text


class RefusalPart(RequestObject):
    """A refusal in a message's content, which is read as a text."""

    schema_key: ClassVar[str] = "part"

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


PARTS: Mapping[str, type[TextPart | RefusalPart]] = {
    "text": TextPart,
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
}


def _part(value: Mapping[str, Any]) -> type[TextPart | RefusalPart]:
    kind = "text" if value.get("type") is None else value["type"]
    part = PARTS.get(kind) if isinstance(kind, str) else None
    if part is None:
        raise FieldError(
            f"{HERE}.type is {short_json(kind)}, but only text is supported, no images, audio or "
            'files; give {"type": "text", "text": ...}.',
            f"{HERE}.type",
            "unsupported_parameter",
        )
    return part


_CONTENT = "a string, or a list of text parts"
_Part = Annotated[
    TextPart | RefusalPart,
    OneOf(choose=_part, requirement='a part such as {"type": "text", "text": ...}'),
]
_TextOrParts = Annotated[str | list[_Part], OrText()]
Content = Annotated[_TextOrParts, Must(_CONTENT)]
RequiredContent = Annotated[_TextOrParts, Must(_CONTENT, if_missing=f"give {_CONTENT}")]
Arguments = Annotated[str | dict[str, Any], OrText(), Must("a JSON string with an object")]


def content_text(content: Content | None) -> str | None:
    """Return a message's text; the texts of several parts are joined by newlines."""
    if isinstance(content, list):
        return "\n".join(part.text for part in content)
    return content


def arguments_object(arguments: Arguments | None) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as text if they are not a JSON object."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def template_call(name: str, arguments: Arguments | None, call_id: str | None) -> dict[str, Any]:
    """Return an earlier call as chat templates read it."""
    function = {"name": name, "arguments": arguments_object(arguments)}
    call = {"type": "function", "function": function}
    return call if call_id is None else {"id": call_id, **call}


class CalledFunction(RequestObject):
    """The function of an earlier call, with its arguments."""

    name: FunctionName
    arguments: Arguments | None = None

    def for_template(self, call_id: str | None) -> dict[str, Any]:
        """The call as the chat template reads it."""
        return template_call(self.name, self.arguments, call_id)


class ToolCall(RequestObject):
    """An earlier tool call. `index`, its position in a stream, is ignored."""

    schema_key: ClassVar[str] = "tool_call"

    type: Annotated[Literal["function"], Must('"function"', "other tools are not supported")] = (
        "function"
    )
    function: Annotated[CalledFunction, Must("a JSON object")]
    id: Text | None = None
    index: Any = None

    def for_template(self) -> dict[str, Any]:
        """The call as the chat template reads it."""
        return self.function.for_template(self.id)


NoText = Annotated[Literal[""], Must("a string")] | None
NoCalls = Annotated[Any, Field(json_schema_extra={"enum": [None, [], {}, "", 0, False]})]


class Message(RequestObject):
    """A message of any role.

    owners: the role of each field that belongs to one role; in messages of other roles it must be
    empty. template_names: further fields that chat templates read, and their names there.
    """

    schema_key: ClassVar[str] = "message"
    owners: ClassVar[Mapping[str, str]] = {
        "tool_calls": "assistant",
        "refusal": "assistant",
        "reasoning_content": "assistant",
        "reasoning": "assistant",
        "tool_call_id": "tool",
    }

    template_names: ClassVar[Mapping[str, str]] = {"name": "name", "tool_call_id": "tool_call_id"}

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        fields = super().split(data, warnings)
        role = fields["role"]
        for name, owner in cls.owners.items():
            if role != owner and fields.get(name):
                raise FieldError(
                    f"{HERE}.{name} is set for the role {role}, but belongs to the role {owner}.",
                    f"{HERE}.{name}",
                )
        return fields

    def for_template(self) -> dict[str, Any]:
        """The message as the chat template reads it: with its content as text, None where an
        answer has only calls or reasoning, and the role system in the place of developer."""
        role = self.sent["role"]
        read: dict[str, Any] = {"role": "system" if role == "developer" else role}
        read["content"] = self.text() or ""
        names = self.template_names.items()
        return read | {known: self.sent[name] for name, known in names if name in self.sent}

    def text(self) -> str | None:
        """The text of the content."""
        raise NotImplementedError


class PromptMessage(Message):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: RequiredContent
    name: Text | None = None
    tool_calls: NoCalls = None
    refusal: NoText = None
    reasoning_content: NoText = None
    reasoning: NoText = None
    tool_call_id: NoText = None

    def text(self) -> str | None:
        return content_text(self.content)


class ToolMessage(Message):
    """The result of a tool call, which may be empty."""

    role: Literal["tool"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: NoCalls = None
    refusal: NoText = None
    reasoning_content: NoText = None
    reasoning: NoText = None
    tool_call_id: Text | None = None

    def text(self) -> str | None:
        return content_text(self.content)


class Answer(Message):
    """A message of the assistant, which may be empty."""

    def reasoning_text(self) -> str | None:
        """The text of the reasoning."""
        raise NotImplementedError

    def calls(self) -> list[dict[str, Any]]:
        """The calls as the chat template reads them."""
        raise NotImplementedError

    def for_template(self) -> dict[str, Any]:
        read = super().for_template()
        more: dict[str, Any] = {}
        if reasoning := self.reasoning_text():
            more["reasoning_content"] = reasoning
        if calls := self.calls():
            more["tool_calls"] = calls
        if more:
            read["content"] = self.text()
        return read | more


class AssistantMessage(Answer):
    """An earlier answer, which may be empty. A refusal is read as content."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall], Must("a list of tool calls")] | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_call_id: NoText = None

    def check(self) -> None:
        super().check()
        if self.reasoning not in (None, self.reasoning_text()):
            raise FieldError(
                f"{HERE}.reasoning differs from {HERE}.reasoning_content; give one of them.",
                f"{HERE}.reasoning",
            )

    def reasoning_text(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def calls(self) -> list[dict[str, Any]]:
        return [call.for_template() for call in self.tool_calls or ()]

    def text(self) -> str | None:
        texts = (content_text(self.content), self.refusal)
        return "\n".join(text for text in texts if text) or content_text(self.content)


MESSAGES: Mapping[str, type[PromptMessage | ToolMessage | AssistantMessage]] = {
    "system": PromptMessage,
    "developer": PromptMessage,
    "user": PromptMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
}
"""The model of each role's messages."""


def check_role(role: object) -> str:
    """Return a message's role. Raises FieldError."""
    if not isinstance(role, str) or role not in MESSAGES:
        problem = "is missing" if role is None else f"is {short_json(role)}"
        raise FieldError(
            f"{HERE}.role {problem}, but must be one of {', '.join(MESSAGES)}.", f"{HERE}.role"
        )
    return role


def _message(value: Mapping[str, Any]) -> type[PromptMessage | ToolMessage | AssistantMessage]:
    return MESSAGES[check_role(value.get("role"))]


Messages = Annotated[
    list[
        Annotated[
            PromptMessage | ToolMessage | AssistantMessage,
            OneOf(choose=_message, requirement="an object", code="invalid_type"),
        ]
    ],
    Nonempty("a list of one or more messages"),
]
