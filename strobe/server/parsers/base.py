"""What a parser of a model's answer is, and the values that it deals in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Phase = Literal["thinking", "answer", "tool"]


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of one tool call. index: which call of this answer, from 0. name: with a call's first
    delta only. arguments: more of the arguments' JSON text, as the model wrote it."""

    index: int
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """What a piece of raw text turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def joined_with(self, parsed: Parsed) -> Parsed:
        """This and what came next, as one."""
        return Parsed(
            self.reasoning + parsed.reasoning,
            self.content + parsed.content,
            self.calls + parsed.calls,
        )


class Parser(Protocol):
    """Splits one answer, whose raw text arrives in pieces of any size.

    All that comes out, joined, depends on the whole text only and never on where it was cut.
    Text is held back only while it may still turn out to begin a marker.
    """

    @property
    def phase(self) -> Phase:
        """Where the newest text stands."""
        ...

    def push(self, text: str) -> Parsed:
        """Take in more text; what is certain by now."""
        ...

    def finish(self) -> Parsed:
        """What was held back, once the answer has ended, be it in the middle of anything."""
        ...


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments, None for
    any object. strict: the caller wants the schema held, as every grammar here does."""

    name: str
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


class ToolFormat(Protocol):
    """How a model family writes tool calls.

    keep_special: the parser must see the text of special tokens. whole_answer: parser and grammar
    are of the answer from its first token, thinking included; otherwise of what follows thinking.
    """

    @property
    def name(self) -> str: ...
    @property
    def keep_special(self) -> bool: ...
    @property
    def whole_answer(self) -> bool: ...

    def parser(self, tools: Sequence[Tool] = ()) -> Parser:
        """tools: those that may be called, none for any; what calls another is content."""
        ...

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        added_tokens: Mapping[str, int],
        lead: str = "",
    ) -> str:
        """A grammar in llguidance's Lark of one call of one of these tools, or with `parallel` of
        one or more, in the format and with the whitespace of the family's chat template.

        added_tokens: the ids of the tokenizer's added tokens by text; a marker among them is that
        token and never its letters. lead: text before the first call, such as a reasoning
        format's `gap`. Raises ValueError naming the tool or token where there can be no grammar.
        """
        ...


class ReasoningFormat(Protocol):
    """How a model family writes its thinking.

    start, end: the texts that open and close it. gap: what the chat template writes between `end`
    and the answer. keep_special, whole_answer: as in `ToolFormat`.
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
        """Whether a prompt ends in open thinking, so that the answer begins inside it."""
        ...

    def parser(self, *, thinking_open: bool = False) -> Parser: ...


def held_back(text: str, *markers: str) -> int:
    """Characters at a text's end that may turn out to begin one of the markers."""
    longest, heads = max(map(len, markers)) - 1, {marker[0] for marker in markers}
    for count in range(min(longest, len(text)), 0, -1):
        if text[-count] in heads and any(marker.startswith(text[-count:]) for marker in markers):
            return count
    return 0


def find_first(text: str, *markers: str) -> tuple[int, str] | None:
    """Where the first of the markers stands in a text, and which it is."""
    matches = [(position, marker) for marker in markers if (position := text.find(marker)) >= 0]
    return min(matches) if matches else None
