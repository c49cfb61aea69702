"""A rank that runs the first rank's plans: python -m strobe.ranks.follower PIPE MEMORY LEADER, two
file descriptors and the first rank's process id."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from mmap import mmap
from multiprocessing.connection import Connection

from strobe.parallel.group import RankFailed
from strobe.parallel.shared_memory import SharedMemoryGroup, memory_size
from strobe.parallel.torch_group import TorchGroup, make_store
from strobe.ranks.leader import make_group, share_threads
from strobe.ranks.rank_messages import Failure, Launch, Start
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs
from strobe.step import Plan


def main(pipe: Connection, memory_fd: int, leader: int) -> None:
    """Run plans until the first rank sends None or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank decides when to stop
    logging.disable(logging.WARNING)  # the first rank says the same
    start: Start = pipe.recv()
    rank = start.resolved.split.rank
    size = start.resolved.split.size
    share_threads(start.resolved)
    first_rank = FirstRank(leader)
    threading.Thread(target=first_rank.end_with_it, daemon=True, name="strobe-leader").start()
    try:
        store = None if start.port is None else make_store(start.port)
        memory = mmap(memory_fd, memory_size(size))
        group = make_group(start.resolved, memory, first_rank.check, store)
        _follow(pipe, start, group)
        # Python would wait for the grammars' threads, and may abort while Gloo's threads run.
        os._exit(0)
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        kind = "" if isinstance(error, ValueError | RankFailed) else f"{type(error).__name__}: "
        failure = Failure(f"Rank {rank} has ended: {kind}{error}", isinstance(error, ValueError))
        with contextlib.suppress(OSError):
            pipe.send(failure)


def _follow(pipe: Connection, start: Start, group: SharedMemoryGroup | TorchGroup) -> None:
    """Run plans until the first rank sends None."""
    split = replace(start.resolved.split, group=group)
    engine = start.make(replace(start.resolved, split=split), **start.options)
    engine.grammars.compiler.trial.seconds = None  # the first rank tries grammars
    if start.prepare is not None:
        start.prepare(engine.runner.model)
    grammars = GrammarPrecompiler(engine.grammars.compiler)
    message: Launch | StructuredOutputs | None
    while (message := pipe.recv()) is not None:
        if isinstance(message, StructuredOutputs):
            grammars.compile(message)
            continue
        grammars.wait_for(message.plan)
        if message.step != group.step + 1:
            raise RankFailed(
                f"Rank {split.rank} has run step {group.step}, but was told to run {message.step}."
            )
        group.step = message.step
        engine.follow(message.plan, message.in_flight)


class FirstRank:
    """The process of the first rank, this one's parent."""

    def __init__(self, process: int):
        self.process = process

    def check(self) -> None:
        """Raise EOFError if it has ended."""
        if os.getppid() != self.process:
            raise EOFError("the first rank has ended")

    def end_with_it(self) -> None:
        """Thread that ends this process after it, even if this one waits for its GPU, which waits
        for the first rank."""
        while os.getppid() == self.process:
            time.sleep(1.0)
        os._exit(1)


class GrammarPrecompiler:
    """Compiles grammars while steps run, so that no step waits for long."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._threads: list[tuple[StructuredOutputs, threading.Thread]] = []

    def compile(self, structured: StructuredOutputs) -> None:
        """Start to compile a grammar, unless that is under way."""
        self._threads = [(s, thread) for s, thread in self._threads if thread.is_alive()]
        if structured not in [s for s, _ in self._threads]:
            thread = threading.Thread(target=self._compile, args=[structured], daemon=True)
            self._threads.append((structured, thread))
            thread.start()

    def wait_for(self, plan: Plan) -> None:
        """Wait for the grammars of the requests that a plan admits."""
        admitted = [StructuredOutputs.of(a.sampling.structured_outputs) for a in plan.admitted]
        for structured, thread in self._threads:
            if structured in admitted:
                thread.join()

    def _compile(self, structured: StructuredOutputs) -> None:
        with contextlib.suppress(ValueError):  # which admission raises again
            self.compiler.compile(structured)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
