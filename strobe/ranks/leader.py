"""The first rank: starts the others, sends them plans, and ends them together."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from mmap import mmap
from multiprocessing import connection
from multiprocessing.connection import Connection
from socket import SO_SNDTIMEO, SOL_SOCKET, socketpair
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.host.openmp import usable_cores
from strobe.parallel.group import STALL_SECONDS, START_SECONDS, RankFailed, not_started
from strobe.parallel.shared_memory import SharedMemoryGroup, memory_size
from strobe.parallel.torch_group import TorchGroup, make_store
from strobe.ranks.rank_messages import Failure, Launch, Make, Prepare, Start
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs
from strobe.speculation.draft_policy import DraftPolicy
from strobe.step import Plan

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_CHECK_SECONDS = 1.0


def start_engine(
    config: EngineConfig | ResolvedConfig,
    *,
    draft_policy: DraftPolicy | None = None,
    simulated_acceptance: float | None = None,
    prepare: Prepare | None = None,
    make: Make = Engine,
) -> Engine:
    """Make an engine, and the other ranks of its group if its settings ask for several; see
    `Engine`. prepare: changes each rank's target once it is loaded. make: a subclass with the
    options that differ. Raises ValueError for settings that do not fit."""
    resolved = resolve(config) if isinstance(config, EngineConfig) else config
    options: dict[str, Any] = {}
    if simulated_acceptance is not None:
        options["simulated_acceptance"] = simulated_acceptance
    if resolved.split.size == 1:
        engine = make(resolved, draft_policy=draft_policy, **options)
    else:
        engine = _start_group(
            resolved, draft_policy=draft_policy, make=make, options=options, prepare=prepare
        )
    if prepare is not None:
        prepare(engine.runner.model)
    size = engine.limits.page_size
    pages = engine.components.pool.capacity
    groups = zip(engine.components.pool.groups, resolved.page_groups, strict=True)
    ranks = resolved.split.size
    logger.info(
        "keys and values have %.2f GB%s, room for %d tokens",
        sum(pool.capacity * group.page_bytes for pool, group in groups) / 1e9,
        f" on each of {ranks} ranks" if ranks > 1 else "",
        pages * size,
    )
    return engine


def _start_group(
    resolved: ResolvedConfig,
    draft_policy: DraftPolicy | None,
    make: Make,
    options: dict[str, Any],
    prepare: Prepare | None,
) -> Engine:
    """Make the other ranks and the first one's engine, with which they end."""
    share_threads(resolved)
    ranks = Ranks(resolved, make, options, prepare)
    try:
        group = ranks.meet(resolved)
        resolved = replace(resolved, split=replace(resolved.split, group=group))
        engine = make(resolved, draft_policy=draft_policy, on_launch=ranks.send, **options)
    except BaseException as error:
        if isinstance(error, RuntimeError | ValueError):
            ranks.join()  # the end of another rank may be the reason
        ranks.stop()
        failure = ranks.failure
        if failure is not None and (isinstance(error, RankFailed) or not failure.user_error):
            raise failure.exception() from None
        raise
    compiler = engine.grammars.compiler
    compiler.trial.on_pass = partial(ranks.send_grammar, compiler)
    weakref.finalize(engine, ranks.stop)
    return engine


def of_rank(resolved: ResolvedConfig, rank: int) -> ResolvedConfig:
    """Return the first rank's settings as another rank has them."""
    device = resolved.device
    split = replace(resolved.split, rank=rank)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    target = split.of_rank(resolved.target)
    draft = resolved.draft and split.of_rank(resolved.draft)
    return replace(resolved, device=device, target=target, draft=draft, split=split)


def in_shared_memory(device: torch.device) -> bool:
    """Whether ranks exchange tensors through shared memory: on CPUs that make writes visible in
    order."""
    return device.type == "cpu" and platform.machine().lower() in ("x86_64", "amd64")


