"""The input of /v1/responses, a list of items, and the chat messages that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.messages import (
    Arguments,
    Content,
    RequiredContent,
    check_role,
    content_text,
    template_call,
)
from strobe.server.schema.template_messages import TemplateMessages
from strobe.server.schema.tools import FunctionName
from strobe.server.schema.values import Must, OneOf, OrText, Text

HOSTED_ITEM = re.compile(r"^(?!function_call$|function_call_output$)(\w+_(call|output)|mcp_\w+)$")
"""Types of items about tools other than functions, such as `web_search_call` and
`custom_tool_call_output`. They are skipped, since the model was not offered those tools."""


class Item(RequestObject):
    """An item. id and status come from an earlier response and are ignored."""

    schema_key: ClassVar[str] = "item"

    id: Any = None
    status: Any = None


class MessageItem(Item):
    """A message. Its type may be left out."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: RequiredContent

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        fields = super().split(data, warnings)
        check_role(fields.get("role"))
        return fields

    def add_to(self, messages: TemplateMessages) -> None:
        """Add the message."""
        role = "system" if self.role == "developer" else self.role
        messages.add_text(role, content_text(self.content))


class FunctionCallItem(Item):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Arguments | None = None

    def add_to(self, messages: TemplateMessages) -> None:
        """Add the call to its answer."""
        messages.add_call(template_call(self.name, self.arguments, self.call_id))


class FunctionCallOutputItem(Item):
    """The result of an earlier call of a function."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Must("the id of a function call")]
    output: Content

    def add_to(self, messages: TemplateMessages) -> None:
        """Add the result."""
        messages.add_result(self.call_id, content_text(self.output))


class ReasoningText(BaseModel):
    """A text of an answer's reasoning, or of its summary."""

    model_config = ConfigDict(extra="allow", frozen=True)

    text: str


_PART = "a part with a text"


def _reasoning_text(value: Mapping[str, Any]) -> type[ReasoningText]:
    if not isinstance(value.get("text"), str):
        raise FieldError.of_value(HERE, value, _PART)
    return ReasoningText


ReasoningTexts = Annotated[
    list[Annotated[ReasoningText, OneOf(choose=_reasoning_text, requirement=_PART)]],
    Must("a list of strings"),
]


class ReasoningItem(Item):
    """The reasoning of an earlier answer, or its summary if it has nothing else."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None

    def add_to(self, messages: TemplateMessages) -> None:
        """Add the reasoning to its answer."""
        messages.add_reasoning([part.text for part in self.content or self.summary or ()])


class HostedItem(BaseModel):
    """Skipped, with a warning."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(json_schema_extra={"pattern": HOSTED_ITEM.pattern})


ReadItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
ITEMS: Mapping[str, type[ReadItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


def is_hosted(item: Mapping[str, Any]) -> bool:
    """Whether an item is about a tool other than a function."""
    kind = item.get("type")
    return isinstance(kind, str) and HOSTED_ITEM.match(kind) is not None


def _item(value: Mapping[str, Any]) -> type[ReadItem | HostedItem]:
    if is_hosted(value):
        return HostedItem
    kind = value.get("type")
    if kind is None:
        kind = "message"
    if not isinstance(kind, str) or kind not in ITEMS:
        raise FieldError(
            f"{HERE}.type is {short_json(kind)}, which is not supported; the types are "
            f"{', '.join(ITEMS)}.",
            f"{HERE}.type",
            "unsupported_parameter",
        )
    return ITEMS[kind]


Items = list[
    Annotated[ReadItem | HostedItem, OneOf(choose=_item, requirement="an item with a type")]
]
Input = Annotated[
    str | Annotated[Items, Field(min_length=1)],
    OrText(),
    Must("a string, or a list of one or more items"),
]
STORED_ITEMS = TypeAdapter[Items](Items)
"""Reads the items of a stored conversation."""


def input_messages(
    value: str | Sequence[ReadItem | HostedItem],
    instructions: str | None,
    warnings: FieldWarnings,
) -> list[dict[str, Any]]:
    """Return the input as messages that a chat template reads. Raises FieldError.

    warnings: gets a sentence for each item that is skipped.
    """
    system = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*system, {"role": "user", "content": value}]
    messages = TemplateMessages()
    for index, item in enumerate(value):
        if isinstance(item, HostedItem):
            warnings.append(
                f"input[{index}] has no effect: items of the type {short_json(item.type)} are not "
                "shown to the model."
            )
        else:
            item.add_to(messages)
    conversation = [*system, *messages.finished()]
    if not conversation:
        raise FieldError(
            "input has only items that are not shown to the model; give a message as well.", "input"
        )
    return conversation
