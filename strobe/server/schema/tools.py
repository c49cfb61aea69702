"""The request's tools and tool choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.values import TEXT_SCHEMA

TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")

_FUNCTION: dict[str, Any] = {
    "name": TEXT_SCHEMA,
    "description": {"type": "string"},
    "parameters": {"type": "object"},
    "strict": {"type": "boolean"},
}
_KIND: dict[str, Any] = {"const": "function"}
_HOSTED: dict[str, Any] = {
    "type": "object",
    "description": "Skipped, with a warning.",
    "properties": {"type": {"type": "string", "minLength": 1, "not": _KIND}},
    "required": ["type"],
}
"""A tool of /v1/responses that is no function, such as a web search."""


def _schemas(flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schemas of tools and tool_choice."""

    def function(fields: dict[str, Any], place: str) -> dict[str, Any]:
        if flat:
            return object_schema({"type": _KIND, **fields}, place, ("type", "name"))
        inner = object_schema(fields, "", ("name",))
        return object_schema({"type": _KIND, "function": inner}, place, ("type", "function"))

    def allowed(fields: dict[str, Any]) -> dict[str, Any]:
        kind: dict[str, Any] = {"const": "allowed_tools"}
        if flat:
            return object_schema({"type": kind, **fields}, "", ("type", *fields))
        inner = object_schema(fields, "", tuple(fields))
        return object_schema({"type": kind, "allowed_tools": inner}, "", ("type", "allowed_tools"))

    name_schema = function({"name": {"type": "string"}}, "")
    listed = {"anyOf": [name_schema, _HOSTED]} if flat else name_schema
    allowed_schema = {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": listed},
    }
    tool = function(_FUNCTION, "responses.tool" if flat else "tool")
    tools: dict[str, Any] = {"type": "array", "items": {"anyOf": [tool, _HOSTED]} if flat else tool}
    return tools, {
        "anyOf": [{"enum": ["none", "auto", "required"]}, name_schema, allowed(allowed_schema)]
    }


TOOLS_SCHEMA, CHOICE_SCHEMA = _schemas(flat=False)
FLAT_TOOLS_SCHEMA, FLAT_CHOICE_SCHEMA = _schemas(flat=True)
"""The same schemas for /v1/responses."""


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model must call a function. name: with "required", the function to call."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer is a call and nothing else."""
        return self.mode == "required"


@dataclass(frozen=True)
class Toolbox:
    """A request's tools, in chat form, and tool choice. strict: the paths of the tools' `strict`
    fields that are true."""

    tools: tuple[dict[str, Any], ...]
    choice: ToolChoice
    strict: tuple[str, ...] = ()


def read_toolbox(
    tools: object, choice: object, warnings: FieldWarnings, *, flat: bool = False
) -> Toolbox:
    """Read a request's tools and tool_choice. flat: the form of /v1/responses, in which a tool's
    fields are not inside `function`, and tools of other types than functions are skipped with a
    warning. Raises FieldError."""
    functions, strict = _tools(tools, warnings, flat)
    names = [tool["function"]["name"] for tool in functions]
    if choice is None:
        choice = "auto" if functions else "none"
    if choice == "none":
        return Toolbox((), ToolChoice("none"))
    tool_choice, allowed = _choice(choice, names, warnings, flat)
    if allowed is not None:
        functions = [tool for tool in functions if tool["function"]["name"] in allowed]
    if tool_choice.forced and not functions:
        raise FieldError(
            f"tool_choice is {short_json(choice)}, but there are no tools; give tools as well.",
            "tool_choice",
        )
    if tool_choice.mode == "auto" and not functions:
        tool_choice = ToolChoice("none")
    return Toolbox(tuple(functions), tool_choice, strict)


