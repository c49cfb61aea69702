"""The parser of gpt-oss answers: messages in channels, thinking and calls among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Literal

from strobe.server.parsers.base import CallDelta, Parsed, Phase, find_first, held_back

START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL, RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"

Kind = Literal["reasoning", "content", "call"]

_PHASES: dict[Kind, Phase] = {"reasoning": "thinking", "content": "answer", "call": "tool"}
_ENDS = (END, CALL, RETURN)
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, "to=")
_LONGEST_HEADER = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]*)")
_MARKUP = re.compile(r"<\|(?:start|channel|constrain)\|>|<[|a-z]*$")
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "to=")


class Channels:
    """Parser of a chain of messages.

        outside --start or channel--> header --message--> body --end, call, return--> outside
            \\---- anything else: content ----/              \\---- start, channel: header

    The prompt ends in the first message's start and role. A message with a recipient is a call,
    one in the analysis channel reasoning, any other content; messages of a kind are joined by a
    line break. What begins like a header and goes on as none is content.
    """

    def __init__(self, *, thinking_open: bool, tools: Collection[str] | None):
        """tools: the names of those that may be called, none for any. None leaves all calls in the
        content, header and all, as calls of others are left."""
        self._tools = tools
        self._state: Callable[[], bool] = self._outside
        self.phase: Phase = "answer"
        self._buffer = ""
        self._kind: Kind | None = None
        self._given_calls: set[Kind] = set()
        self._joint = ""
        self._index = -1
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        if thinking_open:
            self._begin("reasoning")

    def push(self, text: str) -> Parsed:
        self._buffer += text
        while self._state():
            pass
        return self._taken()

    def finish(self) -> Parsed:
        rest, self._buffer = self._buffer, ""
        if self._state != self._body and not self._is_framing(rest):
            self._begin("content")
        if self._state == self._body:
            self._give(rest)
        return self._taken()

    def _is_framing(self, rest: str) -> bool:
        """Whether what an answer's end cut off outside a message is the frame of the next."""
        if self._state == self._header:
            words = _MARKUP.sub(" ", rest).split()
            return all(
                word.startswith("to=")
                or any(header_word.startswith(word) for header_word in _HEADER_WORDS)
                for word in words
            )
        return self._kind is not None and not _MARKUP.sub("", rest).strip()

    def _taken(self) -> Parsed:
        parsed = Parsed("".join(self._reasoning), "".join(self._content), tuple(self._calls))
        self._reasoning, self._content, self._calls = [], [], []
        return parsed

    def _begin(self, kind: Kind, name: str = "") -> None:
        """Begin a message's body. name: of the function called."""
        self._kind, self._state, self.phase = kind, self._body, _PHASES[kind]
        self._joint = "\n" if kind in self._given_calls else ""
        if kind == "call":
            self._index += 1
            self._calls.append(CallDelta(self._index, name, ""))

    def _give(self, text: str) -> None:
        if not text:
            return
        assert self._kind is not None
        if self._kind == "call":
            self._calls.append(CallDelta(self._index, None, text))
            return
        (self._reasoning if self._kind == "reasoning" else self._content).append(self._joint + text)
        self._joint = ""
        self._given_calls.add(self._kind)

    # Each state consumes what it can of the buffer; False: it must wait for more.

    def _outside(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(_HEADER_BEGINS):
            self._buffer = rest
            self._state = self._header
            return True
        if any(begins.startswith(rest) for begins in _HEADER_BEGINS):
            return False
        self._begin("content")
        return True

    def _header(self) -> bool:
        head, message, rest = self._buffer.partition(MESSAGE)
        if not message:
            head = head[: len(head) - held_back(head, MESSAGE, START, *_ENDS)]
        end = _header_breaks(head)
        if end is not None:
            self._begin("content")
            self._give(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return True
        if not message:
            return False
        self._buffer = rest
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if recipient and recipient[1] not in ("assistant", "user", "all"):
            name = recipient[1].removeprefix("functions.")
            if self._tools is not None and (not self._tools or name in self._tools):
                self._begin("call", name)
            else:
                self._begin("content")
                self._give(head + message)
        else:
            self._begin("reasoning" if channel and channel[1] == "analysis" else "content")
        return True

    def _body(self) -> bool:
        markers = (*_ENDS, START, CHANNEL)
        match = find_first(self._buffer, *markers)
        if match is None:
            end = len(self._buffer) - held_back(self._buffer, *markers)
            self._give(self._buffer[:end])
            self._buffer = self._buffer[end:]
            return False
        position, marker = match
        self._give(self._buffer[:position])
        ended = marker in _ENDS
        self._buffer = self._buffer[position + len(marker) if ended else position :]
        self._state = self._outside if ended else self._header
        return True


def _header_breaks(head: str) -> int | None:
    """Where a header turns out to be none: at a line break, the end of a message or the start of
    another, or when it grows too long."""
    places = [head.find(end) for end in ("\n", *_ENDS)] + [head.find(START, 1)]
    places += [_LONGEST_HEADER] if len(head) > _LONGEST_HEADER else []
    return min((place for place in places if place >= 0), default=None)
