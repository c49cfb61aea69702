"""The server's end of the pipe to the engine process. Imports no torch.

All of it runs on the event loop's thread. It waits for the engine only while the pipe is full, and
kills an engine process that has stalled.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace

from strobe.config import EngineConfig
from strobe.request import FinishReason, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.engine_messages import (
    Failed,
    Finish,
    FromEngine,
    FromServer,
    Grammars,
    Ready,
    Rejected,
    StepEvents,
    Stop,
    Submit,
)
from strobe.server.engine_process.process import blocked, run
from strobe.server.engine_process.resources import Replica
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.engine_process.watchdog import FULL_PIPE_SECONDS, Watchdog, limit_sends
from strobe.server.log_format import engine_logger
from strobe.server.server_settings import LogSettings
from strobe.server.telemetry.kv_events import KVEventsConfig
from strobe.step import TokenEvent

logger = logging.getLogger(__name__)

MAX_ENDS = 3
WITHIN_SECONDS = 60.0
"""The engine process is not restarted if it ends MAX_ENDS times within WITHIN_SECONDS."""


class EngineDead(RuntimeError):
    """The engine process has ended; no request can be answered."""


class EngineStopped(EngineDead):
    """The server stopped before the answer ended."""


class EngineUnavailable(EngineDead):
    """A temporary failure; the request can be retried. code: the error object's code."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class PromptRejected(ValueError):
    """The engine rejected this prompt; the message says what to change."""


class Generation:
    """The answers to one prompt. Iterating over it yields the events of each step.

    prompt: the message that asks for them. started: whether the engine has sent events. moved:
    whether the prompt was moved here from an engine that ended.
    """

    def __init__(self, client: EngineClient, prompt: Submit):
        self._client = client
        self.prompt = prompt
        self.engine = 0  # the number of the replica that answers
        self.started = self.moved = False
        self.open = set(range(prompt.params.n))
        self.first_ended = self.last_ended = 0.0  # of steps with tokens, by the engine's clock
        self._events: deque[list[TokenEvent]] = deque()
        self._error: Exception | None = None
        self._closed = False
        self._wake = asyncio.Event()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        """Return the events of the next step, or of several steps since the last call.

        Raises PromptRejected, EngineDead; stops when all answers have ended or were aborted.
        """
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._closed or not self.open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        events = [event for part in self._events for event in part]
        self._events.clear()
        return events

    @property
    def key(self) -> int:
        """The key of the events."""
        return self.prompt.key

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def finish(self, index: int, reason: FinishReason) -> None:
        """End one answer, for example at a stop string."""
        if index in self.open:
            self.open.discard(index)
            self._client.send(Finish(self.key, index, reason))
            self._client.release(self)

    def close(self) -> None:
        """Abort all running answers; the engine frees their pages with its next step."""
        if self.open and not self._closed and self._error is None:
            self._client.send(Finish(self.key, None, "abort"))
        self._closed = True
        self.open.clear()
        self._client.release(self)
        self._wake.set()

    def add_events(self, events: list[TokenEvent], ended: float = 0.0) -> None:
        """Add a step's events. ended: the step's end by the engine's clock. Called by the
        client."""
        events = [event for event in events if event.sibling in self.open]
        if not events:
            return
        self.started = True
        for event in events:
            if event.finish_reason is not None:
                self.open.discard(event.sibling)
            if event.tokens:
                self.first_ended = self.first_ended or ended
                self.last_ended = ended
        self._events.append(events)
        self._wake.set()

    def move(self, client: EngineClient, key: int) -> None:
        """Let another engine answer. Called by its client."""
        self._client = client
        self.prompt = self.prompt._replace(key=key)

    def fail(self, error: Exception) -> None:
        """Fail all running answers. Called by the client."""
        self._error = error
        self.open.clear()
        self._wake.set()