def _tools(
    value: object, warnings: FieldWarnings, flat: bool
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    if value is None:
        return [], ()
    if not isinstance(value, list | tuple):
        raise invalid_value("tools", value, "a list of tools")
    tools: list[dict[str, Any]] = []
    strict: list[str] = []
    names: set[str] = set()
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        if flat and _is_hosted(tool):
            warnings.append(_skipped(tool, path))
            continue
        inner = path if flat else f"{path}.function"
        function = _function(tool, path, inner=inner, warnings=warnings, flat=flat)
        name = function["name"]
        if name in names:
            raise FieldError(
                f"{inner}.name is {short_json(name)}, the name of an earlier tool; give each tool "
                "its own.",
                f"{inner}.name",
            )
        names.add(name)
        if function.pop("strict", False):
            strict.append(f"{inner}.strict")
        tools.append({"type": "function", "function": function})
    return tools, tuple(strict)


def _is_hosted(tool: object) -> bool:
    """Whether a tool of /v1/responses is no function."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind not in ("", "function")


def _skipped(tool: Mapping[str, Any], path: str) -> str:
    """The warning for a tool that is no function."""
    name = tool.get("name", tool.get("server_label"))
    named = f" ({short_json(name)})" if isinstance(name, str) else ""
    return (
        f"{path}{named} has no effect: tools of the type {short_json(tool['type'])} are not "
        "supported, only functions."
    )


def _function(
    tool: object, path: str, *, inner: str, warnings: FieldWarnings, flat: bool
) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise invalid_value(path, tool, "a tool with a type and a function")
    if tool.get("type") != "function":
        raise invalid_value(
            f"{path}.type", tool.get("type"), '"function"', "other tools are not supported"
        )
    known_fields = ("type", *FUNCTION_FIELDS) if flat else TOOL_FIELDS
    fields = warnings.split(tool, known_fields, "responses.tool" if flat else "tool", path)
    if not flat:
        fields = warnings.split(fields.get("function"), FUNCTION_FIELDS, "", inner)
    function = {name: value for name, value in fields.items() if name != "type"}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid_value(f"{inner}.name", name, "the name of a function")
    if not isinstance(function.get("description", ""), str):
        raise invalid_value(f"{inner}.description", function["description"], "a string")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise invalid_value(
            f"{inner}.parameters", function["parameters"], "a JSON schema, as an object"
        )
    if not isinstance(function.get("strict", False), bool):
        raise invalid_value(f"{inner}.strict", function["strict"], "true or false")
    return function


def _choice(
    value: Any, names: Sequence[str], warnings: FieldWarnings, flat: bool
) -> tuple[ToolChoice, frozenset[str] | None]:
    """Return the tool choice and the names of the allowed tools, None for all."""
    if value in ("auto", "required"):
        return ToolChoice(value), None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        name = _name(value, "tool_choice", warnings, flat)
        _offered(name, names, "tool_choice")
        return ToolChoice("required", name), None
    if kind == "allowed_tools":
        path = "tool_choice" if flat else "tool_choice.allowed_tools"
        known_fields = ("type", "mode", "tools") if flat else ("type", kind)
        fields = warnings.split(value, known_fields, "", "tool_choice")
        if not flat:
            fields = warnings.split(fields.get(kind), ("mode", "tools"), "", path)
        if fields.get("mode") not in ("auto", "required"):
            raise invalid_value(f"{path}.mode", fields.get("mode"), '"auto" or "required"')
        listed = fields.get("tools")
        if not isinstance(listed, list | tuple) or not listed:
            raise invalid_value(f"{path}.tools", listed, "a list of one or more tools")
        allowed: set[str] = set()
        for index, entry in enumerate(listed):
            place = f"{path}.tools[{index}]"
            if flat and _is_hosted(entry):
                warnings.append(_skipped(entry, place))
                continue
            if not isinstance(entry, Mapping) or entry.get("type") != "function":
                raise invalid_value(place, entry, 'a tool of the type "function"')
            name = _name(entry, place, warnings, flat)
            _offered(name, names, place)
            allowed.add(name)
        return ToolChoice(fields["mode"]), frozenset(allowed)
    raise invalid_value(
        "tool_choice",
        value,
        'none, auto, required or an object of the type "function" or "allowed_tools"',
    )


def _name(value: Mapping[str, Any], path: str, warnings: FieldWarnings, flat: bool) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or in its flat form."""
    fields = warnings.split(value, ("type", "name") if flat else TOOL_FIELDS, "", path)
    if not flat:
        path = f"{path}.function"
        fields = warnings.split(fields.get("function"), ("name",), "", path)
    name = fields.get("name")
    if not isinstance(name, str):
        raise invalid_value(f"{path}.name", name, "the name of a function")
    return name


def _offered(name: str, names: Sequence[str], path: str) -> None:
    if name not in names:
        offer = f"tools has {', '.join(names)}" if names else "tools is empty"
        raise FieldError(f"{path} names the function {short_json(name)}, but {offer}.", path)
