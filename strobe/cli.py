"""The command line. Options come from the dataclasses that the API uses; torch loads late."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import MISSING, asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from strobe.config import EngineConfig
from strobe.request import SamplingParams

_TYPES: dict[str, Any] = {
    "method": Literal["dflash", "ngram", "none"] | None,
    "dtype": Literal["auto", "float32", "bfloat16", "float16"],
    "kv_cache_memory": str | None,
    "stop": tuple[str, ...] | None,
    "stop_token_ids": tuple[int, ...] | None,
}


def _flags(source: type, name: str, *, unset: bool, omit: tuple[str, ...] = ()) -> Any:
    """A dataclass of command-line flags from another dataclass's fields and their help.

    unset: every flag defaults to None, which stands for "not given".
    """
    hints = get_type_hints(source) | _TYPES
    made: list[Any] = []
    for f in fields(source):
        if f.name in omit:
            continue
        kind, default = hints[f.name], f.default
        assert default is not MISSING
        if unset:
            kind, default = kind | None, None
        hint = "(default: the checkpoint's or the API's)" if unset else None
        note = arg(help=f.metadata["help"], metavar=_metavar(kind), help_behavior_hint=hint)
        made.append((f.name, Annotated[kind, note], field(default=default)))
    return make_dataclass(name, made, frozen=True)


def _metavar(kind: Any) -> str | None:
    """How a flag's value is named in the help; None leaves it to tyro."""
    parts = [part for part in (get_args(kind) or (kind,)) if part is not NoneType]
    names = {int: "INT", float: "FLOAT", str: "TEXT"}
    if len(parts) == 1 and get_origin(parts[0]) is tuple:
        return f"{names[get_args(parts[0])[0]]} ..."
    return names.get(parts[0]) if len(parts) == 1 else None


if TYPE_CHECKING:
    EngineFlags = Any
    SamplingFlags = Any
else:
    EngineFlags = _flags(EngineConfig, "EngineFlags", unset=False, omit=("seed",))
    SamplingFlags = _flags(
        SamplingParams, "SamplingFlags", unset=True, omit=("speculation", "skip_special_tokens")
    )
Json = Annotated[bool, arg(help="Print one JSON object on standard output.")]
Thinking = Annotated[bool, arg(help="Let the model think before it answers.")]
Debug = Annotated[bool, arg(help="Log every verify step on standard error.")]


@dataclass(frozen=True)
class Generate:
    """Answer prompts and print the answers."""

    prompts: Annotated[
        Positional[tuple[str, ...]], arg(help="One or more prompts.", metavar="PROMPT ...")
    ]
    chat: Annotated[bool, arg(help="Put each prompt through the chat template.")] = True
    thinking: Thinking = False
    system: Annotated[str | None, arg(help="A system message for the chat template.")] = None
    json: Json = False
    debug: Debug = False
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        if not self.prompts:
            raise ValueError("No prompt was given; name one or more: strobe generate 'PROMPT'.")
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
        failed = [o for output in outputs for o in output.outputs if o.error is not None]
        if self.json:
            print(json.dumps({"outputs": [asdict(output) for output in outputs]}))
        else:
            for prompt, output in zip(self.prompts, outputs, strict=True):
                _print_answers(prompt, output, several=len(outputs) > 1)
        for answer in failed:
            print(f"strobe: {answer.error}", file=sys.stderr)
        return 1 if failed else 0


