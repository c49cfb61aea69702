"""The functions that a model may call, and which it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strobe.server.openai.protocol.common import TEXT_SCHEMA, Notes, closed, take
from strobe.server.openai.protocol.errors import BadField, shown, wrong

TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")

_FUNCTION: dict[str, Any] = {
    "name": TEXT_SCHEMA,
    "description": {"type": "string"},
    "parameters": {"type": "object"},
    "strict": {"type": "boolean"},
}
_KIND: dict[str, Any] = {"const": "function"}


def _schemas(flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schemas of tools and tool_choice."""

    def function(fields: dict[str, Any], place: str) -> dict[str, Any]:
        if flat:
            return closed({"type": _KIND, **fields}, place, ("type", "name"))
        inner = closed(fields, "", ("name",))
        return closed({"type": _KIND, "function": inner}, place, ("type", "function"))

    def allowed(fields: dict[str, Any]) -> dict[str, Any]:
        kind: dict[str, Any] = {"const": "allowed_tools"}
        if flat:
            return closed({"type": kind, **fields}, "", ("type", *fields))
        inner = closed(fields, "", tuple(fields))
        return closed({"type": kind, "allowed_tools": inner}, "", ("type", "allowed_tools"))

    named = function({"name": {"type": "string"}}, "")
    only = {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": named},
    }
    tools = {"type": "array", "items": function(_FUNCTION, "responses.tool" if flat else "tool")}
    return tools, {"anyOf": [{"enum": ["none", "auto", "required"]}, named, allowed(only)]}


TOOLS_SCHEMA, CHOICE_SCHEMA = _schemas(flat=False)
FLAT_TOOLS_SCHEMA, FLAT_CHOICE_SCHEMA = _schemas(flat=True)
"""Those of /v1/responses."""


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model must call a function. name: the one it must call, with "required"."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer is a call and nothing else."""
        return self.mode == "required"


@dataclass(frozen=True)
class Toolbox:
    """tools: in chat form, as the prompt shows them; choice: which of them to call; strict: the
    paths of the tools that ask for their schema to be held."""

    tools: tuple[dict[str, Any], ...]
    choice: ToolChoice
    strict: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


def read_toolbox(tools: Any, choice: Any, notes: Notes, *, flat: bool = False) -> Toolbox:
    """A request's tools and tool_choice. flat: in the form of /v1/responses, where a tool's fields
    are not inside `function`. Raises BadField."""
    read, strict = _tools(tools, notes, flat)
    names = [tool["function"]["name"] for tool in read]
    if choice is None:
        choice = "auto" if read else "none"
    if choice == "none":
        return Toolbox((), ToolChoice("none"))
    chosen, allowed = _choice(choice, names, notes, flat)
    if allowed is not None:
        read = [tool for tool in read if tool["function"]["name"] in allowed]
    if chosen.forced and not read:
        raise BadField(
            f"tool_choice is {shown(choice)}, but there are no tools; give tools as well.",
            "tool_choice",
        )
    if chosen.mode == "auto" and not read:
        chosen = ToolChoice("none")
    return Toolbox(tuple(read), chosen, strict)


def _tools(given: Any, notes: Notes, flat: bool) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    if given is None:
        return [], ()
    if not isinstance(given, list | tuple):
        raise wrong("tools", given, "a list of tools")
    tools: list[dict[str, Any]] = []
    strict: list[str] = []
    names: set[str] = set()
    for index, one in enumerate(given):
        path = f"tools[{index}]"
        inner = path if flat else f"{path}.function"
        function = _function(one, path, inner, notes, flat)
        name = function["name"]
        if name in names:
            raise BadField(
                f"{inner}.name is {shown(name)}, as that of an earlier tool; give each its own.",
                f"{inner}.name",
            )
        names.add(name)
        if function.pop("strict", False):
            strict.append(f"{inner}.strict")
        tools.append({"type": "function", "function": function})
    return tools, tuple(strict)


def _function(tool: Any, path: str, inner: str, notes: Notes, flat: bool) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise wrong(path, tool, "a tool with a type and a function")
    if tool.get("type") != "function":
        raise wrong(f"{path}.type", tool.get("type"), '"function"', "other tools are not supported")
    known = ("type", *FUNCTION_FIELDS) if flat else TOOL_FIELDS
    taken = take(tool, known, "responses.tool" if flat else "tool", path, lenient=notes.lenient)
    notes += taken.notes
    fields = taken.fields
    if not flat:
        fields = _inner(fields.get("function"), FUNCTION_FIELDS, inner, notes)
    function = {name: value for name, value in fields.items() if name != "type"}
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise wrong(f"{inner}.name", name, "the name of a function")
    if not isinstance(function.get("description", ""), str):
        raise wrong(f"{inner}.description", function["description"], "a text")
    if not isinstance(function.get("parameters", {}), Mapping):
        raise wrong(f"{inner}.parameters", function["parameters"], "a JSON schema, as an object")
    if not isinstance(function.get("strict", False), bool):
        raise wrong(f"{inner}.strict", function["strict"], "true or false")
    return function


def _inner(given: Any, known: Sequence[str], path: str, notes: Notes) -> dict[str, Any]:
    """The fields of an object that has no tables."""
    taken = take(given, known, "", path, lenient=notes.lenient)
    notes += taken.notes
    return taken.fields


def _choice(
    given: Any, names: Sequence[str], notes: Notes, flat: bool
) -> tuple[ToolChoice, frozenset[str] | None]:
    """tool_choice, and the only names that remain, None for all."""
    if given in ("auto", "required"):
        return ToolChoice(given), None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function":
        name = _name(given, "tool_choice", notes, flat)
        _offered(name, names, "tool_choice")
        return ToolChoice("required", name), None
    if kind == "allowed_tools":
        path = "tool_choice" if flat else "tool_choice.allowed_tools"
        known = ("type", "mode", "tools") if flat else ("type", kind)
        fields = _inner(given, known, "tool_choice", notes)
        if not flat:
            fields = _inner(fields.get(kind), ("mode", "tools"), path, notes)
        if fields.get("mode") not in ("auto", "required"):
            raise wrong(f"{path}.mode", fields.get("mode"), '"auto" or "required"')
        listed = fields.get("tools")
        if not isinstance(listed, list | tuple) or not listed:
            raise wrong(f"{path}.tools", listed, "a list of one or more tools")
        allowed: set[str] = set()
        for index, one in enumerate(listed):
            place = f"{path}.tools[{index}]"
            if not isinstance(one, Mapping) or one.get("type") != "function":
                raise wrong(place, one, 'a tool of the type "function"')
            name = _name(one, place, notes, flat)
            _offered(name, names, place)
            allowed.add(name)
        return ToolChoice(fields["mode"]), frozenset(allowed)
    raise wrong(
        "tool_choice",
        given,
        'none, auto, required or an object of the type "function" or "allowed_tools"',
    )


def _name(given: Mapping[str, Any], path: str, notes: Notes, flat: bool) -> str:
    """The name in {"type": "function", "function": {"name": ...}}, or in the flat form of it."""
    fields = _inner(given, ("type", "name") if flat else TOOL_FIELDS, path, notes)
    if not flat:
        path = f"{path}.function"
        fields = _inner(fields.get("function"), ("name",), path, notes)
    name = fields.get("name")
    if not isinstance(name, str):
        raise wrong(f"{path}.name", name, "the name of a function")
    return name


def _offered(name: str, names: Sequence[str], path: str) -> None:
    if name not in names:
        said = f"tools has {', '.join(names)}" if names else "tools is empty"
        raise BadField(f"{path} names the function {shown(name)}, but {said}.", path)
