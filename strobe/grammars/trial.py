"""Tries grammars out in a separate process, which is killed if one takes too long."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strobe.grammars.source import GrammarError, check_length
from strobe.grammars.trial_process import READY

if TYPE_CHECKING:
    from strobe.sampling_params import StructuredOutputs

TIMEOUT_SECONDS = 5.0
MEMORY_BYTES = 1 << 30

_MAX_CACHED = 4096
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""With several heaps, each thread of the process reserves 64 MiB, which count as used."""
_FIELDS = (
    "json", "json_object", "regex", "choice", "grammar", "think_end",
    "think_start", "max_thinking", "prefix", "alternative",
)  # fmt: skip


class GrammarsUnavailable(RuntimeError):
    """No grammar can be compiled at present."""


class GrammarTrial:
    """Sends grammars to the process, which starts with the first one and restarts after it ended.

    Any thread may call `check`; grammars are tried one at a time.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]):
        self._settings = json.dumps(
            {
                "tokenizer": str(tokenizer),
                "vocab_size": vocab_size,
                "eos_ids": list(eos_ids),
                "memory": MEMORY_BYTES,
            }
        )
        self.seconds: float | None = TIMEOUT_SECONDS
        """Limit of each grammar; None if all have been tried elsewhere."""
        self.on_pass: Callable[[bytes, StructuredOutputs], None] = lambda key, structured: None
        """Called with each grammar that `check` lets pass and its key, from any thread."""
        self._faults: OrderedDict[bytes, str] = OrderedDict()
        self._process: subprocess.Popen[str] | None = None
        self._ready = False
        self._lock = threading.Lock()
        self._faults_lock = threading.Lock()

    def check(self, structured: StructuredOutputs) -> bytes:
        """Return a cache key for the grammar. Raises ValueError for a grammar that does not compile
        within the limits, and GrammarsUnavailable."""
        try:
            question = json.dumps({name: getattr(structured, name) for name in _FIELDS})
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(str(error)) from None
        check_length(question)
        key = hashlib.blake2b(question.encode()).digest()
        if self.seconds is None:
            return key
        fault = self._known_fault(key)
        if fault is None:  # a known grammar does not wait while others are tried
            with self._lock:
                fault = self._known_fault(key)
                if fault is None:
                    self._start()
                    fault = self._ask(question)
                    self._remember(key, fault)
        if fault:
            raise ValueError(fault)
        self.on_pass(key, structured)
        return key

    def _known_fault(self, key: bytes) -> str | None:
        with self._faults_lock:
            if key in self._faults:
                self._faults.move_to_end(key)
            return self._faults.get(key)

    def _remember(self, key: bytes, fault: str) -> None:
        with self._faults_lock:
            self._faults[key] = fault
            if len(self._faults) > _MAX_CACHED:
                self._faults.popitem(last=False)

    @property
    def pid(self) -> int | None:
        """The process's id, or None while it is not running."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process; the next grammar starts it again."""
        with self._lock:
            if self._process is not None:
                self._wait()

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises GrammarsUnavailable."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._wait()  # it was killed from outside
        if self._process is None:
            self._spawn()
        if not self._ready:
            self._ready = self._read() == READY
        if not self._ready:
            self._wait()
            raise GrammarsUnavailable(
                "Structured output is unavailable: the process that tries grammars out did not "
                "start; check the log for the reason."
            )

    def _spawn(self) -> None:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "strobe.grammars.trial_process", self._settings],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **_ONE_HEAP},
                start_new_session=True,  # Ctrl-C is for the caller to handle
            )
        except OSError as error:
            raise GrammarsUnavailable(
                "Structured output is unavailable: no process can be started to try grammars out "
                f"({error.strerror or error})."
            ) from None
        self._process = process
        self._ready = False
        self._at_exit = weakref.finalize(self, _stop, process)

    def _ask(self, question: str) -> str:
        """Return why a grammar does not compile, or an empty string if it does."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{self.seconds} {question}\n")
            self._process.stdin.flush()
        if answer := self._read():
            return json.loads(answer)
        late = self._wait() == -signal.SIGALRM
        self._spawn()  # ahead of the next grammar
        limit = f"{self.seconds:g} seconds" if late else f"{MEMORY_BYTES >> 20} MiB of memory"
        return str(GrammarError(f"it takes more than {limit}; simplify it"))

    def _read(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _wait(self) -> int:
        """End the process and return its exit status."""
        assert self._process is not None
        process = self._process
        self._process = None
        self._ready = False
        self._at_exit.detach()
        _stop(process)
        return process.returncode


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
