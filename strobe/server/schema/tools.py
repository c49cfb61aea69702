"""The request's tools and tool choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, get_args

from pydantic import BaseModel, ConfigDict, Field

from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.values import Flag, JsonSchema, Must, OneOf, Text

FunctionName = Annotated[str, Field(min_length=1), Must("the name of a function")]


class Function(RequestObject):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: Flag = False

    def in_chat(self) -> dict[str, Any]:
        """The tool as chat templates read it, in the order of the client's fields."""
        names = ("name", "description", "parameters")
        function = {name: value for name, value in self.sent.items() if name in names}
        return {"type": "function", "function": function}


class Tool(RequestObject):
    """A tool of a chat."""

    schema_key: ClassVar[str] = "tool"

    type: Literal["function"]
    function: Annotated[Function, Must("a JSON object")]


class ResponsesTool(Function):
    """A tool of /v1/responses, whose fields are not inside `function`."""

    schema_key: ClassVar[str] = "responses.tool"

    type: Literal["function"]


class HostedTool(BaseModel):
    """Skipped, with a warning."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str = Field(min_length=1, json_schema_extra={"not": {"const": "function"}})

    def skipped(self, path: str) -> str:
        """The warning for the tool."""
        extra = self.model_extra or {}
        name = extra.get("name", extra.get("server_label"))
        named = f" ({short_json(name)})" if isinstance(name, str) else ""
        return (
            f"{path}{named} has no effect: tools of the type {short_json(self.type)} are not "
            "supported, only functions."
        )


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """Whether a tool of /v1/responses is no function."""
    kind = tool.get("type")
    return isinstance(kind, str) and kind not in ("", "function")


_TOOL = "a tool with a type and a function"


def _check_function(value: Mapping[str, Any]) -> None:
    if value.get("type") != "function":
        raise FieldError.of_value(
            f"{HERE}.type", value.get("type"), '"function"', "other tools are not supported"
        )


def _tool(value: Mapping[str, Any]) -> type[Tool]:
    _check_function(value)
    return Tool


def _responses_tool(value: Mapping[str, Any]) -> type[ResponsesTool | HostedTool]:
    if _is_hosted(value):
        return HostedTool
    _check_function(value)
    return ResponsesTool


ChatTools = list[Annotated[Tool, OneOf(choose=_tool, requirement=_TOOL)]]
ResponsesTools = list[
    Annotated[ResponsesTool | HostedTool, OneOf(choose=_responses_tool, requirement=_TOOL)]
]


class FunctionReference(RequestObject):
    """A function of the request's tools, by name."""

    name: Annotated[str, Must("the name of a function")]


class NamedTool(RequestObject):
    """A tool of a chat, by name."""

    type: Literal["function"]
    function: Annotated[FunctionReference, Must("a JSON object")]

    @property
    def name(self) -> str:
        return self.function.name


class NamedResponsesTool(FunctionReference):
    """A tool of /v1/responses, by name."""

    type: Literal["function"]


_NAMED = 'a tool of the type "function"'


def _named_tool(value: Mapping[str, Any]) -> type[NamedTool]:
    if value.get("type") != "function":
        raise FieldError.of_value(HERE, value, _NAMED)
    return NamedTool


def _named_responses_tool(value: Mapping[str, Any]) -> type[NamedResponsesTool | HostedTool]:
    if _is_hosted(value):
        return HostedTool
    _named_tool(value)
    return NamedResponsesTool


_Mode = Annotated[Literal["auto", "required"], Must('"auto" or "required"')]
_SomeTools = (Field(min_length=1), Must("a list of one or more tools"))


class AllowedTools(RequestObject):
    """The tools that the model may call, and whether it must call one."""

    mode: _Mode
    tools: Annotated[
        list[Annotated[NamedTool, OneOf(choose=_named_tool, requirement=_NAMED)]], *_SomeTools
    ]


