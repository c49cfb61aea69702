"""Runs stored batches one after another, after other requests in the queue."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from typing import Any

from starlette.types import ASGIApp

from strobe.server.batches.batch_store import RUNNING, BatchStore, succeeded
from strobe.server.batches.bodies import BatchError
from strobe.server.batches.lines import AnswerFile, BatchLine, answer_line, call, read_requests
from strobe.server.serving import Serving

logger = logging.getLogger(__name__)

PRIORITY = 1
"""Priority of a batch's requests that have none: after all usual requests."""

_RETRIED = (429, 503)
_RETRY_SECONDS = 1.0


class BatchRunner:
    """Answers the requests of the batches in a store. app: the application without API keys."""

    def __init__(self, serving: Serving, store: BatchStore, app: ASGIApp):
        self.serving = serving
        self.store = store
        self.app = app
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._cancelled: set[str] = set()
        self._counts: dict[str, list[int]] = {}

    def resume(self) -> None:
        """Queue the batches that a previous run of the server left unfinished, oldest first."""
        for kind in ("batch", "msgbatch"):
            for batch in reversed(self.store.records(kind)):
                if batch["status"] in RUNNING:
                    self.start(batch["id"])

    def start(self, name: str) -> None:
        """Queue a batch."""
        self._queue.put_nowait(name)
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def cancel(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Stop a batch, which keeps its answers so far. Returns its new record."""
        name = batch["id"]
        self._cancelled.add(name)
        batch = {**batch, "status": "cancelling", "cancelling_at": int(time.time())}
        self.store.save(batch)
        if self._running is not None and self._running[0] == name:
            self._running[1].cancel()
        return batch

    def counts(self, name: str) -> tuple[int, int]:
        """Return the numbers of a batch's answers and errors so far."""
        if name not in self._counts:
            answers = list(map(succeeded, self.store.answers(name)))
            self._counts[name] = [answers.count(True), answers.count(False)]
        completed, failed = self._counts[name]
        return completed, failed

    async def stop(self) -> None:
        """Stop all batches; a later run of the server resumes them."""
        tasks = [self._task, self._running[1] if self._running is not None else None]
        for task in filter(None, tasks):
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            name = await self._queue.get()
            task = asyncio.create_task(self._answer(name))
            self._running = name, task
            await asyncio.wait([task])
            self._running = None
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("batch %s failed", name, exc_info=error)
                problem: BatchError = {
                    "code": "internal",
                    "message": str(error),
                    "param": None,
                    "line": None,
                }
                self._end(name, "failed", [problem])
            else:
                self._end(name, "cancelled" if name in self._cancelled else "completed")

    def _end(self, name: str, status: str, errors: list[BatchError] | None = None) -> None:
        batch = self.store.get(name)
        if batch is not None:
            ended = {"status": status, f"{status}_at": int(time.time())}
            self.store.save({**batch, **ended, "errors": errors})

    async def _answer(self, name: str) -> None:
        """Answer the requests of a batch that have no answer yet."""
        if (batch := self.store.get(name)) is None or name in self._cancelled:
            return
        self.store.save({**batch, "status": "in_progress", "in_progress_at": int(time.time())})
        path = self.store.lines_path(batch["lines"])
        lines = read_requests(path, name, (batch["endpoint"],))
        facts = self.serving.facts
        at_once = asyncio.Semaphore(facts.max_num_seqs)
        with closing(AnswerFile(self.store.answers_path(name), path)) as answers:
            counts = self._counts[name] = [len(answers.answered), 0]

            async def answer(line: BatchLine) -> None:
                async with at_once:
                    status, body = await self._call(line)
                written = answer_line(line, status, body)
                await answers.add(written)
                counts[not succeeded(written)] += 1

            async with asyncio.TaskGroup() as group:
                for line in lines:
                    if line.custom_id not in answers.answered:
                        group.create_task(answer(line))

    async def _call(self, line: BatchLine) -> tuple[int, Any]:
        """Return the status and body of a line's answer, once the server has room for it."""
        line = line._replace(body={"priority": PRIORITY, **line.body})
        while True:
            status, body = await call(self.app, line)
            restarts = status == 500 and self.serving.client.facts is None
            if status not in _RETRIED and not restarts:
                return status, body
            await asyncio.sleep(_RETRY_SECONDS)
