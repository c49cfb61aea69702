"""`strobe chat`."""

from __future__ import annotations

import importlib
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tyro.conf import OmitArgPrefixes

from strobe.cli.flags import (
    ChatFlags,
    Debug,
    EngineFlags,
    System,
    Thinking,
    conversation,
    load,
    sampling,
)


@dataclass(frozen=True)
class Chat:
    """Talk with a model in the terminal; answers stream."""

    thinking: Thinking = False
    system: System = None
    debug: Debug = False
    sampling: OmitArgPrefixes[ChatFlags] = field(default_factory=ChatFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from rich.console import Console

        console = Console(highlight=False, emoji=False)
        llm = load(self.engine)
        params = sampling(llm, self.sampling)
        if sys.stdin.isatty():
            console.print(
                "[dim]/new starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer.[/dim]"
            )
        messages = conversation(None, self.system)
        while True:
            try:
                text = _ask(console).strip()
            except (EOFError, KeyboardInterrupt):
                if sys.stdin.isatty():
                    console.print()
                return 0
            if text == "/exit":
                return 0
            if text == "/new":
                messages = conversation(None, self.system)
            elif text.startswith("/"):
                _say(console, f"{text} is no command; there are /new and /exit.")
            elif text:
                messages.append({"role": "user", "content": text})
                self._answer(console, llm, messages, params)

    def _answer(self, console: Any, llm: Any, messages: list[dict[str, str]], params: Any) -> None:
        """Stream one answer and append it to the conversation."""
        if sys.stdin.isatty():
            console.print("[bold green]strobe>[/bold green] ", end="")
        began, delta, note = time.perf_counter(), None, ""
        stream = llm.stream_chat(messages, params, enable_thinking=self.thinking)
        try:
            with closing(stream):
                for delta in stream:
                    print(delta.text, end="", flush=True)
        except ValueError as error:
            messages.pop()
            _say(console, f"{error} /new starts over.", style="red")
            return
        except KeyboardInterrupt:
            note = " (stopped)"
        _say(console, note, style="dim")
        if delta is None:
            messages.pop()
            return
        answer = delta.output.text.split("</think>")[-1].strip()
        messages.append({"role": "assistant", "content": answer})
        _say(console, _summary(delta.output, time.perf_counter() - began), style="dim")


def _ask(console: Any) -> str:
    """A line from the user. The prompt goes through readline, so that editing leaves it alone."""
    if not sys.stdin.isatty():
        return input()
    importlib.import_module("readline")  # gives input() editing and history
    colour = console.is_terminal and not console.no_color
    return input("\001\033[1;36m\002you>\001\033[0m\002 " if colour else "you> ")


def _say(console: Any, text: str, style: str | None = None) -> None:
    """A line of the program's own, wrapped between words on a terminal only."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def _summary(answer: Any, seconds: float) -> str:
    """One line on an answer: tokens, rate and acceptance."""
    made = len(answer.token_ids)
    line = f"{made} tokens, {made / seconds:.0f} tokens/s"
    report = answer.speculation
    if report is not None and report.used:
        return f"{line}, {report.method}: {report.acceptance_length:.2f} tokens per step"
    return f"{line}, plain: {report.off_reason}" if report is not None else line
