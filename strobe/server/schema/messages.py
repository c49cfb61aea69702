"""Checks a chat's messages and converts them to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.values import TEXT_SCHEMA

ROLES = ("system", "developer", "user", "assistant", "tool")

EVERY_ROLE = ("role", "content", "name")
ASSISTANT_ONLY = ("tool_calls", "refusal", "reasoning_content", "reasoning")
TOOL_ONLY = ("tool_call_id",)
MAY_BE_EMPTY = ("assistant", "tool")
"""Roles whose messages need no content: an answer may be empty, and a tool may return nothing."""
TOOL_CALL_FIELDS = ("id", "type", "function", "index")
MESSAGE_FIELDS = (*EVERY_ROLE, *ASSISTANT_ONLY, *TOOL_ONLY)

PART_FIELDS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Content part types that are text, and the field that holds the text."""

_TEXT: dict[str, Any] = {"type": "string"}
_PARTS: list[dict[str, Any]] = [
    object_schema(
        {"type": {"enum": [kind for kind, name in PART_FIELDS.items() if name == "text"]},
         "text": _TEXT},
        "part", ("text",),
    ),
    object_schema({"type": {"const": "refusal"}, "refusal": _TEXT}, "part", ("type", "refusal")),
]  # fmt: skip
CONTENT_SCHEMA: dict[str, Any] = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": _PARTS}}]}
ARGUMENTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, _TEXT, {"type": "null"}]}
_CALLS: dict[str, Any] = {
    "type": "array",
    "items": object_schema(
        {
            "id": _TEXT,
            "type": {"const": "function"},
            "index": {},
            "function": object_schema(
                {"name": TEXT_SCHEMA, "arguments": ARGUMENTS_SCHEMA}, "", ("name",)
            ),
        },
        "tool_call",
        ("function",),
    ),
}
_NO_TEXT: dict[str, Any] = {"enum": [None, ""]}
_OTHER_ROLES_ONLY: dict[str, Any] = {
    **dict.fromkeys((*ASSISTANT_ONLY, *TOOL_ONLY), _NO_TEXT),
    "tool_calls": {"enum": [None, [], {}, "", 0, False]},
}
"""Fields of other roles must be empty."""
_NOT_ASSISTANT: dict[str, Any] = {**_OTHER_ROLES_ONLY, "content": CONTENT_SCHEMA, "name": _TEXT}
_ASSISTANT: dict[str, Any] = {
    **dict.fromkeys((*EVERY_ROLE, *ASSISTANT_ONLY), _TEXT),
    **dict.fromkeys(TOOL_ONLY, _NO_TEXT),
    "role": {"const": "assistant"},
    "content": CONTENT_SCHEMA,
    "tool_calls": _CALLS,
}
MESSAGE_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema(
            {**_NOT_ASSISTANT, "role": {"enum": ["system", "developer", "user"]}},
            "message", ("role", "content"),
        ),
        object_schema(
            {**_NOT_ASSISTANT, "role": {"const": "tool"}, "tool_call_id": _TEXT},
            "message", ("role",),
        ),
        object_schema(_ASSISTANT, "message", ("role",)),
    ]
}  # fmt: skip


def read_messages(messages: Sequence[Any], warnings: FieldWarnings) -> list[dict[str, Any]]:
    """Return the messages as the chat template reads them; reading the result again changes
    nothing. warnings: gets a sentence for each field without effect. Raises FieldError."""
    if not messages:
        raise invalid_value("messages", list(messages), "a list of one or more messages")
    return [read_message(message, f"messages[{i}]", warnings) for i, message in enumerate(messages)]


