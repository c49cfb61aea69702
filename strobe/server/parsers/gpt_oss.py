"""The format of gpt-oss (OpenAI's harmony): a chain of messages, each in a channel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strobe.server.parsers.channels import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, Channels
from strobe.server.parsers.lark import arguments, check_name, check_tokens, literal, marker
from strobe.server.parsers.parser import Tool
from strobe.server.parsers.segment import Parser

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
