"""Reads structural tags, in vLLM's older form and in the newer one of triggered tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from strobe.grammars.rules import Tag, text_with_tags
from strobe.grammars.source import lark, one_line
from strobe.server.openai.protocol.request_errors import FieldError, invalid_value, short_json
from strobe.server.schema.base import FieldWarnings, object_schema
from strobe.server.schema.values import TEXT_SCHEMA, texts

_SHAPE: dict[str, Any] = {"type": "object"}
_TRIGGERS: dict[str, Any] = {"type": "array", "minItems": 1, "items": TEXT_SCHEMA}
_OLD_TAG = object_schema(
    {"begin": TEXT_SCHEMA, "schema": _SHAPE, "end": {"type": "string"}}, "", ("begin", "schema")
)
CONTENTS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
"""The field of each type of content."""
_CONTENT: dict[str, Any] = {
    "anyOf": [
        object_schema(
            {
                "type": {"const": kind},
                name: _SHAPE if kind == name == "json_schema" else TEXT_SCHEMA,
            },
            "",
            ("type", name),
        )
        for kind, name in CONTENTS.items()
    ]
}
_NEW_TAG = object_schema(
    {"type": {"const": "tag"}, "begin": TEXT_SCHEMA, "content": _CONTENT,
     "end": {"type": "string"}},
    "",
    ("begin", "content"),
)  # fmt: skip
STRUCTURES_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "items": _OLD_TAG}
FORMAT_SCHEMA = object_schema(
    {"type": {"const": "triggered_tags"}, "triggers": _TRIGGERS,
     "tags": {"type": "array", "minItems": 1, "items": _NEW_TAG}},
    "triggered_tags",
    ("type", "triggers", "tags"),
)  # fmt: skip
TAGS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        object_schema(
            {"type": {"const": "structural_tag"}, "structures": STRUCTURES_SCHEMA,
             "triggers": _TRIGGERS},
            "",
            ("type", "structures", "triggers"),
        ),
        object_schema(
            {"type": {"const": "structural_tag"}, "format": FORMAT_SCHEMA}, "", ("type", "format")
        ),
    ]
}  # fmt: skip


def read_tags(value: object, path: str, warnings: FieldWarnings) -> list[Tag]:
    """Return the tags of an object, or of its text as JSON. Raises FieldError."""
    if isinstance(value, str):
        try:
            value = from_json(value, allow_inf_nan=False)
        except ValueError as error:
            raise invalid_value(
                path, value, "a structural tag", f"as JSON it fails: {error}"
            ) from None
    fields = warnings.split(value, ("type", "structures", "triggers", "format"), "", path)
    if fields.get("type", "structural_tag") != "structural_tag":
        raise invalid_value(f"{path}.type", fields["type"], '"structural_tag"')
    if ("format" in fields) == ("structures" in fields):
        raise FieldError(
            f"{path} must hold either format or structures with triggers; give one of them.", path
        )
    if "structures" in fields:
        read = _old_tag
        listed = fields["structures"]
        where = f"{path}.structures"
    else:
        path = f"{path}.format"
        known_names = ("type", "triggers", "tags")
        fields = warnings.split(fields["format"], known_names, "triggered_tags", path)
        if fields.get("type") != "triggered_tags":
            raise FieldError(
                f"{path}.type is {short_json(fields.get('type'))}, which is not supported; the "
                "only type is triggered_tags.",
                f"{path}.type",
                "unsupported_parameter",
            )
        read = _new_tag
        listed = fields.get("tags")
        where = f"{path}.tags"
    triggers = texts(fields.get("triggers", ()), f"{path}.triggers")
    if not isinstance(listed, list | tuple) or not listed:
        raise invalid_value(where, listed, "a list of one or more tags")
    tags: list[Tag] = []
    for index, entry in enumerate(listed):
        place = f"{where}[{index}]"
        begin, content, end = read(entry, place, warnings)
        tags.append(
            Tag(trigger=_trigger(begin, triggers, place), begin=begin, content=content, end=end)
        )
    return tags


Parts = tuple[str, Mapping[str, Any] | tuple[str, str], str]
"""A tag's beginning, content and end."""


def tags_grammar(tags: Sequence[Tag], added_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a text with these tags; see `text_with_tags`. Raises FieldError."""
    try:
        return text_with_tags(tags, added_tokens, lark)
    except ValueError as error:
        raise FieldError(
            f"The content of a structural tag is no grammar: {one_line(str(error))}",
            "structural_tag",
        ) from None


def _old_tag(value: object, path: str, warnings: FieldWarnings) -> Parts:
    fields = warnings.split(value, ("begin", "schema", "end"), "", path)
    return (
        _text(fields.get("begin"), f"{path}.begin"),
        _schema(fields.get("schema"), f"{path}.schema"),
        _text(fields.get("end", ""), f"{path}.end", empty=True),
    )


def _new_tag(value: object, path: str, warnings: FieldWarnings) -> Parts:
    fields = warnings.split(value, ("type", "begin", "content", "end"), "", path)
    if fields.get("type", "tag") != "tag":
        raise invalid_value(f"{path}.type", fields["type"], '"tag"')
    inner = f"{path}.content"
    content = warnings.split(fields.get("content"), ("type", *CONTENTS.values()), "", inner)
    kind = content.get("type")
    if not isinstance(kind, str) or kind not in CONTENTS:
        raise FieldError(
            f"{inner}.type is {short_json(kind)}, which is not supported; the types are "
            f"{', '.join(CONTENTS)}.",
            f"{inner}.type",
            "unsupported_parameter",
        )
    value = content.get(CONTENTS[kind])
    where = f"{inner}.{CONTENTS[kind]}"
    constraint = _schema(value, where) if kind == "json_schema" else (kind, _text(value, where))
    return (
        _text(fields.get("begin"), f"{path}.begin"),
        constraint,
        _text(fields.get("end", ""), f"{path}.end", empty=True),
    )


def _trigger(begin: str, triggers: Sequence[str], path: str) -> str:
    """Return the longest trigger that a tag begins with. Raises FieldError."""
    fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
    if not fitting:
        raise FieldError(
            f"{path}.begin is {short_json(begin)}, which begins with none of the triggers "
            f"{short_json(list(triggers))}; add its beginning to them.",
            f"{path}.begin",
        )
    return max(fitting, key=len)


def _text(value: object, path: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise invalid_value(
            path, value, "a string" if empty else "a string of one or more characters"
        )
    return value


def _schema(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise invalid_value(path, value, "a JSON schema, as an object")
    return value
