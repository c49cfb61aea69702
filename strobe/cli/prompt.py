"""The chat's input prompt, with line editing, multi-line pastes and a persistent history."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

HISTORY = 1000
"""Maximum lines of the history."""
PASTE_GAP = 0.03
"""Seconds within which the next line of a paste arrives on a terminal that does not mark pastes."""


class Prompt:
    """Reads messages, on a terminal with readline: editing leaves the prompt alone, and a paste of
    several lines is one message."""

    def __init__(self, console: Console):
        self._colour = console.is_terminal and not console.no_color
        self._readline: ModuleType | None = None
        self._history: Path | None = None
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                self._readline = importlib.import_module("readline")
                # Python turns it off, since most programs read line by line.
                self._readline.parse_and_bind("set enable-bracketed-paste on")
                self._history = history_file()
        if self._readline is not None and self._history is not None:
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._history)
                if self._entries() > HISTORY:
                    self._readline.set_history_length(HISTORY)
                    self._readline.write_history_file(self._history)

    def ask(self, commands: Collection[str] = ()) -> str:
        """Return the next message, or a line that starts with one of the commands. Raises EOFError
        at the end of the input."""
        if not sys.stdin.isatty():
            return input()
        before = self._entries()
        lines = [input("\001\033[1;36m\002you>\001\033[0m\002 " if self._colour else "you> ")]
        is_command = any(word in commands for word in lines[0].split()[:1])
        with contextlib.suppress(EOFError):
            while not is_command and select.select([sys.stdin], [], [], PASTE_GAP)[0]:
                lines.append(input("...> "))
        self._save(self._entries() - before)
        return "\n".join(lines)

    def _entries(self) -> int:
        return self._readline.get_current_history_length() if self._readline is not None else 0

    def _save(self, count: int) -> None:
        if self._readline is None or self._history is None or count <= 0:
            return
        with contextlib.suppress(OSError):
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(count, self._history)
            else:  # libedit
                self._readline.write_history_file(self._history)


def history_file() -> Path | None:
    """Return the history file, created readable by its owner only; None without a home."""
    try:
        root = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        if not root.is_absolute():
            return None
        path = root / "strobe" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
    except (OSError, RuntimeError):
        return None
    return path
