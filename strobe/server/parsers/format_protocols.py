"""Tools, and the protocols of their formats and of formats of reasoning. The formats themselves are
in `formats.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from strobe.grammars.closed_schema import closed
from strobe.grammars.json_schema import enforceable
from strobe.server.parsers.segment import Parser


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, None for
    any object. strict: the client asks to enforce the schema, as every grammar here does."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def enforceable(self) -> Tool:
        """Return the tool with the schema that its grammar enforces: an object that declares
        arguments has no others, unless the schema says so, since a model that is forced to call
        may add arguments without end. Raises ValueError for a schema that allows nothing."""
        schema = enforceable(closed(self.parameters)).schema
        if schema is False:
            raise ValueError(
                f"The schema of the function {self.name!r} allows no arguments at all; correct it."
            )
        return replace(self, parameters=schema)

    def unenforced(self) -> Sequence[str]:
        """Return the names of the schema's keywords that its grammar does not enforce."""
        return enforceable(self.parameters).dropped


class AnswerFormat(Protocol):
    """A model family's format of a part of its answers.

    keep_special: the parser needs the text of special tokens. whole_answer: parser and grammar
    apply to the whole answer, reasoning included; otherwise to the text after the reasoning.
    """

    @property
    def name(self) -> str: ...
    @property
    def keep_special(self) -> bool: ...
    @property
    def whole_answer(self) -> bool: ...


class ToolFormat(AnswerFormat, Protocol):
    """A model family's format of tool calls.

    openers: the markers that begin a call; line_openers: markers that do so only at the beginning
    of a line.
    """

    @property
    def openers(self) -> tuple[str, ...]: ...
    @property
    def line_openers(self) -> tuple[str, ...]: ...

    def parser(
        self, tools: Sequence[Tool] = (), *, forced: bool = False, whole_calls: bool = False
    ) -> Parser:
        """Return a parser. tools: the tools that may be called, empty for any; calls of other tools
        are content. forced, whole_calls: see `make_parser`."""
        ...

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        """Return a grammar, in llguidance's Lark, of one call of these tools, or with `parallel` of
        one or more, with the whitespace of the family's chat template.

        added_tokens: the ids of the tokenizer's added tokens by text; a marker among them matches
        as that token only. Raises ValueError, naming the tool or token, if no grammar is possible.
        """
        ...


class ReasoningFormat(AnswerFormat, Protocol):
    """A model family's format of reasoning.

    start, end: its opening and closing markers. gap: the chat template's text between `end` and the
    answer.
    """

    @property
    def start(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def gap(self) -> str: ...

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the answer begins with it."""
        ...
