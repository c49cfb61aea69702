"""The process that tries grammars out: one grammar per input line, one result per output line.

Started as `python -m strobe.grammars.trial_process SETTINGS`. A grammar that exceeds the time limit
ends the process by a signal that no library code can delay, and so does one that exceeds the memory
limit.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llguidance import LLTokenizer

from strobe.grammars.source import (
    STACK_BYTES,
    GrammarError,
    after_trial,
    check_length,
    grammar_source,
    make_matcher,
)
from strobe.host.host_memory import trim_heap

READY = "ready"
_TRIM_EVERY = 16


def main() -> None:
    settings = json.loads(sys.argv[1])
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(settings,))
    thread.start()
    thread.join()


def _serve(settings: dict[str, Any]) -> None:
    tokenizer = LLTokenizer(
        settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"] or None
    )
    _limit_memory(settings["memory"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # drops the library's panics
    print(READY, flush=True)
    for number, line in enumerate(sys.stdin, 1):
        seconds, _, question = line.partition(" ")
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        answer = json.dumps(_error(tokenizer, question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)
        if number % _TRIM_EVERY == 0:
            trim_heap()


def _error(tokenizer: LLTokenizer, question: str) -> str:
    """Return why a grammar does not compile, or an empty string if it does."""
    try:
        source = grammar_source(SimpleNamespace(**json.loads(question)))  # pyright: ignore[reportArgumentType]
    except (ValueError, TypeError, RecursionError) as error:
        return str(GrammarError(str(error)))
    try:
        check_length(source)
    except ValueError as error:
        return str(error)
    matcher = make_matcher(tokenizer, source)
    if matcher.is_error() or (matcher := after_trial(matcher)).is_error():
        return str(GrammarError(matcher.get_error()))
    return ""


def _limit_memory(extra_bytes: int) -> None:
    """Limit the process to this many bytes more than it has now."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
