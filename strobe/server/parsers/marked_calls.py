"""Tool formats whose calls begin at a marker, and their parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer, StateParser, find_first, held_back
from strobe.server.parsers.call_arguments import as_arguments
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.segment import Parser, Phase, Segment

_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class MarkedCalls:
    """Base class of a `ToolFormat` whose calls begin at a marker, after any text. A format adds the
    texts around its calls, the reader of a call, and its grammar.

    closer: empty if the format has none. inner: a second marker that begins a call, at the
    beginning of a line. separators: characters that are dropped after a call: before its closer (by
    default a surplus brace), or in formats without a closer before the next call (a semicolon),
    which then needs no opener. trailer: a text that is dropped after calls. bare: the whole answer
    may also be calls without the opener. repeats: several calls may follow one opener.
    """

    name: str
    opener: str
    closer: str = ""
    inner: str = ""
    separators: str = ""
    trailer: str = ""
    bare: bool = False
    repeats: bool = False
    keep_special: bool = True  # some checkpoints have the markers as special tokens
    whole_answer: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.opener,)

    @property
    def line_openers(self) -> tuple[str, ...]:
        return (self.inner,) if self.inner else ()

    @property
    def dropped(self) -> str:
        """The characters other than space that are dropped after a call."""
        return self.separators or ("}" if self.closer else ";")

    def parser(
        self, tools: Sequence[Tool] = (), *, forced: bool = False, whole_calls: bool = False
    ) -> Parser:
        return CallText(self, tools, forced=forced, whole_calls=whole_calls)

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        """Return the reader of one call. opened: whether `inner` has been read."""
        raise NotImplementedError


class CallText(StateParser):
    """Parser of text with calls in it.

        text --opener--> call --closer or none--> text
          \\---- not a call: content <-----------/

    A call of a tool that was not offered is content, including calls inside it, and so is a call
    whose arguments are not a JSON object. Space around calls is dropped. A call whose arguments may
    yet turn out not to be one is held back until its end. The buffer keeps the text that is content
    if no call follows or the call turns out not to be one.

    forced, whole_calls: see `make_parser`.
    """

    def __init__(
        self,
        form: MarkedCalls,
        tools: Sequence[Tool],
        *,
        forced: bool,
        whole_calls: bool,
    ):
        super().__init__(self._between if form.bare else self._text)
        self._form = form
        self._tools = tools
        self._begins = (*form.openers, *form.line_openers)
        self._same_line = " \t" + form.dropped
        self._separators = _SPACE + self._same_line
        self._forced = forced
        self._whole_calls = whole_calls
        self._line_begins = True  # whether the kept space is at the beginning of a line
        self._marked = False  # whether the call has an opener
        self._call = form.reader(self._buffer, tools, opened=False)
        self._arguments: list[str] = []  # the arguments of a call that is held back
        self._arguments_start = 0
        self._index = 0
        self._unclosed = False  # whether the last call's closer has not arrived
        self._only_calls = False  # whether there was no content since the last call

    @property
    def phase(self) -> Phase:
        in_call = self._state == self._in_call and self._call.offered
        return "tool" if in_call or self._state in (self._held, self._after_call) else "answer"

    def finish(self, *, cut: bool = False) -> list[Segment]:
        self._advance()
        while self._state == self._in_call and not self._call.begun:
            if cut and (self._forced or self._marked):
                self._state = self._after_call
                break
            self._reject_call()
            self._advance()
        if self._state == self._in_call:
            self._finish_call(cut=cut)
        elif self._state == self._held:
            if not self._emit_held():
                self._emit_rest()
        elif self._state != self._after_call and not (cut and self._forced):
            rest = self._buffer.kept + self._buffer.text
            if not self._only_calls or rest.strip(
                _SPACE if self._form.closer else self._separators
            ):
                self._emit_rest()
        self._buffer.drop_kept()
        self._buffer.skip(len(self._buffer.text))
        return self._flush()

    def _finish_call(self, *, cut: bool) -> None:
        """End the answer inside a call that has begun."""
        call = self._call
        if not call.offered:
            self._emit_rest()
        elif not self._holds(call):
            arguments = call.finish(cut=cut)
            self._emit_call(None, arguments, start=call.start)
        else:
            self._arguments.append(call.finish(cut=cut))
            if not self._emit_held() and not cut:
                self._emit_rest()

    def _holds(self, call: CallReader) -> bool:
        """Whether a call's arguments are emitted at its end only."""
        return self._whole_calls or not (self._forced or call.always_valid)

    def _emit_held(self) -> bool:
        """Emit the call that is held back. Returns False if its arguments are not an object."""
        arguments = as_arguments("".join(self._arguments))
        if arguments is None:
            return False
        self._emit_call(self._call.name, arguments, start=self._arguments_start)
        return True

    def _emit_rest(self) -> None:
        """Emit all text as content."""
        self._buffer.read(len(self._buffer.text))
        self._emit_kept()

    def _emit_kept(self) -> None:
        """Emit the text that is kept as content."""
        content = self._buffer.kept
        if content:
            self._output_kept("content")
            self._only_calls = False
            self._line_begins = content.endswith("\n")

    def _text(self) -> bool:
        markers = (*self._begins, self._form.closer) if self._unclosed else self._begins
        if self._form.trailer and self._index:
            markers = (*markers, self._form.trailer)
        text = self._buffer.text
        match = find_first(text, markers)
        if match is None:
            self._emit_text(len(text) - held_back(text, markers))
            return False
        position, marker = match
        self._emit_text(position)
        if marker == self._form.inner and not (self._line_begins or "\n" in self._buffer.kept):
            self._emit_text(len(marker))
            return True
        if marker in self._begins:
            return self._begin(len(marker), inner=marker == self._form.inner)
        self._unclosed = False
        self._buffer.drop_kept()
        self._buffer.skip(len(marker))
        return True

    def _emit_text(self, count: int) -> None:
        """Emit so many characters of the buffer, except space at their end: a call may follow."""
        stripped = len(self._buffer.text[:count].rstrip(_SPACE))
        if stripped:
            self._buffer.read(stripped)
            self._emit_kept()
        self._buffer.read(count - stripped)

    def _between(self) -> bool:
        """Before a bare call, if one follows."""
        rest = self._buffer.strip(self._separators if self._index else _SPACE)
        if rest.startswith("{"):
            return self._begin(0)
        if rest.startswith(self._form.opener):
            return self._begin(len(self._form.opener))
        if self._form.opener.startswith(rest):
            return False
        self._state = self._text
        return True

    def _begin(self, count: int, *, inner: bool = False) -> bool:
        """Begin a call after so many characters of the buffer."""
        self._marked = count > 0 or self._form.repeats
        self._buffer.read(count)
        self._call = self._form.reader(self._buffer, self._tools, opened=inner)
        self._arguments = []
        self._unclosed = False
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        call = self._call
        had_begun = call.begun
        arguments = call.advance()
        if not call.begun:
            if call.verdict is None:
                return False
            self._reject_call()
            return True
        if not call.offered:
            self._emit_kept()
        elif self._holds(call):
            if not self._arguments:
                self._arguments_start = call.start
            self._arguments.append(arguments)
        else:
            self._buffer.drop_kept()
            self._emit_call(None if had_begun else call.name, arguments, start=call.start)
        if call.verdict is None:
            return False
        if not call.offered:
            self._state = self._text
            return True
        if self._holds(call):
            self._state = self._held
            return True
        return self._end_call()

    def _held(self) -> bool:
        """After a call that was held back: emit it, or emit it as content if its arguments are not
        an object or text follows directly, as after a quote too many."""
        if not self._call.always_valid:
            text = self._buffer.text
            space = self._separators if self._call.verdict == "broken" else self._same_line
            rest = text.lstrip(space)
            markers = [
                marker
                for marker in (*self._begins, self._form.closer, self._form.trailer)
                if marker
            ]
            if any(marker.startswith(rest) and marker != rest for marker in markers):
                return False
            passed = text[: len(text) - len(rest)]
            separated = not self._form.closer and (";" in passed or "]" in passed)
            follows = (*markers, "{") if self._call.verdict == "broken" else (*markers, *"{\r\n")
            if not (separated or rest.startswith(follows)):
                return self._reject_held()
        return self._end_call() if self._emit_held() else self._reject_held()

    def _reject_held(self) -> bool:
        self._emit_kept()
        self._state = self._text
        return True

    def _end_call(self) -> bool:
        self._buffer.drop_kept()
        self._index += 1
        self._only_calls = self._line_begins = True
        self._state = self._after_call if self._form.closer else self._between
        return True

    def _emit_call(self, name: str | None, arguments: str, *, start: int) -> None:
        if name or arguments:
            self._output(
                Segment(
                    kind="call",
                    text=arguments,
                    start=start,
                    end=self._call.end,
                    call=self._index,
                    name=name,
                )
            )

    def _reject_call(self) -> None:
        """Treat the text before the call as content, and look for a call inside it."""
        self._emit_kept()
        self._state = self._text

    def _after_call(self) -> bool:
        """Before the closer, which may be missing."""
        rest = self._buffer.strip(self._separators)
        if self._form.closer.startswith(rest) and rest != self._form.closer:
            return False
        if self._form.repeats and rest.startswith("{"):
            return self._begin(0)
        self._unclosed = not rest.startswith(self._form.closer)
        if self._unclosed:
            self._buffer.unread()
        else:
            self._buffer.drop_kept()
            self._buffer.skip(len(self._form.closer))
        self._state = self._text
        return True
