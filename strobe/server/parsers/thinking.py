"""Reasoning between two markers at an answer's beginning, and tool calls at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import StateParser, held_back
from strobe.server.parsers.segment import Parser, Phase, Plain, Segment


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

    def parser(
        self,
        answer: Parser | None = None,
        calls: ReasoningCalls | None = None,
        *,
        thinking_open: bool = False,
    ) -> Parser:
        return Thinking(
            self.start + self.title,
            self.end,
            thinking_open=thinking_open,
            answer=answer or Plain(),
            calls=calls,
        )


class Thinking(StateParser):
    """Parser of an answer that may begin with reasoning.

    beginning --start--> thinking --end--> gap --> answer
        \\---- anything else: answer, or thinking if the prompt opened it ----/

    The rest goes to another parser. Calls in the reasoning are calls if nothing but the reasoning's
    end follows them.
    """

    def __init__(
        self,
        start: str,
        end: str,
        *,
        thinking_open: bool,
        answer: Parser,
        calls: ReasoningCalls | None = None,
    ):
        """answer: the parser of the text after the reasoning. calls: finds the calls in the
        reasoning, None if there are none."""
        super().__init__(self._beginning)
        self._start = start
        self._end = end
        self._thinks = thinking_open
        self._calls = calls
        self._answer_parser = answer

    @property
    def phase(self) -> Phase:
        if self._calls is not None and self._calls.in_call:
            return "tool"
        return "thinking" if self._thinks else self._answer_parser.phase

    def finish(self, *, cut: bool = False) -> list[Segment]:
        if self._thinks:
            self._reason(len(self._buffer.text))
        if self._may_end_with_calls():
            assert self._calls is not None
            self._extend(self._calls.finish(cut=cut))
            if self._calls.found:
                return self._flush()
        self._begin_answer()
        self._answer()
        self._segments += self._answer_parser.finish(cut=cut)
        return self._flush()

    def _beginning(self) -> bool:
        text = self._buffer.text
        rest = text.lstrip()
        if self._start.startswith(rest) and rest != self._start:
            return False
        if rest.startswith(self._start):
            self._buffer.skip(len(text) - len(rest) + len(self._start))
            self._thinks = True
        if self._thinks:
            self._state = self._thinking_begins
        else:
            self._begin_answer()
        return True

    def _thinking_begins(self) -> bool:
        if not self._skip_line_breaks():
            return False
        self._state = self._thinking
        return True

    def _thinking(self) -> bool:
        text, end, _ = self._buffer.text.partition(self._end)
        if not end:
            text = text[: len(text) - held_back(text, (self._end,))]
        thought = text.rstrip("\n")
        self._reason(len(thought))
        if not end:
            return False
        self._buffer.skip(len(text) - len(thought) + len(end))
        self._thinks = False
        self._state = self._gap
        return True

    def _gap(self) -> bool:
        has_text = self._skip_line_breaks()
        if self._may_end_with_calls():
            return False
        self._release_reasoning()
        if has_text:
            self._begin_answer()
        return has_text

    def _answer(self) -> bool:
        text = self._buffer.text
        if text:
            self._buffer.skip(len(text))
            self._segments += self._answer_parser.push(text)
        return False

    def _skip_line_breaks(self) -> bool:
        """Drop line breaks at the text's beginning. Returns whether there is other text."""
        text = self._buffer.text
        rest = text.lstrip("\n")
        self._buffer.skip(len(text) - len(rest))
        return bool(rest)

    def _reason(self, count: int) -> None:
        """Take so many characters of reasoning."""
        if not count:
            return
        text = self._buffer.text[:count]
        start = self._buffer.position
        self._buffer.skip(count)
        if self._calls is not None:
            self._extend(self._calls.reason(text, start))
        else:
            self._output(Segment(kind="reasoning", text=text, start=start, end=start + count))

    def _may_end_with_calls(self) -> bool:
        """Whether the reasoning may have ended with calls, with nothing but space after it."""
        held = self._calls is not None and self._calls.trial is not None
        return held and (self._thinks or not self._buffer.text.strip())

    def _begin_answer(self) -> None:
        if self._state != self._answer:
            self._release_reasoning()
            self._state = self._answer
            self._answer_parser.begin_at(self._buffer.position)

    def _release_reasoning(self) -> None:
        """Emit the reasoning that was held back because it might have been calls."""
        if self._calls is not None:
            self._extend(self._calls.release())


