"""The format of gpt-oss (OpenAI's harmony): a chain of messages, each in a channel."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import StateParser, find_first, held_back
from strobe.server.parsers.call_arguments import as_arguments
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.lark import arguments, check_name, check_tokens, literal, marker
from strobe.server.parsers.segment import Kind, Parser, Phase, Segment

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"

_PHASES: dict[Kind, Phase] = {"reasoning": "thinking", "content": "answer", "call": "tool"}
_ENDS = (END, CALL, RETURN)
_BODY_ENDS = (*_ENDS, START, CHANNEL)
_HEADER_BEGINS = (START, CHANNEL, MESSAGE, "to=")
_MAX_HEADER_CHARS = 512
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]*)")
_MARKUP = re.compile(r"<\|(?:start|channel|constrain)\|>|<[|a-z]*$")
_HEADER_WORDS = ("assistant", "analysis", "commentary", "final", "json", "to=")
_NAME = re.compile(r"[^\s<>]+")


@dataclass(frozen=True)
class GptOss:
    """`<|channel|>analysis<|message|>` opens reasoning, `<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>` a call, `<|channel|>final<|message|>` the answer; commentary
    without a recipient is part of the answer. A call ends the answer, unless `<|call|>` is not an
    end token."""

    name: str = "gpt_oss"
    keep_special: bool = True
    whole_answer: bool = True
    openers: tuple[str, ...] = ()
    line_openers: tuple[str, ...] = ()
    start: str = f"{CHANNEL}analysis{MESSAGE}"
    end: str = f"{CHANNEL}final{MESSAGE}"
    gap: str = ""

    def opened_by(self, prompt: str) -> bool:
        return prompt.endswith(self.start)

    def parser(
        self,
        tools: Sequence[Tool] | None = (),
        *,
        forced: bool = False,
        whole_calls: bool = False,
        thinking_open: bool = False,
    ) -> Parser:
        """Return a parser. Its parameters: see `make_parser`."""
        names = None if tools is None else {tool.name for tool in tools}
        holds_calls = whole_calls or not forced
        return Channels(thinking_open=thinking_open, tools=names, holds_calls=holds_calls)

    def grammar(
        self, tools: Sequence[Tool], *, parallel: bool, added_tokens: Mapping[str, int]
    ) -> str:
        markers = START, CHANNEL, CONSTRAIN, MESSAGE, CALL, END
        check_tokens(markers, added_tokens, self.name)
        token = {text: marker(text, added_tokens) for text in added_tokens}
        turn = f'{token[START]} "assistant"'
        repeats = f" ({turn} call)*" if parallel else ""
        calls = "\n  | ".join(f"head_{i} {arguments(tool)}" for i, tool in enumerate(tools))
        heads = (f"head_{i}: {_heads(tool, token)}" for i, tool in enumerate(tools))
        return "\n".join(
            (
                f"start: thinking* call{repeats}",
                f'thinking: {token[CHANNEL]} "analysis" {token[MESSAGE]} TEXT {token[END]} {turn}',
                f"call: message {token[CALL]}",
                f"message: {calls}",
                *heads,
                r"TEXT: /(.|\n)*/",
            )
        )


def _heads(tool: Tool, token: Mapping[str, str]) -> str:
    """Return a rule for a call's header, as models write it or as the chat template shows earlier
    calls."""
    check_name(tool, _NAME, "gpt_oss", "leave out spaces, < and >")
    recipient = f"to=functions.{tool.name}"
    channel = token[CHANNEL]
    constrain = token[CONSTRAIN]
    message = token[MESSAGE]
    by_model = f'{channel} {literal(f"commentary {recipient} ")} {constrain} "json" {message}'
    by_template = f'{literal(f" {recipient}")} {channel} "commentary json" {message}'
    return f"{by_model} | {by_template}"


class Channels(StateParser):
    """Parser of a chain of messages.

        outside --start or channel--> header --message--> body --end, call, return--> outside
            \\---- anything else: content ----/              \\---- start, channel: header

    The prompt ends with the first message's start and role. A message with a recipient is a call,
    one in the analysis channel is reasoning, any other is content; messages of one kind are joined
    by a line break. Text that begins like a header but is not one is content. So is a call whose
    body is neither a JSON object nor blank, header included; a blank body is an empty object.
    """

    def __init__(
        self, *, thinking_open: bool, tools: Collection[str] | None, holds_calls: bool = True
    ):
        """tools: the names of the tools that may be called, empty for any; calls of other tools are
        content, header included. None: all calls are content. holds_calls: whether a call is held
        back until its end, when it is known whether its arguments are an object."""
        super().__init__(self._outside)
        self._tools = tools
        self._holds_calls = holds_calls
        self._name = ""  # of the call
        self._arguments_start = 0  # of the call
        self.phase: Phase = "answer"
        self._kind: Kind | None = None
        self._seen_kinds: set[Kind] = set()
        self._separator = ""
        self._index = -1
        if thinking_open:
            self._begin("reasoning")

    def finish(self, *, cut: bool = False) -> list[Segment]:
        if self._state != self._body and not self._is_framing(self._buffer.text):
            self._begin("content")
        if self._state == self._body:
            self._emit(len(self._buffer.text))
            self._end_body(cut=cut)
        return self._flush()

    def _is_framing(self, rest: str) -> bool:
        """Whether the text after the last message is only a part of the next one's header."""
        if self._state == self._header:
            words = _MARKUP.sub(" ", rest).split()
            return all(
                word.startswith("to=")
                or any(header_word.startswith(word) for header_word in _HEADER_WORDS)
                for word in words
            )
        return self._kind is not None and not _MARKUP.sub("", rest).strip()

    def _begin(self, kind: Kind) -> None:
        """Begin a message's body."""
        self._kind = kind
        self._state = self._body
        self.phase = _PHASES[kind]
        self._separator = "\n" if kind in self._seen_kinds else ""

    def _begin_call(self, name: str) -> None:
        """Begin the body of a call, whose header is kept. name: the called function."""
        self._begin("call")
        self._name = name
        self._arguments_start = self._buffer.position
        if not self._holds_calls:
            self._buffer.drop_kept()
            self._index += 1
            self._output_call("", 0, name)

    def _end_body(self, *, cut: bool) -> None:
        """End a message's body."""
        if self._kind != "call":
            return
        count = self._buffer.position - self._arguments_start
        if not self._holds_calls:
            if not count and not cut:
                self._output_call("{}", 0)
            return
        kept = self._buffer.kept
        text = kept[len(kept) - count :]
        arguments = as_arguments(text if text.strip() or cut else "{}")
        if arguments is not None:
            self._index += 1
            self._output_call(arguments, count, self._name)
        elif not cut:
            self._begin("content")
            self._emit(0)
        self._buffer.drop_kept()

    def _emit(self, count: int) -> None:
        """Take so many characters into the current message, after the text that is kept."""
        if self._kind == "call" and not self._holds_calls:
            arguments = self._buffer.text[:count]
            self._buffer.skip(count)
            if arguments:
                self._output_call(arguments, count)
            return
        assert self._kind is not None
        self._buffer.read(count)
        if self._kind == "call" or not self._buffer.kept:
            return
        self._output_kept(self._kind, self._separator)
        self._separator = ""
        self._seen_kinds.add(self._kind)

    def _output_call(self, arguments: str, count: int, name: str | None = None) -> None:
        """Output arguments, which were read from so many characters in front of the buffer. name:
        in the call's first output."""
        end = self._buffer.position
        self._output(
            Segment(
                kind="call",
                text=arguments,
                start=end - count,
                end=end,
                call=self._index,
                name=name,
            )
        )

    def _outside(self) -> bool:
        text = self._buffer.text
        rest = text.lstrip()
        if rest.startswith(_HEADER_BEGINS):
            self._buffer.skip(len(text) - len(rest))
            self._state = self._header
            return True
        if any(begins.startswith(rest) for begins in _HEADER_BEGINS):
            return False
        self._begin("content")
        return True

    def _header(self) -> bool:
        head, message, _ = self._buffer.text.partition(MESSAGE)
        if not message:
            head = head[: len(head) - held_back(head, (MESSAGE, START, *_ENDS))]
        end = _header_breaks(head)
        if end is not None:
            self._begin("content")
            self._emit(end)
            return True
        if not message:
            return False
        self._buffer.read(len(head) + len(message))
        recipient = _RECIPIENT.search(head)
        channel = _CHANNEL.search(head)
        if recipient and recipient[1] not in ("assistant", "user", "all"):
            name = recipient[1].removeprefix("functions.")
            if self._tools is not None and (not self._tools or name in self._tools):
                self._begin_call(name)
            else:
                self._begin("content")
                self._emit(0)
        else:
            self._buffer.drop_kept()
            self._begin("reasoning" if channel and channel[1] == "analysis" else "content")
        return True

    def _body(self) -> bool:
        text = self._buffer.text
        match = find_first(text, _BODY_ENDS)
        if match is None:
            self._emit(len(text) - held_back(text, _BODY_ENDS))
            return False
        position, marker = match
        self._emit(position)
        self._end_body(cut=False)
        ended = marker in _ENDS
        self._buffer.skip(len(marker) if ended else 0)
        self._state = self._outside if ended else self._header
        return True


def _header_breaks(head: str) -> int | None:
    """Return the position at which a text cannot be a header: a line break, a message's end, the
    start of another message, or _MAX_HEADER_CHARS. None if there is none."""
    positions = [head.find(end) for end in ("\n", *_ENDS)] + [head.find(START, 1)]
    positions += [_MAX_HEADER_CHARS] if len(head) > _MAX_HEADER_CHARS else []
    return min((position for position in positions if position >= 0), default=None)
