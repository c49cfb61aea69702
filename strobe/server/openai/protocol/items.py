"""Converts the input of /v1/responses to chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.messages import (
    ARGUMENTS_SCHEMA,
    CONTENT_SCHEMA,
    ROLES,
    read_arguments,
    read_content,
    read_message,
)
from strobe.server.schema.values import TEXT_SCHEMA

EVERY_ITEM = ("type", "id", "status")
"""Fields of every item. id and status come from an earlier response and are ignored."""

ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}

HOSTED_ITEM = re.compile(r"^(?!function_call$|function_call_output$)(\w+_(call|output)|mcp_\w+)$")
"""Types of items about tools other than functions, such as `web_search_call` and
`custom_tool_call_output`. They are skipped, since the model was not offered those tools."""

_THINKING: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["text"],
        "properties": {"text": {"type": "string"}},
    },
}
_VALUES: Mapping[str, dict[str, Any]] = {
    "role": {"enum": list(ROLES)},
    "content": CONTENT_SCHEMA,
    "call_id": {"type": "string"},
    "name": TEXT_SCHEMA,
    "arguments": ARGUMENTS_SCHEMA,
    "output": CONTENT_SCHEMA,
    "summary": _THINKING,
}


def _shape(kind: str) -> dict[str, Any]:
    """The JSON schema of an item; `type` is optional for a message."""
    fields = {name: _VALUES[name] for name in ITEM_FIELDS[kind]}
    fields |= {"id": {}, "status": {}, "type": {"const": kind}}
    if kind == "reasoning":
        return object_schema({**fields, "content": _THINKING}, "item", ("type",))
    needed = [name for name in ITEM_FIELDS[kind] if name != "arguments"]
    return object_schema(fields, "item", needed if kind == "message" else ["type", *needed])


_HOSTED: dict[str, Any] = {
    "type": "object",
    "description": "Skipped, with a warning.",
    "properties": {"type": {"type": "string", "pattern": HOSTED_ITEM.pattern}},
    "required": ["type"],
}
ITEM_SCHEMA: dict[str, Any] = {"anyOf": [*(_shape(kind) for kind in ITEM_FIELDS), _HOSTED]}


def read_input(
    value: object, instructions: str | None, warnings: FieldWarnings
) -> list[dict[str, Any]]:
    """Return the input as messages. Raises FieldError.

    Reasoning, text and calls of one answer are separate items, which become one message.
    warnings: gets a sentence for each field without effect and each item that is skipped.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list | tuple) or not value:
        raise invalid_value("input", value, "a string, or a list of one or more items")
    answer: dict[str, Any] | None = None
    for index, item in enumerate(value):
        path = f"input[{index}]"
        if is_hosted(item):
            warnings.append(
                f"{path} has no effect: items of the type {short_json(item['type'])} are not shown "
                "to the model."
            )
            continue
        kind, fields = _item(item, path, warnings)
        if kind == "message":
            message = read_message(
                {k: fields[k] for k in fields if k not in EVERY_ITEM}, path, warnings
            )
            if answer is not None and message["role"] == "assistant" and _is_bare(answer):
                answer.update(message)
                continue
            answer = message if message["role"] == "assistant" else None
            messages.append(message)
        elif kind == "function_call_output":
            answer = None
            messages.append(_output(fields, path, warnings))
        else:
            if answer is None or (kind == "reasoning" and not _is_bare(answer)):
                answer = {"role": "assistant", "content": None}
                messages.append(answer)
            if kind == "function_call":
                answer.setdefault("tool_calls", []).append(_call(fields, path))
            else:
                _add_reasoning(answer, fields, path)
    if not messages:
        raise FieldError(
            "input has only items that are not shown to the model; give a message as well.", "input"
        )
    return [_with_content(message) for message in messages]


def is_hosted(item: object) -> bool:
    """Whether an item is about a tool other than a function."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and HOSTED_ITEM.match(kind) is not None


def _is_bare(answer: Mapping[str, Any]) -> bool:
    """Whether an answer has neither text nor calls yet."""
    return answer["content"] is None and "tool_calls" not in answer


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with content, "" if it has neither content nor calls: reasoning that
    nothing followed."""
    empty = message["content"] is None and not message.get("tool_calls")
    return {**message, "content": ""} if empty else message


def _item(item: object, path: str, warnings: FieldWarnings) -> tuple[str, dict[str, Any]]:
    if not isinstance(item, Mapping):
        raise invalid_value(path, item, "an item with a type")
    kind = item.get("type")
    if kind is None:
        kind = "message"
    known_fields = ITEM_FIELDS.get(kind) if isinstance(kind, str) else None
    if known_fields is None:
        raise FieldError(
            f"{path}.type is {short_json(kind)}, which is not supported; the types are "
            f"{', '.join(ITEM_FIELDS)}.",
            f"{path}.type",
            "unsupported_parameter",
        )
    return kind, warnings.split(item, (*EVERY_ITEM, *known_fields), "item", path)


def _call(fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    for name in ("call_id", "name"):
        if not isinstance(fields.get(name), str):
            raise invalid_value(f"{path}.{name}", fields.get(name), "a string")
    if not fields["name"]:
        raise invalid_value(f"{path}.name", "", "the name of a function")
    arguments = read_arguments(fields.get("arguments"), f"{path}.arguments")
    function = {"name": fields["name"], "arguments": arguments}
    return {"id": fields["call_id"], "type": "function", "function": function}


def _output(fields: Mapping[str, Any], path: str, warnings: FieldWarnings) -> dict[str, Any]:
    if not isinstance(fields.get("call_id"), str):
        raise invalid_value(f"{path}.call_id", fields.get("call_id"), "the id of a function call")
    content = read_content(fields.get("output"), f"{path}.output", warnings)
    if content is None:
        raise invalid_value(f"{path}.output", None, "a string, or a list of text parts")
    return {"role": "tool", "content": content, "tool_call_id": fields["call_id"]}


def _texts(fields: Mapping[str, Any], name: str, path: str) -> list[str]:
    """The texts of a list of parts."""
    parts = fields.get(name, ())
    if not isinstance(parts, list | tuple):
        raise invalid_value(f"{path}.{name}", parts, "a list of strings")
    texts: list[str] = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise invalid_value(f"{path}.{name}[{index}]", part, "a part with a text")
        texts.append(text)
    return texts


def _add_reasoning(answer: dict[str, Any], fields: Mapping[str, Any], path: str) -> None:
    """Add the item's reasoning, or its summary if it has nothing else."""
    content, summary = (_texts(fields, name, path) for name in ("content", "summary"))
    texts = content or summary
    reasoning = [answer["reasoning_content"]] if "reasoning_content" in answer else []
    if joined := "\n".join([*reasoning, *texts]):
        answer["reasoning_content"] = joined
