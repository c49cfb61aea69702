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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from mmap import mmap
from multiprocessing.connection import Connection

from strobe.parallel.group import RankFailed
from strobe.parallel.shared_memory import memory_size
from strobe.parallel.torch_group import make_store
from strobe.ranks.leader import make_group, share_threads
from strobe.ranks.messages import Failure, Launch, Start
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs
from strobe.step import Plan


def main(pipe: Connection, memory_fd: int, leader: int) -> None:
    """Run plans until the first rank sends None or ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank decides when to stop
    logging.disable(logging.WARNING)  # the first rank says the same
    start: Start = pipe.recv()
    resolved = start.resolved
    rank, size = resolved.split.rank, resolved.split.size
    share_threads(resolved)

    def check() -> None:
        if os.getppid() != leader:
            raise EOFError("the first rank has ended")

    def end_with_leader() -> None:
        """End the process even if it waits for its GPU, which waits for the first rank."""
        while os.getppid() == leader:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=end_with_leader, daemon=True, name="strobe-leader").start()

    try:
        store = None if start.port is None else make_store(start.port)
        group = make_group(resolved, mmap(memory_fd, memory_size(size)), check, store)
        resolved = replace(resolved, split=replace(resolved.split, group=group))
        engine = start.make(resolved, **start.options)
        engine.grammars.compiler.trial.seconds = None  # the first rank tries grammars
        if start.prepare is not None:
            start.prepare(engine.runner.model)
        grammars = GrammarsAhead(engine.grammars.compiler)
        message: Launch | StructuredOutputs | None
        while (message := pipe.recv()) is not None:
            if isinstance(message, StructuredOutputs):
                grammars.compile(message)
                continue
            grammars.wait_for(message.plan)
            if message.step != group.step + 1:
                raise RankFailed(
                    f"Rank {rank} has run step {group.step}, but was told to run {message.step}."
                )
            group.step = message.step
            engine.follow(message.plan, message.in_flight)
            group.end_step()
    except (EOFError, ConnectionError):
        return
    except BaseException as error:
        kind = "" if isinstance(error, ValueError | RankFailed) else f"{type(error).__name__}: "
        failure = Failure(f"Rank {rank} has ended: {kind}{error}", isinstance(error, ValueError))
        with contextlib.suppress(OSError):
            pipe.send(failure)


class GrammarsAhead:
    """Compiles grammars while steps run, so that no step waits for long."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler, self._pool = compiler, ThreadPoolExecutor(1)
        self._running: list[tuple[StructuredOutputs, Future[object]]] = []

    def compile(self, structured: StructuredOutputs) -> None:
        self._running = [(s, future) for s, future in self._running if not future.done()]
        self._running.append((structured, self._pool.submit(self.compiler.compile, structured)))

    def wait_for(self, plan: Plan) -> None:
        """Wait for the grammars of the requests that a plan admits. Admission reports what does not
        compile."""
        admitted = [StructuredOutputs.of(a.sampling.structured_outputs) for a in plan.admitted]
        wait([future for structured, future in self._running if structured in admitted])


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
