"""Starting an engine process. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import threading
from collections.abc import Generator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

from tqdm import tqdm

from strobe.config import EngineConfig
from strobe.host.openmp import CHOSEN_THREADS
from strobe.server.engine_process.resources import Replica
from strobe.server.server_settings import LogSettings
from strobe.server.telemetry.kv_events import KVEventsConfig


@contextlib.contextmanager
def blocked(*numbers: signal.Signals) -> Generator[None]:
    """Block signals, also in processes started inside the block."""
    resource_tracker.ensure_running()  # if started inside the block, it would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run(
    pipe: Connection,
    config: EngineConfig,
    logs: LogSettings,
    kv_events: KVEventsConfig | None,
    replica: Replica | None,
) -> None:
    """Run the worker. Only the engine process imports it, and with it torch."""
    if replica is not None:
        os.environ.update({**replica.environment, CHOSEN_THREADS: ""})
    tqdm.set_lock(threading.RLock())  # its own has a semaphore, which a killed process leaves
    gc.disable()  # imports leave no garbage to search for
    worker = importlib.import_module("strobe.server.engine_process.worker")
    gc.enable()
    worker.run_engine(pipe, config, logs=logs, kv_events=kv_events, replica=replica)
