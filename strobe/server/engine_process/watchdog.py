"""Notices an engine process that does not go on. Imports no torch."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from socket import SO_SNDTIMEO, SOL_SOCKET, socket

CHECK_SECONDS = 1
SILENT_SECONDS = 300
"""An engine that sends nothing for so long while answers are open has stalled. Far longer than any
step: a long prompt on a CPU and the compilation of a kernel take minutes at most."""
STOPPED_SECONDS = 30
"""The same for an engine process that a signal such as SIGSTOP has stopped."""
FULL_PIPE_SECONDS = 5
"""An engine that reads nothing for so long while its pipe is full has stalled: a thread of its own
empties the pipe, also during a step. The server waits meanwhile."""


class Watchdog:
    """Checks an engine process from its start to its end. is_waiting: whether the server waits for
    the engine. on_stall: called with a description once the process has stalled.

    Seconds are counted by the checks: while the server itself is suspended, as by Ctrl-Z, none
    pass.
    """

    def __init__(self, is_waiting: Callable[[], bool], on_stall: Callable[[str], None]):
        self._is_waiting = is_waiting
        self._on_stall = on_stall
        self._silent = self._stopped = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, pid: int | None) -> None:
        """Check a process every CHECK_SECONDS until `stop`; needs a running event loop."""
        self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self.start, pid)
        if not self._is_waiting():
            self.reset()
            return
        self._silent += CHECK_SECONDS
        self._stopped = self._stopped + CHECK_SECONDS if _is_stopped(pid) else 0
        if self._stopped >= STOPPED_SECONDS:
            self._on_stall(f"was stopped by a signal {self._stopped} s ago")
        elif self._silent >= SILENT_SECONDS:
            self._on_stall(f"has sent nothing for {self._silent} s while answers are open")

    def stop(self) -> None:
        """End the checks."""
        if self._timer is not None:
            self._timer.cancel()

    def reset(self) -> None:
        """Restart the count: the engine has sent a message."""
        self._silent = self._stopped = 0


def _is_stopped(pid: int | None) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def limit_sends(fd: int, seconds: float) -> None:
    """Let a write raise BlockingIOError if a pipe stays full for so long. A part of the message
    may have been sent, so the pipe is of no use any more."""
    end = socket(fileno=fd)
    time = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    end.setsockopt(SOL_SOCKET, SO_SNDTIMEO, time)
    end.detach()
