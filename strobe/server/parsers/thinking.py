"""Reasoning between two markers at an answer's beginning."""

from __future__ import annotations

from dataclasses import dataclass

from strobe.server.parsers.parser import Parsed, Parser, Phase, StateParser, held_back


@dataclass(frozen=True)
class ThinkingTags:
    """Reasoning at the answer's beginning between `start` and `end`, without `start` if the prompt
    ends with it; an answer that begins otherwise has none. Line breaks between markers, reasoning
    and answer are dropped. title: a text that always follows `start`."""

    name: str
    start: str
    end: str
    gap: str = ""
    title: str = ""
    keep_special: bool = True
    whole_answer: bool = False

    def opened_by(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.start + self.title)

    def parser(self, *, thinking_open: bool = False) -> Parser:
        return Thinking(self.start + self.title, self.end, thinking_open=thinking_open)


class Thinking(StateParser):
    """Parser of an answer that may begin with reasoning.

    beginning --start--> thinking --end--> gap --> answer
        \\---- anything else: answer, or thinking if the prompt opened it ----/
    """

    def __init__(self, start: str, end: str, *, thinking_open: bool):
        super().__init__(self._beginning)
        self._start = start
        self._end = end
        self._open = thinking_open
        self.phase: Phase = "thinking" if thinking_open else "answer"

    def finish(self, *, cut: bool = False) -> Parsed:
        (self._reasoning if self.phase == "thinking" else self._content).append(self._buffer)
        self._buffer = ""
        return self._flush()

    def _beginning(self) -> bool:
        rest = self._buffer.lstrip()
        if self._start.startswith(rest) and rest != self._start:
            return False
        if rest.startswith(self._start):
            self._buffer = rest.removeprefix(self._start)
            self._open = True
        self.phase = "thinking" if self._open else "answer"
        self._state = self._thinking_begins if self._open else self._answer
        return True

    def _thinking_begins(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._thinking
        return bool(self._buffer)

    def _thinking(self) -> bool:
        text, end, rest = self._buffer.partition(self._end)
        if not end:
            text = text[: len(text) - held_back(text, (self._end,))]
        text = text.rstrip("\n")
        self._reasoning.append(text)
        if not end:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer = rest
        self.phase = "answer"
        self._state = self._gap
        return True

    def _gap(self) -> bool:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._answer
        return bool(self._buffer)

    def _answer(self) -> bool:
        self._content.append(self._buffer)
        self._buffer = ""
        return False
