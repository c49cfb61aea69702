"""Answers a file of requests through the server's endpoints, without a socket."""

from __future__ import annotations

import asyncio
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from starlette.types import ASGIApp

from strobe.config import EngineConfig
from strobe.hub.locate import locate_models
from strobe.server.app import make_app
from strobe.server.batches.lines import AnswerFile, BatchLine, answer_line, call, read_requests
from strobe.server.batches.tally import BatchTally
from strobe.server.engine_process.client import EngineClient, EngineDead
from strobe.server.engine_process.replicas import Replicas
from strobe.server.launch import make_client, make_serving, served_names
from strobe.server.server_settings import ServerConfig
from strobe.server.serving import check_parsers, check_template, read_template
from strobe.terminal.progress import Progress
from strobe.terminal.wording import counted
from strobe.text.server_tokenizer import load_server_tokenizer

_SHOW_SECONDS = 0.5
"""Time between two looks at the engine's progress."""


def run_batch(config: EngineConfig, settings: ServerConfig, source: Path, out: Path) -> int:
    """Answer the requests that `out` does not answer yet. Returns the exit status, 1 if a request
    failed. Raises ValueError for invalid files and settings."""
    settings = replace(
        served_names(config, settings), access_log=False, api_key=(), api_key_file=None
    )
    # Requests come from no network. If an engine ends, the others answer its requests.
    settings = replace(settings, allowed_hosts=("*",), batch_dir=None, restart_engine=False)
    requests = read_requests(source)
    with closing(AnswerFile(out, source)) as answers:
        remaining = [line for line in requests if line.custom_id not in answers.answered]
        if done := len(requests) - len(remaining):
            rest = f"{len(remaining)} {'is' if len(remaining) == 1 else 'are'} left"
            print(f"{out} has {counted(done, 'answer')} already; {rest}.", file=sys.stderr)
        template = read_template(settings.chat_template)
        check_parsers(settings)
        settings.logs.configure()
        config = locate_models(config)
        if template is not None:
            check_template(load_server_tokenizer(Path(config.target)), template)
        tally = BatchTally(remaining)
        try:
            asyncio.run(
                _run(
                    config=config,
                    settings=settings,
                    template=template,
                    lines=remaining,
                    answers=answers,
                    tally=tally,
                )
            )
        except EngineDead as error:
            print(f"strobe: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(
                f"Stopped after {tally.ended} of {counted(len(remaining), 'request')}; the same "
                "command goes on from there.",
                file=sys.stderr,
            )
            _report(tally, out)
            raise
    _report(tally, out)
    return int(tally.failed > 0)


def _report(tally: BatchTally, out: Path) -> None:
    """Print the numbers of answers and of failures, and the reasons of these."""
    answered = counted(tally.answered, "request")
    print(f"{answered} answered, {tally.failed} failed: {out}", file=sys.stderr)
    start = f"{tally.failed} failed: "
    for line in tally.failures():
        print(f"{start}{line}", file=sys.stderr)
        start = " " * len(start)


async def _run(
    config: EngineConfig,
    settings: ServerConfig,
    template: str | None,
    lines: list[BatchLine],
    answers: AnswerFile,
    tally: BatchTally,
) -> None:
    """Write an answer to each line, and count it."""
    if not lines:
        return
    client = make_client(config, settings)
    client.start()
    try:
        tokenizer = await asyncio.to_thread(load_server_tokenizer, Path(client.config.target))
        facts = await client.ready()
        app = make_app(make_serving(settings, client, tokenizer, template))
        with Progress("Answering", len(lines), unit="requests") as progress:
            file_run = _FileRun(
                client=client,
                app=app,
                answers=answers,
                tally=tally,
                progress=progress,
                max_attempts=settings.data_parallel_size,
                max_model_len=facts.max_model_len,
                concurrency=asyncio.Semaphore(facts.max_num_seqs + min(settings.max_waiting, 64)),
            )
            await file_run.answer_all(lines)
    except* (EngineDead, ValueError) as errors:
        raise errors.exceptions[0] from None
    finally:
        await client.stop()


@dataclass(frozen=True)
class _FileRun:
    """Answers lines concurrently, with their number on the terminal."""

    client: EngineClient | Replicas
    app: ASGIApp
    answers: AnswerFile
    tally: BatchTally
    progress: Progress
    max_attempts: int
    max_model_len: int
    concurrency: asyncio.Semaphore

    async def answer_all(self, lines: list[BatchLine]) -> None:
        """Answer all lines. Raises an exception group."""
        showing = asyncio.create_task(self._keep_showing())
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(self._answer(line))
        finally:
            showing.cancel()

    async def _answer(self, line: BatchLine) -> None:
        async with self.concurrency:
            self.tally.running += 1
            status, body = await call(self.app, line)
            for _ in range(1, self.max_attempts):
                if status == HTTPStatus.SERVICE_UNAVAILABLE:  # its engine has ended
                    status, body = await call(self.app, line)
            self.tally.running -= 1
        if self.client.dead:
            raise EngineDead("The engine's process has ended; start again to go on.")
        await self.answers.add(answer_line(line, status, body))
        self.tally.add(status, body)
        self._show()

    def _show(self) -> None:
        snapshot = self.client.snapshot
        generated = 0 if snapshot is None else snapshot.stats.generation_tokens
        text = f"Answering, {counted(generated, 'token')}"
        unfinished = self.tally.unfinished(generated, self.max_model_len)
        self.progress.update(text, done=self.tally.ended, unfinished=unfinished)

    async def _keep_showing(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_SHOW_SECONDS)
