"""The tools and tool choice of /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.tools import FunctionName, ToolChoice
from strobe.server.schema.values import Flag, JsonSchema, Must, OneOf, Text


class MessagesTool(RequestObject):
    """A tool of /v1/messages."""

    schema_key: ClassVar[str] = "messages.tool"

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: JsonSchema
    strict: Flag = False

    def in_chat(self) -> dict[str, Any]:
        """The tool as chat templates read it, in the order of the client's fields."""
        names = ("name", "description")
        function = {name: value for name, value in self.sent.items() if name in names}
        function["parameters"] = self.input_schema
        return {"type": "function", "function": function}


def _tool(value: Mapping[str, Any]) -> type[MessagesTool]:
    kind = value.get("type")
    if kind not in (None, "custom"):
        raise FieldError(
            f"{HERE}.type is {short_json(kind)}, which is not supported: this server brings no "
            'tools of its own; leave it out, or give "custom".',
            f"{HERE}.type",
            "unsupported_parameter",
        )
    return MessagesTool


MessagesTools = list[
    Annotated[
        MessagesTool, OneOf(choose=_tool, requirement="a tool with a name and an input_schema")
    ]
]


class NoToolChoice(RequestObject):
    """No tools: the prompt contains none."""

    type: Literal["none"]


class AnyToolChoice(RequestObject):
    """The choice of whether the model must call a tool."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: Flag | None = None


class NamedToolChoice(RequestObject):
    """The choice of the tool that the model must call."""

    type: Literal["tool"]
    name: Annotated[str, Must("the name of a tool")]
    disable_parallel_tool_use: Flag | None = None


CHOICES: Mapping[str, type[NoToolChoice | AnyToolChoice | NamedToolChoice]] = {
    "auto": AnyToolChoice,
    "any": AnyToolChoice,
    "tool": NamedToolChoice,
    "none": NoToolChoice,
}


def _choice(
    value: Mapping[str, Any],
) -> type[NoToolChoice | AnyToolChoice | NamedToolChoice]:
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in CHOICES:
        shown = value if kind is None else kind
        raise FieldError.of_value(f"{HERE}.type", shown, f"one of {', '.join(CHOICES)}")
    return CHOICES[kind]


MessagesToolChoice = Annotated[
    NoToolChoice | AnyToolChoice | NamedToolChoice,
    OneOf(choose=_choice, requirement=f"an object with a type, one of {', '.join(CHOICES)}"),
]


def to_tool_choice(choice: MessagesToolChoice | None, *, has_tools: bool) -> ToolChoice | None:
    """Return the choice, None if the request has none. Raises FieldError."""
    if choice is None:
        return None
    if choice.type in ("any", "tool") and not has_tools:
        raise FieldError(
            f"tool_choice is {short_json(choice.sent)}, but there are no tools; give tools as "
            "well.",
            "tool_choice",
        )
    if isinstance(choice, NamedToolChoice):
        return ToolChoice("required", choice.name)
    return ToolChoice("required" if choice.type == "any" else choice.type)


def parallel_tool_calls(choice: MessagesToolChoice | None) -> bool | None:
    """Return whether an answer may have several calls, None if the choice does not say."""
    if choice is None or isinstance(choice, NoToolChoice):
        return None
    disabled = choice.disable_parallel_tool_use
    return None if disabled is None else not disabled
