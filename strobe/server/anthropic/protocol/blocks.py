"""Converts the messages of /v1/messages, lists of blocks, to the items of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.values import TEXT_SCHEMA

ROLES = ("user", "assistant", "system")
BLOCK_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id", "content"),
}
"""Fields of each type of block. A signature is accepted and ignored."""

OWNERS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks in each role's messages."""

_TEXT: dict[str, Any] = {"type": "string"}


def _shape(kind: str) -> dict[str, Any]:
    """The JSON schema of a block."""
    values = {**dict.fromkeys(BLOCK_FIELDS[kind], _TEXT), "type": {"const": kind}}
    needed = [name for name in BLOCK_FIELDS[kind] if name not in ("signature", "content")]
    if kind == "tool_use":
        values |= {"name": TEXT_SCHEMA, "input": {"type": "object"}}
    elif kind == "tool_result":
        values["content"] = TEXTS_SCHEMA
    return object_schema(values, "block", ("type", *needed))


def _texts_or(blocks: list[dict[str, Any]], min_items: int = 0) -> dict[str, Any]:
    listed = {"type": "array", "minItems": min_items, "items": {"anyOf": blocks}}
    return {"anyOf": [_TEXT, listed]}


TEXTS_SCHEMA = _texts_or([_shape("text")])
"""A text, or a list of text blocks."""

MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            object_schema(
                {"role": {"const": role}, "content": _texts_or([*map(_shape, kinds)], min_items=1)},
                "",
                ("role", "content"),
            )
            for role, kinds in OWNERS.items()
        ]
    },
}


def read_items(messages: object, warnings: FieldWarnings) -> list[dict[str, Any]]:
    """Return the messages as items, with consecutive texts of one role merged into one message.
    warnings: gets a sentence for each field without effect. Raises FieldError."""
    if not isinstance(messages, list | tuple) or not messages:
        raise invalid_value("messages", messages, "a list of one or more messages")
    items: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        fields = warnings.split(message, ("role", "content"), "", path)
        role = fields.get("role")
        content = fields.get("content")
        if role not in ROLES:
            raise invalid_value(f"{path}.role", role, f"one of {', '.join(ROLES)}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        elif not isinstance(content, list | tuple) or not content:
            raise invalid_value(
                f"{path}.content", content, "a string, or a list of one or more blocks"
            )
        for place, block in enumerate(content):
            item = _item(block, role, f"{path}.content[{place}]", warnings)
            if item is not None:
                _add(items, item)
    return items


def read_texts(value: object, path: str, warnings: FieldWarnings) -> str:
    """Return a text, or the texts of a list of text blocks joined by newlines. Raises
    FieldError."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list | tuple):
        raise invalid_value(path, value, "a string, or a list of text blocks")
    blocks = [
        _block(entry, ("text",), f"{path}[{i}]", warnings)[1] for i, entry in enumerate(value)
    ]
    return "\n".join(block["text"] for block in blocks)


def _add(items: list[dict[str, Any]], item: dict[str, Any]) -> None:
    last = items[-1] if items else {}
    if item["type"] == "message" and last.get("role") == item["role"]:
        last["content"] += item["content"]
    else:
        items.append(item)


def _item(block: object, role: str, path: str, warnings: FieldWarnings) -> dict[str, Any] | None:
    kind, fields = _block(block, OWNERS[role], path, warnings)
    if kind == "text":
        part = {"type": "text", "text": fields["text"]}
        return {"type": "message", "role": role, "content": [part]}
    if kind == "thinking":
        text = [{"text": fields["thinking"]}] if fields["thinking"] else []
        return {"type": "reasoning", "content": text}
    if kind == "tool_use":
        call = {"call_id": fields["id"], "name": fields["name"], "arguments": fields["input"]}
        return {"type": "function_call", **call}
    if kind == "tool_result":
        output = read_texts(fields.get("content"), f"{path}.content", warnings)
        return {"type": "function_call_output", "call_id": fields["tool_use_id"], "output": output}
    return None


def _block(
    block: object, kinds: tuple[str, ...], path: str, warnings: FieldWarnings
) -> tuple[str, dict[str, Any]]:
    """Return a block's type and fields. kinds: the allowed types. Raises FieldError."""
    if not isinstance(block, Mapping):
        raise invalid_value(path, block, 'a block such as {"type": "text", "text": ...}')
    kind = block.get("type")
    if kind not in kinds:
        is_known = isinstance(kind, str) and kind in BLOCK_FIELDS
        why = "has no place there" if is_known else "is not supported: text and calls of tools are"
        raise FieldError(
            f"{path}.type is {short_json(kind)}, which {why}; the types there are "
            f"{', '.join(kinds)}.",
            f"{path}.type",
            "unsupported_parameter",
        )
    fields = warnings.split(block, ("type", *BLOCK_FIELDS[kind]), "block", path)
    for name in BLOCK_FIELDS[kind]:
        if name in ("signature", "content"):
            continue
        if name == "input":
            if not isinstance(fields.get(name), Mapping):
                raise invalid_value(
                    f"{path}.input", fields.get(name), "an object, the tool's arguments"
                )
        elif not isinstance(fields.get(name), str):
            raise invalid_value(f"{path}.{name}", fields.get(name), "a string")
    if fields.get("name") == "":
        raise invalid_value(f"{path}.name", "", "the name of a tool")
    if not isinstance(fields.get("signature", ""), str):
        raise invalid_value(f"{path}.signature", fields["signature"], "a string")
    return kind, fields
