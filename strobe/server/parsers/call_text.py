"""Parser of an answer with tool calls after a marker, or without one."""

from __future__ import annotations

from collections.abc import Callable

from strobe.server.parsers.base import CallDelta, Parsed, Phase, StateParser, find_first, held_back
from strobe.server.parsers.call_reader import CallReader

_SPACE = " \t\r\n"


class CallText(StateParser):
    """Parser of text with calls in it.

        text --opener--> call --closer or none--> text
          \\---- not a call: content <-----------/

    A call of a tool that was not offered is content, including calls inside it. Space around calls
    is dropped.

    bare: the whole answer may also be calls without the opener. inner: a second marker that begins
    a call, at the beginning of a line. separators: characters that are dropped after a call: before
    its closer (by default a surplus brace), or in formats without a closer before the next call (a
    semicolon), which then needs no opener. trailer: a text that is dropped after calls.
    """

    def __init__(
        self,
        opener: str,
        closer: str,
        make: Callable[[bool], CallReader],
        *,
        bare: bool = False,
        inner: str = "",
        separators: str = "",
        trailer: str = "",
    ):
        """make: returns the reader of a call; its argument says whether `inner` has been read."""
        super().__init__(self._between if bare else self._text)
        self._opener, self._closer, self._inner = opener, closer, inner
        self._separators = _SPACE + (separators or ("}" if closer else ";"))
        self._trailer = trailer
        self._make, self._begins = make, (opener, inner) if inner else (opener,)
        self._space = ""  # space before the buffer, which is content if no call follows
        self._line_begins = True  # whether the space is at the beginning of a line
        self._lead = ""  # the text in front of the call, in case it is not a call
        self._call = make(False)
        self._index = 0
        self._unclosed = False  # whether the last call's closer has not arrived
        self._only_calls = False  # whether there was no content since the last call

    @property
    def phase(self) -> Phase:
        in_call = self._state == self._in_call and self._call.offered
        return "tool" if in_call or self._state == self._after_call else "answer"

    def finish(self) -> Parsed:
        self._advance()
        while self._state == self._in_call and not self._call.begun:
            self._reject_call()
            self._advance()
        if self._state == self._in_call:
            if self._call.offered:
                self._emit_call(None, self._call.finish())
            else:
                self._emit(self._call.raw)
        elif self._state != self._after_call:
            rest = self._space + self._buffer
            if not self._only_calls or rest.strip(_SPACE if self._closer else self._separators):
                self._emit(rest)
        self._space = self._buffer = ""
        return self._flush()

    def _emit(self, content: str) -> None:
        if content:
            self._content.append(content)
            self._only_calls = False
            self._line_begins = content.endswith("\n")

    def _text(self) -> bool:
        markers = (*self._begins, self._closer) if self._unclosed else self._begins
        if self._trailer and self._index:
            markers = (*markers, self._trailer)
        match = find_first(self._buffer, *markers)
        if match is None:
            self._emit_text(len(self._buffer) - held_back(self._buffer, *markers))
            return False
        position, marker = match
        self._emit_text(position)
        if marker == self._inner and not (self._line_begins or "\n" in self._space):
            self._emit_text(len(marker))
            return True
        if marker in self._begins:
            return self._begin(len(marker), inner=marker == self._inner)
        self._unclosed, self._space = False, ""
        self._buffer = self._buffer.removeprefix(marker)
        return True

    def _emit_text(self, count: int) -> None:
        """Emit so many characters of the buffer, except space at their end: a call may follow."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        stripped = text.rstrip(_SPACE)
        if stripped:
            self._emit(self._space + stripped)
            self._space = ""
        self._space += text[len(stripped) :]

    def _pass(self, chars: str) -> str:
        """Move such characters from the buffer's beginning to the space. Returns the rest."""
        rest = self._buffer.lstrip(chars)
        self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        return rest

    def _between(self) -> bool:
        """Before a bare call, if one follows."""
        rest = self._pass(self._separators if self._index else _SPACE)
        if rest.startswith("{"):
            return self._begin(0)
        if rest.startswith(self._opener):
            return self._begin(len(self._opener))
        if self._opener.startswith(rest):
            return False
        self._state = self._text
        return True

    def _begin(self, count: int, *, inner: bool = False) -> bool:
        """Begin a call after so many characters of the buffer."""
        self._lead, self._buffer = self._space + self._buffer[:count], self._buffer[count:]
        self._space = ""
        self._call = self._make(inner)
        self._unclosed = False
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        call, had_begun, raw, buffer = self._call, self._call.begun, self._call.raw, self._buffer
        arguments = call.push(buffer)
        self._buffer = ""
        if call.begun and call.offered:
            self._emit_call(None if had_begun else call.name, arguments)
        elif call.begun and (read := len(raw) + len(buffer) - len(call.raw)):
            self._emit(self._lead + (raw + buffer)[:read])
            self._lead = ""
        if call.verdict is None:
            return False
        if not call.begun:
            self._reject_call()
            return True
        self._buffer = call.raw
        if not call.offered:
            self._state = self._text
            return True
        self._index += 1
        self._only_calls = self._line_begins = True
        self._state = self._after_call if self._closer else self._between
        return True

    def _emit_call(self, name: str | None, arguments: str) -> None:
        if name or arguments:
            self._calls.append(CallDelta(self._index, name, arguments))

    def _reject_call(self) -> None:
        """Treat the text as content, and look for a call inside it."""
        self._emit(self._lead)
        self._buffer = self._call.raw
        self._state = self._text

    def _after_call(self) -> bool:
        """Before the closer, which may be missing."""
        rest = self._pass(self._separators)
        if self._closer.startswith(rest) and rest != self._closer:
            return False
        self._unclosed = not rest.startswith(self._closer)
        self._buffer = self._space + rest if self._unclosed else rest.removeprefix(self._closer)
        self._space = ""
        self._state = self._text
        return True
