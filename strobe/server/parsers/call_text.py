"""An answer in which tool calls stand behind a marker, or on their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from strobe.server.parsers.base import CallDelta, Parsed, Phase, find_first, held_back

_SPACE = " \t\r\n"


class Call(Protocol):
    """What reads one call: `CallObject` or `CallTags`."""

    name: str
    begun: bool
    offered: bool
    verdict: Literal["whole", "broken"] | None
    raw: str

    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


class CallText:
    """Parser of text with calls in it.

        text --opener--> call --closer or none--> text
          \\---- no call after all: content <----/

    A call of a tool that was not offered is content as a whole, with what looks like a call in it.
    bare: a call may also stand without the opener, as the whole answer. inner: what begins one
    without the opener, too, in front of a line. joints: characters that are no content behind
    a call: in front of its closer (by default a surplus brace) or, where there is none, of another
    call (a semicolon), which then needs no opener. trailer: what is no content behind calls, too.
    Nor is space around them.
    """

    def __init__(
        self,
        opener: str,
        closer: str,
        make: Callable[[bool], Call],
        *,
        bare: bool = False,
        inner: str = "",
        joints: str = "",
        trailer: str = "",
    ):
        """make(whether `inner` has been read) -> what reads a call."""
        self._opener, self._closer, self._bare, self._inner = opener, closer, bare, inner
        self._joints = _SPACE + (joints or ("}" if closer else ";"))
        self._trailer = trailer
        self._make, self._begins = make, (opener, inner) if inner else (opener,)
        self._state: Callable[[], bool] = self._between if bare else self._text
        self._space = ""  # content in front of the buffer, where no call follows
        self._buffer = ""
        self._line_begins = True  # in front of the space
        self._lead = ""  # what stood in front of the call, in case it is none
        self._call = make(False)
        self._index = 0
        self._unclosed = False  # a call's closer has yet to come
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._only_calls = False  # no content since the last call

    @property
    def phase(self) -> Phase:
        in_call = self._state == self._in_call and self._call.offered
        return "tool" if in_call or self._state == self._behind_call else "answer"

    def push(self, text: str) -> Parsed:
        self._buffer += text
        self._advance()
        return self._taken()

    def finish(self) -> Parsed:
        self._advance()
        while self._state == self._in_call and not self._call.begun:
            self._no_call()
            self._advance()
        if self._state == self._in_call:
            if self._call.offered:
                self._give_call(None, self._call.finish())
            else:
                self._give(self._call.raw)
        elif self._state != self._behind_call:
            rest = self._space + self._buffer
            if not self._only_calls or rest.strip(_SPACE if self._closer else self._joints):
                self._give(rest)
        self._space = self._buffer = ""
        return self._taken()

    def _advance(self) -> None:
        while self._state():
            pass

    def _taken(self) -> Parsed:
        parsed = Parsed(content="".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return parsed

    def _give(self, content: str) -> None:
        if content:
            self._content.append(content)
            self._only_calls = False
            self._line_begins = content.endswith("\n")

    # Each state consumes what it can of the buffer; False: it must wait for more.

    def _text(self) -> bool:
        markers = (*self._begins, self._closer) if self._unclosed else self._begins
        if self._trailer and self._index:
            markers = (*markers, self._trailer)
        match = find_first(self._buffer, *markers)
        if match is None:
            self._give_text(len(self._buffer) - held_back(self._buffer, *markers))
            return False
        position, marker = match
        self._give_text(position)
        if marker == self._inner and not (self._line_begins or "\n" in self._space):
            self._give_text(len(marker))
            return True
        if marker in self._begins:
            return self._begin(len(marker), inner=marker == self._inner)
        self._unclosed, self._space = False, ""
        self._buffer = self._buffer.removeprefix(marker)
        return True

    def _give_text(self, count: int) -> None:
        """Give so much of the buffer, but for the space at its end: a call may follow."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        stripped = text.rstrip(_SPACE)
        if stripped:
            self._give(self._space + stripped)
            self._space = ""
        self._space += text[len(stripped) :]

    def _pass(self, chars: str) -> str:
        """Let such characters at the buffer's beginning be space; the rest."""
        rest = self._buffer.lstrip(chars)
        self._space += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        return rest

    def _between(self) -> bool:
        """At the beginning of a bare call, if one comes."""
        rest = self._pass(self._joints if self._index else _SPACE)
        if rest.startswith("{"):
            return self._begin(0)
        if rest.startswith(self._opener):
            return self._begin(len(self._opener))
        if self._opener.startswith(rest):
            return False
        self._state = self._text
        return True

    def _begin(self, count: int, *, inner: bool = False) -> bool:
        """Begin a call behind so many characters of the buffer."""
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
            self._give_call(None if had_begun else call.name, arguments)
        elif call.begun and (read := len(raw) + len(buffer) - len(call.raw)):
            self._give(self._lead + (raw + buffer)[:read])
            self._lead = ""
        if call.verdict is None:
            return False
        if not call.begun:
            self._no_call()
            return True
        self._buffer = call.raw
        if not call.offered:
            self._state = self._text
            return True
        self._index += 1
        self._only_calls = self._line_begins = True
        self._state = self._behind_call if self._closer else self._between
        return True

    def _give_call(self, name: str | None, arguments: str) -> None:
        if name or arguments:
            self._calls.append(CallDelta(self._index, name, arguments))

    def _no_call(self) -> None:
        """Let what looked like a call be content, and look for a call inside it."""
        self._give(self._lead)
        self._buffer = self._call.raw
        self._state = self._text

    def _behind_call(self) -> bool:
        """At the closer, which may lack."""
        rest = self._pass(self._joints)
        if self._closer.startswith(rest) and rest != self._closer:
            return False
        self._unclosed = not rest.startswith(self._closer)
        self._buffer = self._space + rest if self._unclosed else rest.removeprefix(self._closer)
        self._space = ""
        self._state = self._text
        return True