class ReasoningCalls(StateParser):
    """Finds the calls at the end of the reasoning, in reasoning that arrives in pieces.

        reasoning --marker--> trial --only calls up to the answer's end--> calls
            \\----- any other text: the marker was reasoning -----/

    Some models call tools before they end their reasoning. Text from a marker on is held back while
    it consists of calls. Line breaks before the calls are dropped.
    """

    def __init__(
        self, make: Callable[[], Parser], openers: Sequence[str], line_openers: Sequence[str]
    ):
        """make: returns a parser of calls that emits whole calls only. openers: the markers that
        begin a call; line_openers: markers that do so only at the beginning of a line."""
        super().__init__(self._reasoning)
        self._make = make
        self._line_openers = tuple(line_openers)
        self._markers = (*openers, *line_openers)
        self._at_line_start = True  # whether the buffer begins a line
        self._lead = 0  # number of line breaks before the marker
        self._marker = ""
        self._fed = 0  # number of the buffer's characters that the trial has got
        self._found: list[Segment] = []  # by the trial
        self.trial: Parser | None = None
        """The parser of the text that may be calls, None if there is no such text."""

    @property
    def in_call(self) -> bool:
        return self.trial is not None and self.trial.phase == "tool"

    @property
    def found(self) -> bool:
        """Whether the reasoning ended with calls, once it has finished."""
        return bool(self._found)

    def reason(self, text: str, start: int) -> list[Segment]:
        """Add reasoning at a position. Returns the reasoning that is certain so far."""
        if not self._buffer.text:
            self.begin_at(start)
        return self.push(text)

    def release(self) -> list[Segment]:
        """Return the rest of the reasoning, after which the answer goes on."""
        self.trial = None
        self._found = []
        self._emit(len(self._buffer.text))
        return self._flush()

    def finish(self, *, cut: bool) -> list[Segment]:
        """Return the rest of the reasoning, and the calls at the answer's end."""
        while self.trial is not None:
            if self._is_calls(self.trial.finish(cut=cut)) and self._found:
                return [*self._flush(), *self._found]
            self._reject()
            self._advance()
        return self.release()

    def _reasoning(self) -> bool:
        """Emit the reasoning before the first marker, and begin a trial there."""
        text = self._buffer.text
        match = min(filter(None, map(self._first, self._markers)), default=None)
        if match is None:
            keep = held_back(text, self._markers)
            self._emit(len(text[: len(text) - keep].rstrip("\n")))
            return False
        position, self._marker = match
        count = len(text[:position].rstrip("\n"))
        self._emit(count)
        self._lead = position - count
        self._fed = self._lead
        self.trial = self._make()
        self.trial.begin_at(self._buffer.position + self._lead)
        self._state = self._trial
        return True

    def _trial(self) -> bool:
        """Try whether the text from the marker on consists of calls."""
        assert self.trial is not None
        text = self._buffer.text[self._fed :]
        self._fed = len(self._buffer.text)
        if self._is_calls(self.trial.push(text)):
            return False
        self._reject()
        return True

    def _is_calls(self, segments: Sequence[Segment]) -> bool:
        """Whether the trial's output is calls and space only."""
        self._found += [segment for segment in segments if segment.kind == "call"]
        return not any(segment.kind == "content" and segment.text.strip() for segment in segments)

    def _reject(self) -> None:
        """Treat the marker as reasoning."""
        self.trial = None
        self._found = []
        self._emit(self._lead + len(self._marker))
        self._state = self._reasoning

    def _first(self, marker: str) -> tuple[int, str] | None:
        """Return the first position at which this marker may begin a call."""
        text = self._buffer.text
        position = text.find(marker)
        while position >= 0 and marker in self._line_openers and not self._begins_line(position):
            position = text.find(marker, position + 1)
        return None if position < 0 else (position, marker)

    def _begins_line(self, position: int) -> bool:
        return self._buffer.text[position - 1] == "\n" if position else self._at_line_start

    def _emit(self, count: int) -> None:
        if count:
            self._buffer.read(count)
            self._at_line_start = self._buffer.kept.endswith("\n")
            self._output_kept("reasoning")
