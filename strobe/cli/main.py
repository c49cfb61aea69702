"""The command line. Options come from the dataclasses that the API uses; torch loads late."""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import logging
import operator
import os
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand

from strobe.cli import bench as bench_command
from strobe.cli import eval as eval_command
from strobe.cli.doctor import Doctor
from strobe.cli.flags import (
    SHOWN,
    ChatFlags,
    DemoFlags,
    EngineFlags,
    SamplingFlags,
    ServedFlags,
    ServerFlags,
    adopted,
    value,
)
from strobe.compat.arguments import separate
from strobe.config import DEMO_MODELS, EngineConfig
from strobe.sampling_params import SamplingParams
from strobe.server.settings import ServerConfig

Json = FlagCreatePairsOff[
    Annotated[bool, arg(help="Print one JSON object on standard output.", help_behavior_hint="")]
]
Thinking = FlagCreatePairsOff[
    Annotated[bool, arg(help="Let the model think before it answers.", help_behavior_hint="")]
]
Debug = FlagCreatePairsOff[
    Annotated[bool, arg(help="Log every verify step on standard error.", help_behavior_hint="")]
]
System = Annotated[str | None, arg(help="A system message.", metavar="TEXT", help_behavior_hint="")]


@dataclass(frozen=True)
class Generate:
    """Answer prompts and print the answers."""

    prompts: Annotated[
        Positional[tuple[str, ...]],
        arg(help="One or more prompts.", metavar="PROMPT ...", help_behavior_hint=""),
    ]
    chat: Annotated[bool, arg(help="Put the prompts through the chat template.")] = True
    thinking: Thinking = False
    system: System = None
    json: Json = False
    debug: Debug = False
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        if not self.prompts:
            raise ValueError("No prompt was given; name one or more: strobe generate 'PROMPT'.")
        if not self.chat and (self.thinking or self.system):
            raise ValueError("--thinking and --system need the chat template; drop --no-chat.")
        llm = _load(self.engine)
        params = _sampling(llm, self.sampling)
        if self.chat:
            outputs = llm.chat(
                [_conversation(prompt, self.system) for prompt in self.prompts],
                params,
                use_tqdm=False,
                chat_template_kwargs={"enable_thinking": self.thinking},
            )
        else:
            outputs = llm.generate(list(self.prompts), params, use_tqdm=False)
        if self.json:
            print(json.dumps({"outputs": [asdict(output) for output in outputs]}))
        else:
            _print_answers(self.prompts, outputs)
        errors = [output.outputs[0].error for output in outputs]
        for number, error in enumerate(errors, start=1):
            if error is not None:
                which = f"prompt {number}: " if len(outputs) > 1 else ""
                print(f"strobe: {which}{error}", file=sys.stderr)
        return 1 if any(errors) else 0


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
        llm = _load(self.engine)
        params = _sampling(llm, self.sampling)
        if sys.stdin.isatty():
            console.print(
                "[dim]/new starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer.[/dim]"
            )
        messages = _conversation(None, self.system)
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
                messages = _conversation(None, self.system)
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


@dataclass(frozen=True)
class Demo:
    """Stream an answer from the pair in the box, then compare plain decoding with DFlash."""

    prompts: Annotated[Any, arg(help="Held-out prompts to compare on."), value("INT")] = 12
    max_tokens: Annotated[Any, arg(help="Most tokens per answer."), value("INT")] = 256
    repeats: Annotated[Any, arg(help="Timed runs; the fastest of each counts."), value("INT")] = 2
    json: Json = False
    debug: Debug = False
    engine: OmitArgPrefixes[DemoFlags] = field(default_factory=DemoFlags)

    def run(self) -> int:
        from strobe.cli.demo import run_demo

        return run_demo(
            EngineConfig(**asdict(self.engine)),
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            as_json=self.json,
        )


@dataclass(frozen=True)
class Info:
    """Say what a checkpoint is, what it takes to run, and whether a drafter fits it."""

    model: Annotated[
        Positional[str],
        arg(
            help="Directory or hub name of a target or a DFlash drafter; without one, the pair in "
            "the box.",
            metavar="NAME",
            help_behavior_hint="",
        ),
    ] = ""
    draft: Annotated[
        str | None,
        arg(
            help="A drafter to check against the target; auto takes the published one.",
            metavar="TEXT",
            help_behavior_hint="",
        ),
    ] = None
    json: Json = False

    def run(self) -> int:
        from strobe.cli.info import describe, show
        from strobe.hub.locate import named

        model, draft = self.model, self.draft
        if not model:
            model, draft = str(DEMO_MODELS / "target"), draft or str(DEMO_MODELS / "draft")
        else:
            model, draft = named(model, draft)
        facts = describe(Path(model), Path(draft) if draft is not None else None)
        print(json.dumps(facts)) if self.json else show(facts)
        return 0


