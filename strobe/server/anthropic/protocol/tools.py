"""Converts the tools and tool choice of /v1/messages to a chat's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.values import TEXT_SCHEMA

TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict")
CHOICES = ("auto", "any", "tool", "none")

TOOLS_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": object_schema(
        {
            "type": {"const": "custom"},
            "name": TEXT_SCHEMA,
            "description": {"type": "string"},
            "input_schema": {"type": "object"},
            "strict": {"type": "boolean"},
        },
        "messages.tool",
        ("name", "input_schema"),
    ),
}
_DISABLE_PARALLEL: dict[str, Any] = {"disable_parallel_tool_use": {"type": "boolean"}}
CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema({"type": {"const": "none"}}, "", ("type",)),
        object_schema({"type": {"enum": ["auto", "any"]}, **_DISABLE_PARALLEL}, "", ("type",)),
        object_schema(
            {"type": {"const": "tool"}, "name": {"type": "string"}, **_DISABLE_PARALLEL},
            "",
            ("type", "name"),
        ),
    ]
}


def read_tools(tools: object, warnings: FieldWarnings) -> list[dict[str, Any]]:
    """Return the tools in a chat's format. Raises FieldError."""
    if tools is None:
        return []
    if not isinstance(tools, list | tuple):
        raise invalid_value("tools", tools, "a list of tools")
    return [_tool(tool, f"tools[{index}]", warnings) for index, tool in enumerate(tools)]


def _tool(tool: object, path: str, warnings: FieldWarnings) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise invalid_value(path, tool, "a tool with a name and an input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise FieldError(
            f"{path}.type is {short_json(kind)}, which is not supported: this server brings no "
            'tools of its own; leave it out, or give "custom".',
            f"{path}.type",
            "unsupported_parameter",
        )
    function = warnings.split(tool, TOOL_FIELDS, "messages.tool", path)
    function.pop("type", None)
    schema = function.pop("input_schema", None)
    if not isinstance(schema, Mapping):
        raise invalid_value(f"{path}.input_schema", schema, "a JSON schema, as an object")
    return {"type": "function", "function": {**function, "parameters": schema}}


def read_choice(
    value: object, tools: list[dict[str, Any]], warnings: FieldWarnings
) -> dict[str, Any]:
    """Return a chat's tool_choice and parallel_tool_calls. Raises FieldError."""
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in CHOICES:
        place = "tool_choice.type" if isinstance(value, Mapping) else "tool_choice"
        shape = "one of" if isinstance(value, Mapping) else "an object with a type, one of"
        raise invalid_value(place, value if kind is None else kind, f"{shape} {', '.join(CHOICES)}")
    known_fields = ["type", *(("name",) if kind == "tool" else ())]
    known_fields += ["disable_parallel_tool_use"] if kind != "none" else []
    fields = warnings.split(value, known_fields, "", "tool_choice")
    single = fields.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        raise invalid_value("tool_choice.disable_parallel_tool_use", single, "true or false")
    if kind in ("any", "tool") and not tools:
        raise FieldError(
            f"tool_choice is {short_json(value)}, but there are no tools; give tools as well.",
            "tool_choice",
        )
    choice: object = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        if not isinstance(fields.get("name"), str):
            raise invalid_value("tool_choice.name", fields.get("name"), "the name of a tool")
        choice = {"type": "function", "function": {"name": fields["name"]}}
    parallel = not single if "disable_parallel_tool_use" in fields else None
    return {"tool_choice": choice, "parallel_tool_calls": parallel}
