"""A parser that chains two others, and one for plain text."""

from __future__ import annotations

from strobe.server.parsers.base import Parsed, Parser, Phase, join


class Plain:
    """Parser of an answer that is all content."""

    phase: Phase = "answer"

    def push(self, text: str) -> Parsed:
        return Parsed(content=text)

    def finish(self) -> Parsed:
        return Parsed()


class Chain:
    """A parser of reasoning, and a parser of calls in the first one's content."""

    def __init__(self, thinking: Parser, calls: Parser):
        self._thinking, self._calls = thinking, calls

    @property
    def phase(self) -> Phase:
        thinking = self._thinking.phase
        return thinking if thinking == "thinking" else self._calls.phase

    def push(self, text: str) -> Parsed:
        split = self._thinking.push(text)
        rest = self._calls.push(split.content)
        return Parsed(split.reasoning, rest.content, rest.calls)

    def finish(self) -> Parsed:
        split = self._thinking.finish()
        rest = join([self._calls.push(split.content), self._calls.finish()])
        return Parsed(split.reasoning, rest.content, rest.calls)
