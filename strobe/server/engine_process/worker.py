"""The engine process: receives requests through a pipe and sends events back.

One thread empties the pipe, so that the server never waits for a step; another compiles grammars,
so that requests do not wait for other requests' grammars. The main thread only steps the engine.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection

import torch

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.grammars.trial import GrammarsUnavailable
from strobe.parallel.group import RankFailed
from strobe.ranks.leader import start_engine
from strobe.request import Request
from strobe.sampling_params import METHODS
from strobe.server.engine_process.engine_messages import (
    Failed,
    Finish,
    FromEngine,
    FromServer,
    Grammars,
    Ready,
    Rejected,
    Release,
    StepEvents,
    Stop,
    Submit,
)
from strobe.server.engine_process.resources import Replica
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.server_settings import LogSettings
from strobe.server.telemetry.kv_events import KVEventPublisher, KVEventsConfig
from strobe.step import TokenEvent
from strobe.warmup.cost_measurement import measure_costs
from strobe.warmup.warmup_steps import warm_up

logger = logging.getLogger(__name__)

_SNAPSHOT_EVERY = 0.1
_RETRY_GRAMMARS = 5.0
_CHECK_RANKS = 1.0
"""Seconds between attempts to compile grammars again, and between looks at an idle engine's ranks.
"""


def run_engine(
    pipe: Connection,
    config: EngineConfig,
    logs: LogSettings,
    kv_events: KVEventsConfig | None = None,
    replica: Replica | None = None,
) -> None:
    """The process's main function. Returns when the server sends Stop or has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server decides when to stop
    logs.configure()
    try:
        if replica is not None:
            check_gpus(config, replica)
        rank = 0 if replica is None else replica.number
        publisher = None if kv_events is None else KVEventPublisher(kv_events, rank)
        logger.info("reading the weights")
        engine = start_engine(config)
        logger.info("warming up")
        warm_up(engine)
        measure_costs(engine)
        if engine.shadow is not None:
            engine.shadow.start()
        if publisher is not None:
            parts = engine.components
            publisher.start(parts.pool, kept=parts.kept_states, host=parts.host_tier)
    except ValueError as error:
        send(pipe, Failed(str(error), True))
        return
    except RankFailed as error:
        send(pipe, Failed(f"The engine cannot start: {error}", False))
        raise SystemExit(1) from None
    except BaseException as error:
        logger.exception("the engine cannot start")
        send(pipe, Failed(f"The engine cannot start: {type(error).__name__}: {error}", False))
        raise
    gc.freeze()  # these objects stay: a search of them for garbage would delay a step by 0.1 s
    # A step of 1,000 requests makes 20,000 objects and keeps few, which are rarely garbage.
    gc.set_threshold(50_000, 20, 50)
    send(pipe, facts(engine))
    try:
        Worker(engine, pipe, publisher.flush if publisher is not None else lambda: None).run()
    except RankFailed as error:
        logger.error("%s", error)
        raise SystemExit(1) from None


def check_gpus(config: EngineConfig, replica: Replica) -> None:
    """Raise ValueError if the machine lacks a replica's GPUs."""
    if config.device != "cpu" and torch.cuda.device_count() < config.tensor_parallel_size:
        raise ValueError(
            f"data_parallel_size gives engine {replica.number} the CUDA devices "
            f"{replica.environment['CUDA_VISIBLE_DEVICES']}, but this machine has "
            f"{torch.cuda.device_count()} of them; ask for fewer engines, or for device cpu."
        )


def send(pipe: Connection, message: FromEngine) -> None:
    """Send the server a message. A closed pipe is ignored here; `Worker._listen` handles it."""
    with contextlib.suppress(OSError):
        pipe.send(message)


def facts(engine: Engine) -> Ready:
    """Return the engine's limits, methods and settings for the server."""
    resolved = engine.resolved
    drafters = engine.proposers.drafters if engine.limits.num_drafts else ()
    available = [method for method in METHODS if method in drafters]
    methods = dict.fromkeys((resolved.method, *available, "none"))
    return Ready(
        max_model_len=engine.limits.max_model_len,
        max_num_seqs=engine.limits.max_num_seqs,
        vocab_size=resolved.target.decoder.vocab_size,
        num_drafts=engine.limits.num_drafts,
        methods=tuple(methods),
        sampling=dict(resolved.target.sampling),
        dtype=str(resolved.dtype).removeprefix("torch."),
        device=str(resolved.device),
        pages=engine.components.pool.capacity,
        kv_bytes=sum(store.data.nbytes for store in engine.components.stores.values()),
        shadow_costs=None if engine.shadow is None else engine.shadow.costs,
    )