def read_message(message: object, path: str, warnings: FieldWarnings) -> dict[str, Any]:
    """Return one message as the chat template reads it. Raises FieldError.

    Content becomes text, or None where an answer has only calls or reasoning, the role developer
    becomes system, and the arguments of tool calls become objects if they are valid JSON.
    """
    fields = warnings.split(message, MESSAGE_FIELDS, "message", path)
    role = fields.get("role")
    if role not in ROLES:
        problem = "is missing" if role is None else f"is {short_json(role)}"
        raise FieldError(
            f"{path}.role {problem}, but must be one of {', '.join(ROLES)}.", f"{path}.role"
        )
    for names, owner in ((ASSISTANT_ONLY, "assistant"), (TOOL_ONLY, "tool")):
        for name in names:
            if role != owner and fields.get(name):
                raise FieldError(
                    f"{path}.{name} is set for the role {role}, but belongs to the role {owner}.",
                    f"{path}.{name}",
                )
    for name in ("name", "refusal", "reasoning_content", "reasoning", "tool_call_id"):
        if not isinstance(fields.get(name, ""), str):
            raise invalid_value(f"{path}.{name}", fields[name], "a string")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    read["content"] = read_content(fields.get("content"), f"{path}.content", warnings)
    read |= {name: fields[name] for name in ("name", "tool_call_id") if name in fields}
    if role == "assistant":
        read |= _assistant(fields, read["content"], path, warnings)
    if read["content"] is None and role in MAY_BE_EMPTY:
        has_more = read.get("tool_calls") or read.get("reasoning_content")
        read["content"] = None if has_more else ""
    elif read["content"] is None:
        raise FieldError(
            f"{path}.content is missing; give a string, or a list of text parts.",
            f"{path}.content",
            "missing_required_parameter",
        )
    return read


def _assistant(
    fields: Mapping[str, Any], content: str | None, path: str, warnings: FieldWarnings
) -> dict[str, Any]:
    """Return an assistant message's fields other than role and name. A refusal becomes content."""
    read: dict[str, Any] = {}
    if refusal := fields.get("refusal"):
        read["content"] = "\n".join([content, refusal] if content else [refusal])
    reasoning = fields.get("reasoning_content", fields.get("reasoning"))
    if reasoning != fields.get("reasoning", reasoning):
        raise FieldError(
            f"{path}.reasoning differs from {path}.reasoning_content; give one of them.",
            f"{path}.reasoning",
        )
    if reasoning:
        read["reasoning_content"] = reasoning
    if (calls := fields.get("tool_calls")) is not None:
        if not isinstance(calls, list | tuple):
            raise invalid_value(f"{path}.tool_calls", calls, "a list of tool calls")
        path = f"{path}.tool_calls"
        read_calls = [_tool_call(call, f"{path}[{i}]", warnings) for i, call in enumerate(calls)]
        if read_calls:
            read["tool_calls"] = read_calls
    return read


def read_content(content: object, path: str, warnings: FieldWarnings) -> str | None:
    """Return a message's text; the texts of several parts are joined by newlines. Raises
    FieldError."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise invalid_value(path, content, "a string, or a list of text parts")
    return "\n".join(_part(part, f"{path}[{i}]", warnings) for i, part in enumerate(content))


def _part(part: object, path: str, warnings: FieldWarnings) -> str:
    if not isinstance(part, Mapping):
        raise invalid_value(path, part, 'a part such as {"type": "text", "text": ...}')
    kind = "text" if part.get("type") is None else part["type"]
    field = PART_FIELDS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise FieldError(
            f"{path}.type is {short_json(kind)}, but only text is supported, no images, audio or "
            'files; give {"type": "text", "text": ...}.',
            f"{path}.type",
            "unsupported_parameter",
        )
    text = warnings.split(part, ("type", field), "part", path).get(field)
    if not isinstance(text, str):
        raise invalid_value(f"{path}.{field}", text, "a string")
    return text


def _tool_call(call: object, path: str, warnings: FieldWarnings) -> dict[str, Any]:
    """Return an earlier tool call. `index`, its position in a stream, is ignored."""
    fields = warnings.split(call, TOOL_CALL_FIELDS, "tool_call", path)
    if fields.get("type", "function") != "function":
        raise invalid_value(
            f"{path}.type", fields["type"], '"function"', "other tools are not supported"
        )
    inner = f"{path}.function"
    function = warnings.split(fields.get("function"), ("name", "arguments"), "", inner)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid_value(f"{path}.function.name", name, "the name of a function")
    if not isinstance(fields.get("id", ""), str):
        raise invalid_value(f"{path}.id", fields["id"], "a string")
    arguments = read_arguments(function.get("arguments"), f"{path}.function.arguments")
    read = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": fields["id"], **read} if "id" in fields else read


def read_arguments(arguments: object, path: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as text if they are not a JSON object."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        raise invalid_value(path, arguments, "a JSON string with an object")
    try:
        value = from_json(arguments, allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
