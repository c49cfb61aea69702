"""`strobe chat`."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

from tyro.conf import OmitArgPrefixes

from strobe.cli.answer_view import AnswerView
from strobe.cli.flags import (
    ChatFlags,
    Debug,
    EngineFlags,
    System,
    Target,
    Thinking,
    conversation,
    load,
    sampling,
)
from strobe.cli.prompt import Prompt
from strobe.compat.arguments import parse_value
from strobe.server.parsers.formats import REASONING_FORMATS, detect
from strobe.terminal.wording import counted
from strobe.validation import brief

if TYPE_CHECKING:
    from rich.console import Console

    from strobe.llm import LLM
    from strobe.outputs import CompletionOutput
    from strobe.sampling_params import SamplingParams

COMMANDS = {
    "/new": "Start over.",
    "/retry": "Answer the last message again.",
    "/system TEXT": "Replace the system message with TEXT; without TEXT, remove it.",
    "/set NAME VALUE": "Set a sampling parameter, or reset it; alone, list all.",
    "/think on|off": "Let the model think before it answers, or not.",
    "/spec on|off": "Speculate, or decode one token at a time.",
    "/save FILE": "Write the conversation to FILE as JSON.",
    "/load FILE": "Continue the conversation that FILE holds.",
    "/help": "Show this list.",
    "/exit": "Leave, as Ctrl-D and two Ctrl-C do.",
}
PARAMETERS: tuple[str, ...] = tuple(get_type_hints(ChatFlags))
"""Sampling parameters that /set knows."""
NAMES = {command.split()[0] for command in COMMANDS}


@dataclass(frozen=True)
class Chat:
    """Talk with a model in the terminal; answers stream."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe chat smollm2",
        "strobe chat Qwen/Qwen3-4B --draft auto --thinking",
    )

    model: Target = ""
    thinking: Thinking = False
    system: System = None
    debug: Debug = False
    sampling: OmitArgPrefixes[ChatFlags] = field(default_factory=ChatFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from rich.console import Console

        console = Console(highlight=False, emoji=False)
        llm = load(replace(self.engine, target=self.model))
        return _ChatSession(
            console=console,
            llm=llm,
            params=sampling(llm, self.sampling),
            system=self.system,
            thinking=self.thinking,
        ).run()


class _ChatSession:
    """A conversation and the commands that change it."""

    def __init__(
        self,
        console: Console,
        llm: LLM,
        params: SamplingParams,
        *,
        system: str | None,
        thinking: bool,
    ):
        self.console = console
        self.llm = llm
        self.params = params
        self.defaults = params
        self.system = system
        self.thinking = thinking
        self.messages = conversation(None, system)
        template = llm.tokenizer.hf.chat_template
        name = detect(template if isinstance(template, str) else None)[1]
        self.can_think = isinstance(template, str) and "enable_thinking" in template
        self.format = REASONING_FORMATS[name] if name is not None else None
        if self.format is not None and self.format.keep_special:
            self.params = self.defaults = params.clone(skip_special_tokens=False)

    def run(self) -> int:
        """Read and answer until the input ends or the user leaves; return the exit status."""
        leaving = False
        if sys.stdin.isatty():
            self.console.print("[dim]/help lists commands; Ctrl-C stops an answer.[/dim]")
        prompt = Prompt(self.console)
        while True:
            try:
                text = prompt.ask(NAMES).strip()
                if text.split()[:1] == ["/exit"]:
                    return 0
                leaving = False
                self._take(text)
            except EOFError:
                if sys.stdin.isatty():
                    self.console.print()
                return 0
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    return 0
                self.console.print()
                if leaving:
                    return 0
                leaving = True
                _say(self.console, "Ctrl-C again leaves, as Ctrl-D and /exit do.", style="dim")

    def _take(self, text: str) -> None:
        """Carry out a command, or answer a message."""
        name, _, rest = text.partition(" ")
        if name.startswith("/") and "\n" not in name:
            self._command(name, rest.strip())
        elif text:
            self.messages.append({"role": "user", "content": text})
            self._answer()

    def _command(self, name: str, rest: str) -> None:
        on = {"on": True, "off": False}.get(rest)
        if name == "/help":
            for command, description in COMMANDS.items():
                _say(self.console, f"{command:16} {description}")
        elif name == "/new":
            self.messages = conversation(None, self.system)
            self._confirm("The conversation is empty.")
        elif name == "/system":
            self.system = rest or None
            turns = [message for message in self.messages if message["role"] != "system"]
            self.messages = conversation(None, self.system) + turns
            self._confirm(
                f"The system message is {brief(rest)} now."
                if rest
                else "There is no system message."
            )
        elif name == "/save" and rest:
            self._save(Path(os.path.expanduser(rest)))
        elif name == "/load" and rest:
            self._load(Path(os.path.expanduser(rest)))
        elif name == "/retry" and not rest:
            self._retry()
        elif name == "/set":
            self._set(*rest.split(maxsplit=1))
        elif name == "/think" and on is not None:
            self.thinking = on
            unread = " But this model's chat template does not read it."
            self._confirm(f"Thinking is {rest}.{'' if self.can_think else unread}")
        elif name == "/spec" and on is not None:
            self.params = self.params.clone(speculation=None if on else False)
            self._confirm(f"Speculation is {rest}.")
        elif name in NAMES:
            (usage,) = [command for command in COMMANDS if command.split()[0] == name]
            _say(self.console, f"{name} {rest}".strip() + f" is not complete; write {usage}.")
        else:
            _say(self.console, f"{name} is not a command; /help lists them.")

    def _confirm(self, sentence: str) -> None:
        _say(self.console, sentence, style="dim")

    def _save(self, path: Path) -> None:
        try:
            path.write_text(json.dumps(self.messages, indent=1, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            _say(self.console, f"{path} cannot be written: {error.strerror}.", style="red")
        else:
            self._confirm(f"{counted(len(self.messages), 'message')} saved in {path}.")

    def _load(self, path: Path) -> None:
        try:
            messages = _read_messages(path)
        except ValueError as error:
            _say(self.console, str(error), style="red")
            return
        systems = [message["content"] for message in messages if message["role"] == "system"]
        self.messages = messages
        self.system = systems[0] if systems else None
        self._confirm(f"{counted(len(messages), 'message')} loaded from {path}.")

    def _retry(self) -> None:
        """Replace the last answer, by another one if it is sampled."""
        last = [message["role"] for message in self.messages][-1:]
        kept = list(self.messages)
        if last == ["assistant"]:
            self.messages.pop()
        elif last != ["user"]:
            _say(self.console, "There is no message to answer; write one.")
            return
        if self.params.seed is not None:
            self.params = self.params.clone(seed=self.params.seed + 1)
        if not self._answer():
            self.messages = kept

    def _set(self, name: str | None = None, value: str | None = None) -> None:
        """Set a sampling parameter, or reset it, or list all of them."""
        names = PARAMETERS
        if name is None:
            for known in names:
                _say(self.console, f"{known:26} {getattr(self.params, known)}")
            return
        name = name.replace("-", "_")
        if name not in names:
            _say(self.console, f"{brief(name)} is not a parameter; /set lists them.")
            return
        new = getattr(self.defaults, name)
        if value is not None:
            new = {"true": True, "false": False, "none": None}.get(value.lower(), value)
            new = parse_value(new) if isinstance(new, str) else new
        try:
            self.params = self.params.clone(**{name: new})
        except ValueError as error:
            _say(self.console, str(error), style="red")
        else:
            self._confirm(f"{name} is {getattr(self.params, name)}.")

    def _answer(self) -> bool:
        """Stream one answer and append it to the conversation. Returns False, and removes the
        message, if there is none."""
        console = self.console
        began = time.perf_counter()
        delta = None
        note = ""
        if sys.stdin.isatty():
            console.print("[bold green]strobe>[/bold green] ", end="")
        shown = AnswerView(console, self.format, len("strobe> ") if sys.stdin.isatty() else 0)
        options = {"enable_thinking": self.thinking}
        try:
            shown.begin(self.llm.tokenizer.chat_text(self.messages, **options))
            with closing(self.llm.stream_chat(self.messages, self.params, **options)) as stream:
                for delta in stream:
                    shown.push(delta.text)
        except ValueError as error:
            self.messages.pop()
            _say(console, f"{error} /new starts over.", style="red")
            return False
        except KeyboardInterrupt:
            note = " (stopped)"
        shown.end()
        if note or not shown.at_line_start:
            _say(console, note, style="dim")
        if delta is None:
            self.messages.pop()
            return False
        self.messages.append({"role": "assistant", "content": shown.content.strip()})
        _say(console, _summary(delta.output, time.perf_counter() - began), style="dim")
        return True


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Print a line of the program's own, wrapped at words only on a terminal."""
    console.print(text, style=style, markup=False, soft_wrap=not console.is_terminal)


def _read_messages(path: Path) -> list[dict[str, Any]]:
    """Read a conversation that /save has written. Raises ValueError."""
    try:
        messages = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(messages, list) or not all(
        isinstance(message, dict)
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
        for message in messages
    ):
        raise ValueError(
            f"{path} is not a conversation: it must be a list of objects with role and content."
        )
    return messages


def _summary(answer: CompletionOutput, seconds: float) -> str:
    """Summarize an answer in one line: tokens, rate and acceptance."""
    num_tokens = len(answer.token_ids)
    line = f"{counted(num_tokens, 'token')}, {num_tokens / seconds:.0f} tokens/s"
    report = answer.speculation
    if report is not None and report.used:
        return f"{line}, {report.method}: {report.counts.acceptance_length:.2f} tokens per step"
    return f"{line}, plain: {report.off_reason}" if report is not None else line
