"""The command line: finds and runs the command, and reports an error in one sentence.

Slow imports are left to the commands' modules, so that `strobe --help` is fast and Ctrl-C ends a
command quietly from the start.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from strobe.tools.exit_status import exit_status

COMMANDS = {
    "generate": "Answer prompts and print the answers.",
    "chat": "Talk with a model in the terminal; answers stream.",
    "serve": "Serve a model through the APIs of OpenAI, Anthropic and Ollama, with a page.",
    "run-batch": "Answer a file of requests as OpenAI's batch API does.",
    "pull": "Fetch a small language model to try.",
    "demo": "Stream an answer, then compare plain decoding with DFlash.",
    "info": "Describe a checkpoint, and check whether a drafter fits it.",
    "doctor": "Find out why few drafts are accepted.",
    "verify": "Prove that speculation gives the target's own output.",
    "bench": "Measure single steps, or whole answers.",
    "eval": "Measure acceptance, accuracy or speed on data sets.",
}
"""The commands, named like their modules in this package, and their descriptions."""
ELSEWHERE = {
    "train": "python -m strobe.tools.train trains a drafter, as docs/training.md shows",
}
"""What to run in place of commands that one may look for."""
_ABOUT = (
    "Strobe: LLM inference with DFlash block-diffusion speculation. Without a target, commands use "
    "the demo models. Commands also take the options of vLLM and SGLang."
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status; a user's error prints one sentence."""
    if arguments is None:
        gc.set_threshold(10_000, 20, 20)  # imports create much and leave no garbage
    return exit_status(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    _open_standard_files(reads="chat" in arguments[:1], writes="serve" not in arguments[:1])
    if not arguments or arguments[0] in ("-h", "--help"):
        return _help()
    if arguments[0] in ("-V", "--version"):
        return _version()
    from strobe.cli.options_file import expand_options_file
    from strobe.compat.arguments import split_options

    words, options = split_options(expand_options_file(arguments))
    name = words[0] if words else ""
    if not words or words[0] in ("-h", "--help"):
        return _help()
    if name in ELSEWHERE:
        raise ValueError(f"{name!r} is not a command; {ELSEWHERE[name]}.")
    if name not in COMMANDS:
        raise ValueError(f"{name!r} is not a command; there are {', '.join(COMMANDS)}.")
    from strobe.cli.flags import completed, parse

    module = import_module(f"strobe.cli.{name.replace('-', '_')}")
    rest = words[1:]
    if name in ("bench", "eval"):
        rest = completed(rest, module.KINDS, module.NOUN)
    kind = getattr(module, "".join(part.capitalize() for part in name.split("-")))
    return parse(kind, f"strobe {name}", rest, options).run()


def _version() -> int:
    from strobe import __version__

    print(f"strobe {__version__}")
    return 0


def _help() -> int:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, text in COMMANDS.items():
        table.add_row(f"  • {name}", text)
    console.print("usage: strobe COMMAND [OPTIONS]\n", _ABOUT, "\nCommands:", sep="\n")
    console.print(table)
    console.print("\nstrobe COMMAND --help lists a command's options.")
    return 0


def _open_standard_files(*, reads: bool, writes: bool) -> None:
    """Open /dev/null in place of a closed standard file, since the next opened file would take its
    descriptor. Raises ValueError if the command needs that file."""
    streams: list[Any] = [sys.stdin, sys.stdout, sys.stderr]
    if None not in streams:
        return
    for number, stream in enumerate(streams):
        if stream is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if reads and streams[0] is None:
        raise ValueError("Standard input is closed, but a chat reads it; leave it open.")
    if writes and streams[1] is None:
        raise ValueError("Standard output is closed, but answers go there; leave it open.")


if __name__ == "__main__":
    sys.exit(main())