class AllowedToolsChoice(RequestObject):
    """A chat's choice of some of its tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Annotated[AllowedTools, Must("a JSON object")]


_NamedResponsesTool = Annotated[
    NamedResponsesTool | HostedTool, OneOf(choose=_named_responses_tool, requirement=_NAMED)
]


class AllowedResponsesTools(RequestObject):
    """The choice of some of the tools of /v1/responses."""

    type: Literal["allowed_tools"]
    mode: _Mode
    tools: Annotated[
        list[
            Annotated[
                NamedResponsesTool | HostedTool,
                OneOf(choose=_named_responses_tool, requirement=_NAMED),
            ]
        ],
        *_SomeTools,
    ]


_CHOICE = 'none, auto, required or an object of the type "function" or "allowed_tools"'


@dataclass(frozen=True)
class _ChoiceOf:
    """Chooses the model of a tool_choice."""

    named: type[RequestObject]
    allowed: type[RequestObject]

    def __call__(self, value: Mapping[str, Any]) -> type[RequestObject]:
        kind = value.get("type")
        if kind == "function":
            return self.named
        if kind == "allowed_tools":
            return self.allowed
        raise FieldError.of_value(HERE, value, _CHOICE)


ChoiceWord = Literal["none", "auto", "required"]
_WORDS: tuple[str, ...] = get_args(ChoiceWord)
ChatToolChoice = Annotated[
    ChoiceWord | NamedTool | AllowedToolsChoice,
    OneOf(choose=_ChoiceOf(NamedTool, AllowedToolsChoice), requirement=_CHOICE, words=_WORDS),
]
ResponsesToolChoice = Annotated[
    ChoiceWord | NamedResponsesTool | AllowedResponsesTools,
    OneOf(
        choose=_ChoiceOf(NamedResponsesTool, AllowedResponsesTools),
        requirement=_CHOICE,
        words=_WORDS,
    ),
]


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


NO_TOOLS = Toolbox((), ToolChoice("none"))


class FlatTool(Protocol):
    """A tool whose fields are not inside `function`."""

    @property
    def name(self) -> str: ...
    @property
    def strict(self) -> bool: ...
    def in_chat(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        ...


def make_toolbox(
    tools: Sequence[Tool | FlatTool | HostedTool] | None,
    choice: ChatToolChoice | ResponsesToolChoice | ToolChoice | None,
    warnings: FieldWarnings,
) -> Toolbox:
    """Return the tools that the choice allows. warnings: gets a sentence for each tool that is no
    function. Raises FieldError."""
    functions, strict = _functions(tools or (), warnings)
    if choice is None:
        choice = "auto" if functions else "none"
    tool_choice, allowed = _choice(choice, functions, warnings)
    if tool_choice.mode == "none":
        return NO_TOOLS
    if tool_choice.forced and not allowed:
        sent = choice.sent if isinstance(choice, RequestObject) else choice
        raise FieldError(
            f"tool_choice is {short_json(sent)}, but there are no tools; give tools as well.",
            "tool_choice",
        )
    if tool_choice.mode == "auto" and not allowed:
        tool_choice = ToolChoice("none")
    in_chat = tuple(functions[name].in_chat() for name in functions if name in allowed)
    return Toolbox(in_chat, tool_choice, strict)


def _functions(
    tools: Sequence[Tool | FlatTool | HostedTool], warnings: FieldWarnings
) -> tuple[dict[str, FlatTool], tuple[str, ...]]:
    """Return the functions by name, and the paths of `strict` fields that are true."""
    functions: dict[str, FlatTool] = {}
    strict: list[str] = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if isinstance(tool, HostedTool):
            warnings.append(tool.skipped(path))
            continue
        if isinstance(tool, Tool):
            function: FlatTool = tool.function
            path = f"{path}.function"
        else:
            function = tool
        if function.name in functions:
            raise FieldError(
                f"{path}.name is {short_json(function.name)}, the name of an earlier tool; give "
                "each tool its own.",
                f"{path}.name",
            )
        functions[function.name] = function
        if function.strict:
            strict.append(f"{path}.strict")
    return functions, tuple(strict)


def _choice(
    choice: ChatToolChoice | ResponsesToolChoice | ToolChoice,
    names: Collection[str],
    warnings: FieldWarnings,
) -> tuple[ToolChoice, Collection[str]]:
    """Return the tool choice and the names of the tools that it allows."""
    if isinstance(choice, str):
        choice = ToolChoice(choice)
    elif isinstance(choice, NamedTool | NamedResponsesTool):
        choice = ToolChoice("required", choice.name)
    if isinstance(choice, ToolChoice):
        if choice.name is not None:
            _check_offered(choice.name, names, "tool_choice")
        return choice, names
    if isinstance(choice, AllowedToolsChoice):
        path = "tool_choice.allowed_tools.tools"
        allowed = choice.allowed_tools
    else:
        path = "tool_choice.tools"
        allowed = choice
    allowed_names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        place = f"{path}[{index}]"
        if isinstance(tool, HostedTool):
            warnings.append(tool.skipped(place))
            continue
        _check_offered(tool.name, names, place)
        allowed_names.add(tool.name)
    return ToolChoice(allowed.mode), allowed_names


def _check_offered(name: str, names: Collection[str], path: str) -> None:
    if name not in names:
        offer = f"tools has {', '.join(names)}" if names else "tools is empty"
        raise FieldError(f"{path} names the function {short_json(name)}, but {offer}.", path)
