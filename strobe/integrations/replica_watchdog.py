"""Kills a replica's process that has stopped. Ray only asks such a process to end.

The process starts this file as a script, which imports nothing of Strobe, and writes a byte to its
standard input each second. The script ends with the process.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

BEAT_SECONDS = 1.0
STOPPED_SECONDS = 30
"""A process that writes nothing for so long has stopped, as with --data-parallel-size."""


class Heartbeat:
    """Starts the script for this process, and writes to it until `stop`."""

    def __init__(self, seconds: int = STOPPED_SECONDS) -> None:
        script = [sys.executable, "-I", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            [*script, str(os.getpid()), str(seconds)], stdin=subprocess.PIPE
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="strobe-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        while not self._stopped.wait(BEAT_SECONDS):
            try:
                os.write(pipe.fileno(), b".")
            except BlockingIOError:  # the script itself has stopped
                continue
            except OSError:
                return

    def stop(self) -> None:
        """End the script."""
        self._stopped.set()
        self._thread.join()  # it writes to the pipe's number
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def watch(pid: int, seconds: int, fd: int = 0) -> bool:
    """Return once the process has ended, or has written nothing to `fd` for so many seconds, which
    kills it. Returns whether it was killed. It counts seconds by its checks: while the machine is
    suspended, none pass."""
    silent = 0.0
    while silent < seconds:
        if not select.select([fd], [], [], BEAT_SECONDS)[0]:
            silent += BEAT_SECONDS
        elif os.read(fd, 4096):
            silent = 0.0
        else:
            return False
    print(
        f"The replica's process {pid} has stopped for {seconds} s; it is killed.", file=sys.stderr
    )
    os.kill(pid, signal.SIGKILL)
    return True


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