@dataclass(frozen=True)
class Serve:
    """Serve a model through OpenAI's API, with a page to try it; without a model, the pair in the
    box. Options of `vllm serve` and SGLang's server are understood too."""

    target: Annotated[
        Positional[str],
        arg(
            help="Directory or hub name of the target model.",
            metavar="TARGET",
            help_behavior_hint="",
        ),
    ] = ""
    server: OmitArgPrefixes[ServerFlags] = field(default_factory=ServerFlags)
    engine: OmitArgPrefixes[ServedFlags] = field(default_factory=ServedFlags)

    def run(self) -> int:
        from strobe.server.launch import serve

        config = EngineConfig(**asdict(self.engine), target=self.target)
        status = serve(config, ServerConfig(**asdict(self.server)))
        logging.shutdown()
        os._exit(status)  # a thread that still encodes some request's text would be waited for


COMMANDS: dict[str, Any] = {
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "demo": Demo,
    "info": Info,
    "doctor": Doctor,
    "bench": bench_command.Bench,
    "eval": eval_command.Eval,
}
GROUPS = {"bench": bench_command, "eval": eval_command}
"""The commands that have commands of their own."""
Command: Any = functools.reduce(
    operator.or_, [Annotated[kind, subcommand(name)] for name, kind in COMMANDS.items()]
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. What a user got wrong is one sentence."""
    given = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        given, options = separate(given)
        given = given or ["--help"]
        if not given[0].startswith("-") and given[0] not in COMMANDS:
            raise ValueError(f"{given[0]!r} is no command; there are {', '.join(COMMANDS)}.")
        if given[0] in GROUPS:
            given = [given[0], *GROUPS[given[0]].completed(given[1:])]
        command, unknown = _parse(given)
        if unknown:
            raise ValueError(_no_option(unknown[0], command))
        command = _adopted(command, options)
        if getattr(command, "debug", False):
            logging.basicConfig(format="%(name)s: %(message)s")
            logging.getLogger("strobe").setLevel(logging.DEBUG)
        status = command.run()
        sys.stdout.flush()
        return status
    except ValueError as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # nobody reads on; Python would say so once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parse(arguments: list[str]) -> tuple[Any, list[str]]:
    """The subcommand with its options, and the arguments it does not take."""
    return tyro.cli(
        Command,
        prog="strobe",
        args=arguments,
        description=(
            "Strobe: LLM inference with DFlash block-diffusion speculation. "
            "Without a target, commands use the pair in the box. "
            "Options of vLLM and SGLang are understood too."
        ),
        return_unknown_args=True,
    )


def _adopted(command: Any, options: dict[str, Any]) -> Any:
    """The subcommand with what was given by other engines' names."""
    if hasattr(command, "which"):
        return replace(command, which=adopted(command.which, options, _name(command)))
    return adopted(command, options, _name(command))


def _name(command: Any) -> str:
    """What the user typed behind `strobe`."""
    name = type(command).__name__.lower()
    return f"{name} {_name(command.which)}" if hasattr(command, "which") else name


def _no_option(given: str, command: Any) -> str:
    """The sentence for an argument that the subcommand does not take."""
    name = _name(command)
    command = getattr(command, "which", command)
    parts = ("sampling", "server", "bench", "settings", "engine")
    groups = [g for g in (getattr(command, n, None) for n in parts) if g]
    known = [f"--{f.name.replace('_', '-')}" for g in (command, *groups) for f in fields(g)]
    close = difflib.get_close_matches(given.split("=")[0].replace("_", "-"), known, 1, 0.7)
    mend = f"did you mean {close[0]}?" if close else f"strobe {name} --help lists what it takes."
    return f"strobe {name} takes no {given!r}; {mend}"


def _load(flags: Any) -> Any:
    from strobe.llm import LLM

    return LLM(**asdict(flags))


def _sampling(llm: Any, flags: Any) -> SamplingParams:
    """The checkpoint's recommended sampling with what was given on the command line."""
    given = {name: value for name, value in asdict(flags).items() if value not in (None, ())}
    given.setdefault("max_tokens", SHOWN["max_tokens"])
    return llm.get_default_sampling_params().clone(**given)


def _conversation(prompt: str | None, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return messages + ([{"role": "user", "content": prompt}] if prompt is not None else [])


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


def _print_answers(prompts: tuple[str, ...], outputs: list[Any]) -> None:
    """The answers; several are told apart by their prompts and numbers."""
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if len(outputs) > 1:
            print(f"{chr(10) if number else ''}> {prompt}")
        for answer in output.outputs:
            if len(output.outputs) > 1:
                print(f"[{answer.index + 1}]")
            if answer.error is None:
                print(answer.text)


if __name__ == "__main__":
    sys.exit(main())