class Worker:
    """Turns messages into requests, and the engine's events into messages."""

    def __init__(
        self, engine: Engine, pipe: Connection, after_step: Callable[[], None] = lambda: None
    ):
        self.engine = engine
        self.pipe = pipe
        self.after_step = after_step
        self.inbox: queue.SimpleQueue[FromServer | Rejected | Grammars] = queue.SimpleQueue()
        self.grammars: queue.SimpleQueue[Submit] = queue.SimpleQueue()
        self.compiling: set[int] = set()
        self.aborted: set[int] = set()
        self.requests: dict[tuple[Hashable, int], Request] = {}
        self.last_snapshot = 0.0

    def run(self) -> None:
        """Step the engine until the server sends Stop or closes the pipe."""
        threading.Thread(target=self._listen, daemon=True, name="strobe-inbox").start()
        threading.Thread(target=self._compile, daemon=True, name="strobe-grammars").start()
        while self._process_inbox():
            events = self._step()
            self.after_step()
            idle = not self.engine.has_work
            now = time.monotonic()
            due = idle or now - self.last_snapshot >= _SNAPSHOT_EVERY
            if due:
                self.last_snapshot = now
            if events or due:
                open_events = [e for e in events if (e.key, e.sibling) in self.requests]
                for event in open_events:
                    if event.finish_reason is not None:
                        del self.requests[event.key, event.sibling]
                send(self.pipe, StepEvents(open_events, self.snapshot() if due else None, now))

    def _step(self) -> list[TokenEvent]:
        """Run one engine step. If it fails, the engine retries its requests one by one, unless the
        device itself or a rank has failed, which ends the process."""
        try:
            return self.engine.step()
        except RankFailed:
            raise
        except Exception:  # any failure: the requests of other clients go on
            logger.exception("an engine step failed; its requests are tried again, one by one")
            self.engine.check_device()
            return []

    def snapshot(self) -> EngineSnapshot:
        scheduler = self.engine.scheduler
        groups = self.engine.components.pool.groups
        return EngineSnapshot(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_used=max(1 - group.available / group.capacity for group in groups),
            stats=scheduler.stats,
            confidence=scheduler.draft_policy.confidence_by_place,
        )

    def _listen(self) -> None:
        """Thread that moves messages from the pipe to the inbox. A closed pipe counts as Stop."""
        try:
            while True:
                message: FromServer = self.pipe.recv()
                if isinstance(message, Submit) and message.params.structured_outputs is not None:
                    self.compiling.add(message.key)
                    self.grammars.put(message)
                else:
                    self.inbox.put(message)
        except (EOFError, OSError):
            logger.debug("the server has closed the pipe")
        finally:
            self.inbox.put(Stop())

    def _compile(self) -> None:
        """Thread that compiles each grammar before the engine needs it. While the compiler is
        unavailable it retries every _RETRY_GRAMMARS seconds."""
        fault: str | None = None
        while True:
            last_fault = fault
            error_message = None
            try:
                message = self.grammars.get(timeout=None if fault is None else _RETRY_GRAMMARS)
            except queue.Empty:
                message = None
            try:
                if message is None:
                    self.engine.grammars.compiler.trial.start()
                elif message.key not in self.aborted:
                    self.engine.compile(message.params)
                fault = None
            except GrammarsUnavailable as error:
                fault = error_message = str(error)
            except Exception as error:
                if not isinstance(error, ValueError):
                    logger.exception("a grammar could not be compiled")
                fault = None
                error_message = str(error)
            if fault != last_fault:
                self.inbox.put(Grammars(fault))
            if message is not None and error_message is None:
                self.inbox.put(message)
            elif message is not None:
                self.inbox.put(Rejected(message.key, str(error_message), user_error=fault is None))

    def _process_inbox(self) -> bool:
        """Handle all messages in the inbox; waits for one if the engine is idle. Returns False
        for Stop."""
        wait = not self.engine.has_work
        split = self.engine.resolved.split
        while True:
            try:
                message = self.inbox.get(block=wait, timeout=_CHECK_RANKS if split.group else None)
            except queue.Empty:
                if not wait:
                    return True
                split.check()
                continue
            wait = False  # send the message's effects before waiting again
            if isinstance(message, Stop):
                return False
            if isinstance(message, Finish):
                self._finish(message)
            elif isinstance(message, Release):
                self.engine.components.clear_prefix_cache()
            elif isinstance(message, Grammars):
                send(self.pipe, message)
            elif not self._is_open(message.key):
                continue
            elif isinstance(message, Submit):
                self._submit(message)
            else:
                send(self.pipe, message)

    def _is_open(self, key: int) -> bool:
        """Whether a prompt was not aborted while its grammar was compiled."""
        self.compiling.discard(key)
        is_open = key not in self.aborted
        self.aborted.discard(key)
        return is_open

    def _submit(self, message: Submit) -> None:
        try:
            requests = self.engine.add_prompt(
                message.prompt_ids,
                message.params,
                key=message.key,
                request_id=message.request_id,
                scheduling=message.scheduling,
            )
        except (ValueError, GrammarsUnavailable) as error:
            send(self.pipe, Rejected(message.key, str(error), isinstance(error, ValueError)))
            return
        self.requests |= {(message.key, i): request for i, request in enumerate(requests)}

    def _finish(self, message: Finish) -> None:
        if message.key in self.compiling:
            self.aborted.add(message.key)
        indices = [i for key, i in self.requests if key == message.key]
        for index in indices if message.sibling is None else [message.sibling]:
            request = self.requests.pop((message.key, index), None)
            if request is not None:
                self.engine.finish(request, message.reason)
