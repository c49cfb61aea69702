"""A parser that chains two others, and one for plain text."""

from __future__ import annotations

from strobe.server.parsers.parser import Parsed, Parser, Phase, join
from strobe.server.parsers.reasoning_calls import ReasoningCalls


class Plain:
    """Parser of an answer that is all content."""

    phase: Phase = "answer"

    def push(self, text: str) -> Parsed:
        return Parsed(content=text)

    def finish(self, *, cut: bool = False) -> Parsed:
        return Parsed()


class Chain:
    """A parser of reasoning, and a parser of calls in the first one's content.

    Calls in the reasoning are calls if nothing but the reasoning's end follows them.
    """

    def __init__(self, thinking: Parser, calls: Parser, reasoning_calls: ReasoningCalls):
        self._thinking = thinking
        self._calls = calls
        self._reasoning_calls = reasoning_calls
        self._gap = ""  # blank content after reasoning that may end with calls

    @property
    def phase(self) -> Phase:
        trial = self._reasoning_calls.trial
        if trial is not None and trial.phase == "tool":
            return "tool"
        thinking = self._thinking.phase
        return thinking if thinking == "thinking" else self._calls.phase

    def push(self, text: str) -> Parsed:
        split = self._thinking.push(text)
        reasoning = self._reasoning_calls.push(split.reasoning)
        self._gap += split.content
        if self._thinking.phase == "thinking" or self._may_end_with_calls():
            return Parsed(reasoning)
        reasoning += self._reasoning_calls.release()
        rest = self._calls.push(self._take_gap())
        return Parsed(reasoning, rest.content, rest.calls)

    def finish(self, *, cut: bool = False) -> Parsed:
        split = self._thinking.finish(cut=cut)
        reasoning = self._reasoning_calls.push(split.reasoning)
        self._gap += split.content
        if self._may_end_with_calls():
            certain, calls = self._reasoning_calls.finish(cut=cut)
            reasoning += certain
            if calls:
                return Parsed(reasoning, "", calls)
        reasoning += self._reasoning_calls.release()
        rest = join([self._calls.push(self._take_gap()), self._calls.finish(cut=cut)])
        return Parsed(reasoning, rest.content, rest.calls)

    def _may_end_with_calls(self) -> bool:
        return self._reasoning_calls.trial is not None and not self._gap.strip()

    def _take_gap(self) -> str:
        gap = self._gap
        self._gap = ""
        return gap
