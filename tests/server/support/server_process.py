"""A real `strobe serve` in a process, for tests over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import IO

from tests.server.support.polling import PATIENCE
from tests.support.processes import children_of

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def child_of(pid: int) -> list[int]:
    """Return the process ids of a server's engine processes: one, or none before it starts."""
    return children_of(pid, "spawn_main")


def launched(*options: str, **variables: str) -> subprocess.Popen[str]:
    """Start a server; variables: of its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "strobe", "serve", "--device=cpu", *options],
        cwd=ROOT, env=ENVIRONMENT | variables,
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip


class Served:
    """A running server: its URL, its log so far, and methods to stop it.

    The constructor returns when the server is ready. Raises AssertionError with the log if it does
    not start.
    """

    def __init__(self, *options: str, patience: float = PATIENCE):
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._paused: int | None = None
        self.process = launched("--port=0", *options)
        assert self.process.stderr is not None
        reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        reader.start()
        if not self._ready.wait(patience) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + self.log)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        (engine,) = child_of(self.process.pid)
        return engine

    def pause(self) -> None:
        """Suspend the engine process, so that requests stay open."""
        self._paused = self.engine_pid
        os.kill(self._paused, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume a paused engine."""
        if self._paused is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._paused, signal.SIGCONT)
        self._paused = None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            return answer.read().decode()

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        page = self.get("/metrics")
        samples = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.M)
        # A counter with labels has no sample before the first event.
        assert samples or f"# TYPE {name} " in page, f"there is no metric {name}"
        return sum(map(float, samples))

    def stop(self, patience: float = PATIENCE) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip())
            match = re.search(r"(https?://\S+?)/ is a page", line)
            if match:
                self.url = match[1]
                self._ready.set()
        self._ready.set()
