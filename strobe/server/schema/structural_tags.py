"""Structural tags, in vLLM's older form and in the newer one of triggered tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strobe.grammars.rules import Tag, text_with_tags
from strobe.grammars.source import lark, one_line
from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    short_json,
)
from strobe.server.schema.values import JsonSchema, Must, OneOf, OrJson, SomeText, Text


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Triggers = Annotated[
    list[SomeText],
    Field(min_length=1),
    BeforeValidator(_listed),
    Must("a string or a list of strings"),
]
_ONE_OR_MORE_TAGS = "a list of one or more tags"


class SchemaTag(RequestObject):
    """A tag of the older form, whose content follows a JSON schema."""

    begin: SomeText
    schema_: JsonSchema = Field(alias="schema")
    end: Text = ""

    @property
    def constraint(self) -> Mapping[str, Any]:
        return self.schema_


class SchemaContent(RequestObject):
    """A tag's content that follows a JSON schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @property
    def constraint(self) -> Mapping[str, Any]:
        return self.json_schema


class RegexContent(RequestObject):
    """A tag's content that follows a regular expression."""

    type: Literal["regex"]
    pattern: SomeText

    @property
    def constraint(self) -> tuple[str, str]:
        return self.type, self.pattern


class GrammarContent(RequestObject):
    """A tag's content that follows a grammar."""

    type: Literal["grammar"]
    grammar: SomeText

    @property
    def constraint(self) -> tuple[str, str]:
        return self.type, self.grammar


Content = SchemaContent | RegexContent | GrammarContent
CONTENTS: Mapping[str, type[Content]] = {
    "json_schema": SchemaContent,
    "regex": RegexContent,
    "grammar": GrammarContent,
}


def _content(value: Mapping[str, Any]) -> type[Content]:
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in CONTENTS:
        raise FieldError(
            f"{HERE}.type is {short_json(kind)}, which is not supported; the types are "
            f"{', '.join(CONTENTS)}.",
            f"{HERE}.type",
            "unsupported_parameter",
        )
    return CONTENTS[kind]


class TriggeredTag(RequestObject):
    """A tag of the newer form."""

    type: Annotated[Literal["tag"], Must('"tag"')] = "tag"
    begin: SomeText
    content: Annotated[Content, OneOf(choose=_content), Must("a JSON object")]
    end: Text = ""

    @property
    def constraint(self) -> Mapping[str, Any] | tuple[str, str]:
        return self.content.constraint


class TriggeredTags(RequestObject):
    """Tags, each of which may follow a trigger that it begins with."""

    schema_key: ClassVar[str] = "triggered_tags"

    type: Literal["triggered_tags"]
    triggers: Triggers
    tags: Annotated[list[TriggeredTag], Field(min_length=1), Must(_ONE_OR_MORE_TAGS)]

    def check(self) -> None:
        super().check()
        _tags(self.tags, self.triggers, "tags")


def _format(value: Mapping[str, Any]) -> type[TriggeredTags]:
    if value.get("type") != "triggered_tags":
        raise FieldError(
            f"{HERE}.type is {short_json(value.get('type'))}, which is not supported; the only "
            "type is triggered_tags.",
            f"{HERE}.type",
            "unsupported_parameter",
        )
    return TriggeredTags


class StructuralTag(RequestObject):
    """Structural tags. The type may be left out where nothing else has a place."""

    type: Literal["structural_tag"]

    @classmethod
    def split(cls, data: object, warnings: FieldWarnings) -> dict[str, Any]:
        return {"type": "structural_tag", **super().split(data, warnings)}

    def tags(self) -> list[Tag]:
        """The tags, each with its trigger. Raises FieldError."""
        raise NotImplementedError


class OlderStructuralTag(StructuralTag):
    """Structural tags in vLLM's older form."""

    structures: Annotated[list[SchemaTag], Field(min_length=1), Must(_ONE_OR_MORE_TAGS)]
    triggers: Triggers

    def check(self) -> None:
        super().check()
        self.tags()

    def tags(self) -> list[Tag]:
        return _tags(self.structures, self.triggers, "structures")


class NewerStructuralTag(StructuralTag):
    """Structural tags in the form of triggered tags."""

    format: Annotated[TriggeredTags, OneOf(choose=_format)]

    def tags(self) -> list[Tag]:
        return _tags(self.format.tags, self.format.triggers, "tags")


def structural_tag_model(
    value: Mapping[str, Any],
) -> type[OlderStructuralTag | NewerStructuralTag]:
    """Return the model of structural tags. Raises FieldError."""
    if value.get("type", "structural_tag") not in (None, "structural_tag"):
        raise FieldError.of_value(f"{HERE}.type", value["type"], '"structural_tag"')
    is_newer = value.get("format") is not None
    if is_newer == (value.get("structures") is not None):
        raise FieldError(
            f"{HERE} must hold either format or structures with triggers; give one of them.", HERE
        )
    return NewerStructuralTag if is_newer else OlderStructuralTag


StructuralTagOrText = Annotated[
    OlderStructuralTag | NewerStructuralTag,
    OneOf(choose=structural_tag_model),
    OrJson("a structural tag"),
]


def tags_grammar(tags: Sequence[Tag], added_tokens: Mapping[str, int]) -> str:
    """Return the grammar of a text with these tags; see `text_with_tags`. Raises FieldError."""
    try:
        return text_with_tags(tags, added_tokens, lark)
    except ValueError as error:
        raise FieldError(
            f"The content of a structural tag is no grammar: {one_line(str(error))}",
            "structural_tag",
        ) from None


def _tags(
    tags: Sequence[SchemaTag | TriggeredTag], triggers: Sequence[str], field: str
) -> list[Tag]:
    """Return the tags, each with the longest trigger that it begins with. field: the name of their
    list. Raises FieldError."""
    read: list[Tag] = []
    for index, tag in enumerate(tags):
        fitting = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if not fitting:
            path = f"{HERE}.{field}[{index}].begin"
            raise FieldError(
                f"{path} is {short_json(tag.begin)}, which begins with none of the triggers "
                f"{short_json(list(triggers))}; add its beginning to them.",
                path,
            )
        trigger = max(fitting, key=len)
        read.append(Tag(trigger=trigger, begin=tag.begin, content=tag.constraint, end=tag.end))
    return read
