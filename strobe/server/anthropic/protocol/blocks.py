"""The messages of /v1/messages, lists of blocks, and the chat messages that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.messages import template_call
from strobe.server.schema.template_messages import TemplateMessages
from strobe.server.schema.values import Must, OneOf, OrText, Text


class Block(RequestObject):
    """A block of a message's content."""

    schema_key: ClassVar[str] = "block"


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Block):
    """The thinking of an earlier answer. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Block):
    """Thinking that only the service that created it can read; ignored."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: Text
    name: Annotated[str, Field(min_length=1), Must("the name of a tool")]
    input: Annotated[dict[str, Any], Must("an object, the tool's arguments")]


@dataclass(frozen=True)
class _BlockOf:
    """Chooses the model of a block. types: the types there."""

    types: tuple[str, ...]

    def __call__(self, value: Mapping[str, Any]) -> type[Block]:
        kind = value.get("type")
        if kind not in self.types:
            is_known = isinstance(kind, str) and kind in BLOCKS
            why = "has no place there"
            if not is_known:
                why = "is not supported: text and calls of tools are"
            raise FieldError(
                f"{HERE}.type is {short_json(kind)}, which {why}; the types there are "
                f"{', '.join(self.types)}.",
                f"{HERE}.type",
                "unsupported_parameter",
            )
        return BLOCKS[kind]


def _block(*types: str) -> OneOf:
    """Return the annotation of blocks of some types."""
    return OneOf(
        choose=_BlockOf(types), requirement='a block such as {"type": "text", "text": ...}'
    )


Texts = Annotated[
    str | list[Annotated[TextBlock, _block("text")]],
    OrText(),
    Must("a string, or a list of text blocks"),
]


def joined(texts: Texts | None) -> str:
    """Return a text, or the texts of blocks joined by newlines."""
    if isinstance(texts, list):
        return "\n".join(block.text for block in texts)
    return texts or ""


class ToolResultBlock(Block):
    """The result of an earlier call of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None


BLOCKS: Mapping[str, type[Block]] = {
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "redacted_thinking": RedactedThinkingBlock,
    "tool_use": ToolUseBlock,
    "tool_result": ToolResultBlock,
}

_Content = (
    OrText(),
    Must("a string, or a list of one or more blocks"),
)
_UserBlock = Annotated[TextBlock | ToolResultBlock, _block("text", "tool_result")]
_AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    _block("text", "thinking", "redacted_thinking", "tool_use"),
]
_SystemBlock = Annotated[TextBlock, _block("text")]


class UserTurn(RequestObject):
    """A message of the user, with texts and results of calls."""

    role: Literal["user"]
    content: Annotated[str | Annotated[list[_UserBlock], Field(min_length=1)], *_Content]


class AssistantTurn(RequestObject):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Annotated[str | Annotated[list[_AssistantBlock], Field(min_length=1)], *_Content]


class SystemTurn(RequestObject):
    """A message of the system."""

    role: Literal["system"]
    content: Annotated[str | Annotated[list[_SystemBlock], Field(min_length=1)], *_Content]


Turn = UserTurn | AssistantTurn | SystemTurn
TURNS: Mapping[str, type[Turn]] = {
    "user": UserTurn,
    "assistant": AssistantTurn,
    "system": SystemTurn,
}
"""The model of each role's messages."""


def _turn(value: Mapping[str, Any]) -> type[Turn]:
    role = value.get("role")
    if not isinstance(role, str) or role not in TURNS:
        raise FieldError.of_value(f"{HERE}.role", role, f"one of {', '.join(TURNS)}")
    return TURNS[role]


Turns = Annotated[
    list[Annotated[Turn, OneOf(choose=_turn)]],
    Field(min_length=1),
    Must("a list of one or more messages"),
]


def to_messages(turns: Sequence[Turn]) -> TemplateMessages:
    """Return the messages as chat templates read them. Consecutive texts of one role are one
    text."""
    messages = TemplateMessages()
    for turn in turns:
        if isinstance(turn.content, str):
            messages.extend_text(turn.role, turn.content)
            continue
        for block in turn.content:
            if isinstance(block, TextBlock):
                messages.extend_text(turn.role, block.text)
            elif isinstance(block, ThinkingBlock):
                messages.add_reasoning([block.thinking] if block.thinking else [])
            elif isinstance(block, ToolUseBlock):
                messages.add_call(template_call(block.name, block.input, block.id))
            elif isinstance(block, ToolResultBlock):
                messages.add_result(block.tool_use_id, joined(block.content))
    return messages