class EngineClient:
    """Starts the engine process and exchanges messages with it.

    restart: restart the process if it ends after it was ready; `facts` is None until the engine is
    ready again. engines: the clients of all engines, as in `Replicas`. replica: which of them this
    is, None for the only one. Open requests fail with EngineUnavailable if the engine is restarted
    or others go on.
    """

    def __init__(
        self,
        config: EngineConfig,
        logs: LogSettings,
        *,
        restart: bool = False,
        kv_events: KVEventsConfig | None = None,
        replica: Replica | None = None,
    ):
        self.config = config
        self.restart = restart
        self.kv_events = kv_events
        self.engines = [self]
        self.replica = replica
        number = None if replica is None else replica.number
        self.logs = replace(logs, engine=number)
        self._logger = engine_logger(logger, number)
        self.facts: Ready | None = None
        self.failed: Failed | None = None
        self.dead = False
        self.restarting = False
        self.grammar_fault: str | None = None
        self.snapshot: EngineSnapshot | None = None
        self.on_snapshot: Callable[[EngineSnapshot], None] = lambda snapshot: None
        self.on_ready: Callable[[Ready], None] = lambda facts: None
        self.on_death: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_orphan: Callable[[Generation], bool] = lambda generation: False
        self._generations: dict[Hashable, Generation] = {}
        self._keys = itertools.count()
        self._ready = asyncio.Event()
        self._ends: list[float] = []
        self._restart_task: asyncio.Task[None] | None = None
        self._prepare()

    def _prepare(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, self._child_pipe = context.Pipe()
        limit_sends(self._pipe.fileno(), FULL_PIPE_SECONDS)
        self._watchdog = Watchdog(
            lambda: self.facts is not None and self.num_open > 0, self._stalled
        )
        self.process = context.Process(
            target=run,
            args=(self._child_pipe, self.config, self.logs, self.kv_events, self.replica),
            name="strobe-engine",
            daemon=True,
        )

    def start(self) -> None:
        """Start the process; needs a running event loop. Ctrl-C and SIGTERM, which may be sent to
        both, do not reach the process, since the server stops it."""
        with blocked(signal.SIGINT, signal.SIGTERM):
            self.process.start()
        self._child_pipe.close()
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._readable)
        self._watchdog.start(self.process.pid)

    def _stalled(self, problem: str) -> None:
        self._logger.error("the engine's process %s; it is killed", problem)
        self._died()

    async def ready(self) -> Ready:
        """Wait until the engine is ready and return its facts. If it cannot start, raises
        ValueError for invalid settings, else EngineDead."""
        await self._ready.wait()
        if self.facts is not None:
            return self.facts
        if self.failed is None:
            raise EngineDead("The engine's process ended before it could answer.")
        raise (ValueError if self.failed.user_error else EngineDead)(self.failed.error)

    @property
    def can_answer(self) -> bool:
        return self.facts is not None and not self.dead

    @property
    def state(self) -> str:
        """A sentence that says why the engine cannot answer."""
        if self.dead:
            return "The engine has ended."
        return f"The engine is {'restarting' if self.restarting else 'still starting'}."

    @property
    def num_open(self) -> int:
        """Number of unfinished answers."""
        return sum(len(generation.open) for generation in self._generations.values())

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingOptions,
    ) -> Generation:
        """Submit a prompt. Raises EngineDead."""
        if self.dead:
            raise EngineDead("The engine's process has ended; restart the server.")
        if self.restarting:
            raise EngineUnavailable("The engine is restarting; try again.", "engine_restarting")
        prompt = Submit(
            key=next(self._keys),
            prompt_ids=prompt_ids,
            params=params,
            request_id=request_id,
            scheduling=scheduling,
        )
        generation = self._generations[prompt.key] = Generation(self, prompt)
        self.send(prompt)
        return generation

    def adopt(self, generation: Generation) -> None:
        """Answer a prompt of an engine that ended before it sent any event of it."""
        generation.move(self, next(self._keys))
        generation.moved = True
        self._generations[generation.key] = generation
        self.send(generation.prompt)

    def send(self, message: FromServer) -> None:
        """Send a message. Messages are dropped while the process restarts."""
        if self.restarting:
            return
        try:
            self._pipe.send(message)
        except BlockingIOError:
            self._stalled(f"has not read from its full pipe for {FULL_PIPE_SECONDS} s")
        except OSError:
            self._died()

    def release(self, generation: Generation) -> None:
        """Remove a generation if all its answers have ended."""
        if not generation.open:
            self._generations.pop(generation.key, None)

    async def stop(self, timeout: float = 5.0) -> None:
        """Stop the process; kill it if it is still starting or does not end within `timeout`
        seconds."""
        if self._restart_task is not None:
            self._restart_task.cancel()
        if not self.dead:
            if not self._pipe.closed:
                asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.dead = True
            self._watchdog.stop()
            for generation in list(self._generations.values()):
                generation.fail(EngineStopped("The server stops before this answer has ended."))
            self._generations.clear()
            try:
                self._pipe.send(Stop())
            except OSError:
                self._logger.debug("the engine's process had ended before it was stopped")
        if self.facts is None:
            self.process.kill()
        await asyncio.to_thread(self.process.join, timeout)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join, timeout)
        self._pipe.close()

    def _readable(self) -> None:
        try:
            while self._pipe.poll():
                self._handle(self._pipe.recv())
        except (EOFError, OSError):
            self._died()

    def _handle(self, message: FromEngine) -> None:
        self._watchdog.reset()
        if isinstance(message, StepEvents):
            self._dispatch(message)
            if message.snapshot is not None:
                self.snapshot = message.snapshot
                self.on_snapshot(message.snapshot)
        elif isinstance(message, Rejected):
            generation = self._generations.pop(message.key, None)
            if generation is not None:
                generation.fail(
                    PromptRejected(message.error)
                    if message.user_error
                    else EngineUnavailable(message.error, "grammars_unavailable")
                )
        elif isinstance(message, Grammars):
            self.grammar_fault = message.fault
        elif isinstance(message, Ready):
            if self.restarting:
                self._logger.info("the engine can answer again")
            self.facts = message
            self.restarting = False
            self._ready.set()
            self.on_ready(message)
        else:
            if self.restarting:
                self._logger.error("%s", message.error)
            self.failed = message

    def _dispatch(self, step: StepEvents) -> None:
        """Pass each generation its events."""
        events_by_key: dict[Hashable, list[TokenEvent]] = {}
        for event in step.events:
            events_by_key.setdefault(event.key, []).append(event)
        for key, events in events_by_key.items():
            generation = self._generations.get(key)
            if generation is not None:
                generation.add_events(events, step.ended)
                self.release(generation)

    def _died(self) -> None:
        """Kill the process after the pipe broke, fail all open answers, then restart the process
        or give up."""
        if self.dead or self._pipe.closed:
            return
        asyncio.get_running_loop().remove_reader(self._pipe.fileno())
        self._watchdog.stop()
        self.process.kill()
        restarts = self._may_restart()
        others = any(not engine.dead for engine in self.engines if engine is not self)
        generations = list(self._generations.values())
        self._generations.clear()
        self.facts = None if restarts else self.facts
        self.restarting = restarts
        self.dead = not restarts
        for generation in generations:
            if not generation.started and self.on_orphan(generation):
                continue
            generation.fail(
                EngineUnavailable(
                    "The engine's process ended while it was answering; send the request again.",
                    "engine_restarting" if restarts else "engine_ended",
                )
                if restarts or others
                else EngineDead("The engine's process ended while it was answering.")
            )
        self.on_end()
        if restarts:
            self._pipe.close()
            self._restart_task = asyncio.get_running_loop().create_task(self._restart())
        else:
            self._ready.set()
            self.on_death()

    def _may_restart(self) -> bool:
        """Whether to restart the process, which has just ended. If it was not ready since its last
        start, earlier ends count however long ago they were."""
        if not self.restart or self.failed is not None or not (self.facts or self.restarting):
            return False
        now = asyncio.get_running_loop().time()
        if self.facts is not None:
            self._ends = [end for end in self._ends if now - end < WITHIN_SECONDS]
        self._ends.append(now)
        if len(self._ends) < MAX_ENDS:
            return True
        self._logger.error(
            "the engine's process has ended %d times within a minute; it is not started again",
            MAX_ENDS,
        )
        return False

    async def _restart(self) -> None:
        """Start a new process after the old one has released the device."""
        await asyncio.to_thread(self.process.join)
        self._logger.error(
            "the engine's process ended (exit code %s); it is started again", self.process.exitcode
        )
        self.grammar_fault = None
        self.on_restart()
        self._prepare()
        try:
            self.start()
        except OSError as error:
            self._logger.error("the engine's process cannot be started again (%s)", error)
            self.dead = True
            self.restarting = False
            self.on_death()
