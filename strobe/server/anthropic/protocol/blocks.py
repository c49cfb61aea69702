"""The messages of /v1/messages, lists of blocks, and the items of /v1/responses they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strobe.server.openai.protocol.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReadItem,
    ReasoningItem,
)
from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
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


def to_items(turns: Sequence[Turn]) -> list[ReadItem]:
    """Return the messages as items, with consecutive texts of one role merged into one message."""
    items: list[ReadItem] = []
    for turn in turns:
        if isinstance(turn.content, str):
            _add_text(items, turn.role, turn.content)
            continue
        for block in turn.content:
            if isinstance(block, TextBlock):
                _add_text(items, turn.role, block.text)
            elif not isinstance(block, RedactedThinkingBlock):
                items.append(_item(block))
    return items


def _add_text(
    items: list[ReadItem], role: Literal["user", "assistant", "system"], text: str
) -> None:
    last = items[-1] if items else None
    if isinstance(last, MessageItem) and last.role == role:
        items.pop()
        text = f"{last.content}\n{text}"
    items.append(MessageItem(role=role, content=text))


def _item(block: ThinkingBlock | ToolUseBlock | ToolResultBlock) -> ReadItem:
    if isinstance(block, ThinkingBlock):
        parts = [{"text": block.thinking}] if block.thinking else []
        return ReasoningItem.model_validate({"type": "reasoning", "content": parts})
    if isinstance(block, ToolUseBlock):
        return FunctionCallItem(
            type="function_call", call_id=block.id, name=block.name, arguments=block.input
        )
    return FunctionCallOutputItem(
        type="function_call_output", call_id=block.tool_use_id, output=joined(block.content)
    )