def make_group(
    resolved: ResolvedConfig, memory: mmap, on_wait: Callable[[], None], store: TCPStore | None
) -> SharedMemoryGroup | TorchGroup:
    """Meet the other ranks. store: where, unless they share memory."""
    rank = resolved.split.rank
    size = resolved.split.size
    if store is None:
        return SharedMemoryGroup(memory, rank=rank, size=size, on_wait=on_wait)
    return TorchGroup(
        memory, rank=rank, size=size, on_wait=on_wait, store=store, device=resolved.device
    )


def share_threads(resolved: ResolvedConfig) -> None:
    """Give each rank on a CPU its share of the cores."""
    if resolved.device.type == "cpu":
        share = max(usable_cores() // resolved.split.size, 1)
        torch.set_num_threads(min(torch.get_num_threads(), share))


class Ranks:
    """The other ranks' processes. failure: why the group has ended."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        make: Make,
        options: dict[str, Any],
        prepare: Prepare | None = None,
    ):
        size = resolved.split.size
        self.failure: Failure | None = None
        self.group: SharedMemoryGroup | TorchGroup | None = None
        self._blocked: Connection | None = None
        self._sending = threading.Lock()
        self._reported = threading.Event()
        self._stopping = False
        self._memory, self._memory_fd = _shared_memory(memory_size(size))
        self._device = resolved.device
        self._store = None
        if not in_shared_memory(resolved.device):
            self._store = make_store()
        self._processes = list[subprocess.Popen[bytes]]()
        self._pipes = list[Connection]()
        self._watch = threading.Thread(target=self._wait, daemon=True, name="strobe-ranks")
        port = None if self._store is None else self._store.port
        try:
            for rank in range(1, size):
                self._start(
                    Start(
                        resolved=of_rank(resolved, rank),
                        make=make,
                        options=options,
                        prepare=prepare,
                        port=port,
                    )
                )
        except BaseException:
            self.stop()
            raise
        self._watch.start()

    def _start(self, start: Start) -> None:
        here, there = socketpair()
        fds = there.fileno(), self._memory_fd
        # -P: modules of the working directory must not take the place of installed ones.
        command = [sys.executable, "-P", "-m", "strobe.ranks.follower"]
        command += map(str, (*fds, os.getpid()))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._processes.append(
            subprocess.Popen(command, pass_fds=fds, env=environment, stdin=subprocess.DEVNULL)
        )
        there.close()
        # A stalled rank does not empty its pipe.
        here.setsockopt(SOL_SOCKET, SO_SNDTIMEO, struct.pack("ll", int(STALL_SECONDS), 0))
        pipe = Connection(here.detach())
        self._pipes.append(pipe)
        pipe.send(start)

    def meet(self, resolved: ResolvedConfig) -> SharedMemoryGroup | TorchGroup:
        """Meet the other ranks. Raises RankFailed if one has ended."""
        self.group = make_group(resolved, self._memory, self._check, self._store)
        return self.group

    def send(self, plan: Plan, in_flight: int) -> None:
        """Send a plan to the other ranks. Raises RankFailed if the group has ended."""
        assert self.group is not None
        self.group.check()
        self.group.step += 1
        message = Launch(self.group.step, in_flight, plan)
        try:
            self._send(message)
        except OSError:
            self.join()
            self.group.check()
            raise

    def send_grammar(
        self, compiler: GrammarCompiler, key: bytes, structured: StructuredOutputs
    ) -> None:
        """Let the other ranks compile a grammar that the first one is about to compile, before its
        request is admitted. From any thread."""
        if key not in compiler.compiled:
            with contextlib.suppress(OSError):  # the next plan finds out
                self._send(structured)

    def join(self) -> None:
        """Wait a little for the thread to find out that a rank has ended, and why."""
        self._watch.join(2 * _CHECK_SECONDS)

    def _send(self, message: Launch | StructuredOutputs) -> None:
        with self._sending:
            for pipe in self._pipes:
                try:
                    pipe.send(message)
                except BlockingIOError:
                    self._blocked = pipe
                    raise

    def _check(self) -> None:
        if self.failure is not None:
            self._reported.set()
            raise RankFailed(self.failure.error)

    def _wait(self) -> None:
        """Thread that waits for the end of a rank, and then ends the others."""
        pipe = self._first_failed()
        if self._stopping:
            return
        self.failure = self._reason(self._pipes.index(pipe) + 1)
        for process in self._processes:
            process.kill()
        for process in self._processes:  # what they still write would undo the end of waiting
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
        if self.group is not None:
            self.group.close()
        waits = self.group is None or self._device.type == "cuda"
        if waits and not self._reported.wait(_STOP_SECONDS) and self._stuck():
            logger.error("%s", self.failure.error)
            os._exit(1)

    def _stuck(self) -> bool:
        """Whether this process still waits for ranks that have ended: torch.distributed does when
        it makes a group, and so does the GPU, on which this process waits."""
        if self.group is None:
            return True
        if self._device.type != "cuda":
            return False
        waiting = threading.Thread(target=self._synchronize, daemon=True)
        waiting.start()
        waiting.join(_STOP_SECONDS)
        return waiting.is_alive()

    def _synchronize(self) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)

    def _first_failed(self) -> Connection:
        """Wait until a rank ends or stalls; return its pipe."""
        reached = dict[Connection, tuple[int, ...] | None]()  # each rank's progress
        since = dict[Connection, float]()
        while True:
            ready = connection.wait(self._pipes, timeout=_CHECK_SECONDS)
            if ready:
                return next(pipe for pipe in self._pipes if pipe in ready)
            if self._blocked is not None:
                return self._blocked
            if not isinstance(self.group, TorchGroup):
                continue  # a rank that waits in shared memory notices a stalled one
            now = time.monotonic()
            limit = STALL_SECONDS if self.group.step else START_SECONDS
            for rank, pipe in enumerate(self._pipes, start=1):
                progress = self.group.progress(rank)
                if progress is None or reached.get(pipe) != progress:
                    reached[pipe] = progress
                    since[pipe] = now
            # Once a rank stalls, others wait for it: the rank with the smallest progress is first.
            stalled = [pipe for pipe in self._pipes if now - since[pipe] > limit]
            if stalled:
                return min(stalled, key=lambda pipe: reached[pipe] or ())

    def _reason(self, rank: int) -> Failure:
        group = self.group
        step = 0 if group is None else group.last_step(rank)
        if group is not None and not self._pipes[rank - 1].poll():
            if not group.step:
                return Failure(str(not_started(rank)), False)
            waiting = f"rank 0 began {group.step} more than {STALL_SECONDS:.0f} s ago"
            if self._pipes[rank - 1] is self._blocked:
                waiting = f"messages to it have waited for {STALL_SECONDS:.0f} s"
            state = f"the last step it began is {step}, while {waiting}"
            if isinstance(group, TorchGroup) and group.has_launched(rank):
                state = f"its GPU has not finished step {step} within {STALL_SECONDS:.0f} s"
            return Failure(f"Rank {rank} has stalled: {state}.", False)
        try:
            return self._pipes[rank - 1].recv()
        except (EOFError, OSError):
            code = self._processes[rank - 1].wait()
            last = f"in step {step}" if step else "while it started"
            return Failure(f"Rank {rank} has ended {last} (exit code {code}).", False)

    def stop(self) -> None:
        """End the other ranks. A second call has no effect."""
        if self._stopping:
            return
        self._stopping = True
        running = self.failure is None and (self.group is None or self.group.failure is None)
        alone = self._sending.acquire(timeout=_STOP_SECONDS)  # what is sent is sent whole
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)  # closing it would not wake them while the thread waits for it
        for process in self._processes:
            try:
                process.wait(_STOP_SECONDS if running else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watch.ident is not None:
            self._watch.join()
        if self.group is not None:
            self.group.close()
        for pipe in self._pipes:
            pipe.close()
        if alone:
            self._sending.release()  # a later grammar finds the pipes closed
        os.close(self._memory_fd)


def _shared_memory(size: int) -> tuple[mmap, int]:
    """Return zeroed memory that other processes can map by its file descriptor."""
    with tempfile.TemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        file.truncate(size)
        return mmap(file.fileno(), size), os.dup(file.fileno())