@dataclass(frozen=True)
class Chat:
    """Talk with a model in the terminal; answers stream. /new starts over, /exit leaves."""

    thinking: Thinking = False
    system: Annotated[str | None, arg(help="A system message.")] = None
    debug: Debug = False
    sampling: OmitArgPrefixes[SamplingFlags] = field(default_factory=SamplingFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from rich.console import Console

        console = Console(highlight=False)
        llm = _load(self.engine)
        params = _sampling(llm, self.sampling)
        console.print("[dim]/new starts over, /exit or Ctrl-D leaves.[/dim]")
        messages = _conversation(None, self.system)
        while True:
            try:
                text = console.input("[bold cyan]you>[/bold cyan] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return 0
            if text == "/exit":
                return 0
            if text == "/new":
                messages = _conversation(None, self.system)
            elif text:
                messages.append({"role": "user", "content": text})
                self._answer(console, llm, messages, params)

    def _answer(self, console: Any, llm: Any, messages: list[dict[str, str]], params: Any) -> None:
        """Stream one answer and append it to the conversation."""
        began, delta = time.perf_counter(), None
        try:
            for delta in llm.stream_chat(messages, params, enable_thinking=self.thinking):
                console.out(delta.text, end="", highlight=False)
        except ValueError as error:
            messages.pop()
            console.print(f"[red]{error}[/red]")
            return
        except KeyboardInterrupt:
            console.print(" [dim](stopped)[/dim]", end="")
        console.print()
        if delta is None:
            messages.pop()
            return
        answer = delta.output.text.split("</think>")[-1].strip()
        messages.append({"role": "assistant", "content": answer})
        console.print(f"[dim]{_summary(delta.output, time.perf_counter() - began)}[/dim]")


@dataclass(frozen=True)
class Demo:
    """Stream an answer from the pair in the box, then compare plain decoding with DFlash."""

    prompts: Annotated[int, arg(help="Held-out prompts to compare on.")] = 12
    max_tokens: Annotated[int, arg(help="Most tokens per answer.")] = 256
    repeats: Annotated[int, arg(help="Timed runs; the fastest of each counts.")] = 2
    json: Json = False
    debug: Debug = False
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from strobe.demo import run_demo

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

    model: Annotated[Positional[Path], arg(help="Directory of a target or a DFlash drafter.")]
    draft: Annotated[Path | None, arg(help="A drafter to check against the target.")] = None
    json: Json = False

    def run(self) -> int:
        from strobe.info import describe, show

        facts = describe(self.model, self.draft)
        print(json.dumps(facts)) if self.json else show(facts)
        return 0


Command = (
    Annotated[Generate, subcommand("generate")]
    | Annotated[Chat, subcommand("chat")]
    | Annotated[Demo, subcommand("demo")]
    | Annotated[Info, subcommand("info")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. What a user got wrong is one sentence."""
    command: Any = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType] (a union is a form tyro takes)
        prog="strobe",
        args=arguments,
        description=(
            "Strobe: LLM inference with DFlash block-diffusion speculation. "
            "Without a target, commands use the pair in the box."
        ),
    )
    if getattr(command, "debug", False):
        logging.basicConfig(level=logging.DEBUG, format="%(name)s: %(message)s")
        for noisy in ("urllib3", "filelock", "httpcore", "httpx"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return command.run()
    except ValueError as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _load(flags: Any) -> Any:
    from strobe.llm import LLM

    return LLM(**asdict(flags))


def _sampling(llm: Any, flags: Any) -> SamplingParams:
    """The checkpoint's recommended sampling with what was given on the command line."""
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    given.setdefault("max_tokens", 512)
    return llm.get_default_sampling_params().clone(**given)


def _conversation(prompt: str | None, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system else []
    return messages + ([{"role": "user", "content": prompt}] if prompt is not None else [])


def _summary(answer: Any, seconds: float) -> str:
    """One line on an answer: tokens, rate and acceptance."""
    made = len(answer.token_ids)
    line = f"{made} tokens, {made / seconds:.0f} tokens/s"
    report = answer.speculation
    if report is not None and report.used:
        return f"{line}, {report.method}: {report.acceptance_length:.2f} tokens per step"
    return f"{line}, plain: {report.off_reason}" if report is not None else line


def _print_answers(prompt: str, output: Any, *, several: bool) -> None:
    for answer in output.outputs:
        if several:
            print(f"> {prompt}")
        if answer.error is None:
            print(answer.text)


if __name__ == "__main__":
    sys.exit(main())
