"""Protocols of parsers and formats, and the values that parsers return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

from strobe.grammars.closed_schema import closed
from strobe.grammars.json_schema import enforceable

Phase = Literal["thinking", "answer", "tool"]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. index: the call's index in the answer. name: only in a call's first
    delta. arguments: a piece of the arguments' JSON text, as the model wrote it."""

    index: int
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """Parsed text: pieces of reasoning, content and tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class Parser(Protocol):
    """Splits one answer, whose raw text arrives in pieces of any size.

    The joined output depends only on the whole text, never on where it was cut. Text is held back
    only while it may be the beginning of a marker.
    """

    @property
    def phase(self) -> Phase:
        """The phase of the last text."""
        ...

    def push(self, text: str) -> Parsed:
        """Add text. Returns the output that is certain so far."""
        ...

    def finish(self, *, cut: bool = False) -> Parsed:
        """Return the rest of the output after the answer's end, which may be anywhere. cut: whether
        the limit of tokens ended the answer; an unfinished call is then dropped."""
        ...


class StateParser:
    """Base class of parsers with states. Each state consumes a part of the buffer. It returns False
    if it needs more text."""

    def __init__(self, first: Callable[[], bool]):
        """first: the first state."""
        self._state = first
        self._buffer = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str) -> Parsed:
        self._buffer += text
        self._advance()
        return self._flush()

    def _advance(self) -> None:
        while self._state():
            pass

    def _flush(self) -> Parsed:
        parsed = Parsed("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        self._reasoning = []
        self._content = []
        self._calls = []
        return parsed


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


class ToolFormat(Protocol):
    """A model family's format of tool calls.

    keep_special: the parser needs the text of special tokens. whole_answer: parser and grammar
    apply to the whole answer, reasoning included; otherwise to the text after the reasoning.
    openers: the markers that begin a call; line_openers: those that do so at the beginning of a
    line.
    """

    @property
    def name(self) -> str: ...
    @property
    def keep_special(self) -> bool: ...
    @property
    def whole_answer(self) -> bool: ...
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


class ReasoningFormat(Protocol):
    """A model family's format of reasoning.

    start, end: its opening and closing markers. gap: the chat template's text between `end` and the
    answer. keep_special, whole_answer: see `ToolFormat`.
    """

    @property
    def name(self) -> str: ...
    @property
    def keep_special(self) -> bool: ...
    @property
    def whole_answer(self) -> bool: ...
    @property
    def start(self) -> str: ...
    @property
    def end(self) -> str: ...
    @property
    def gap(self) -> str: ...

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside reasoning, so that the answer begins with it."""
        ...

    def parser(self, *, thinking_open: bool = False) -> Parser: ...


def join(parts: Sequence[Parsed]) -> Parsed:
    """Return consecutive outputs as one."""
    return Parsed(
        "".join([part.reasoning for part in parts]),
        "".join([part.content for part in parts]),
        tuple(delta for part in parts for delta in part.calls),
    )


def held_back(text: str, markers: Collection[str]) -> int:
    """Return the number of characters at a text's end that may begin one of the markers."""
    longest = max(map(len, markers)) - 1
    heads = {marker[0] for marker in markers}
    for count in range(min(longest, len(text)), 0, -1):
        if text[-count] in heads and any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Return the position of the first marker in a text, and that marker."""
    matches = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(matches) if matches else None
