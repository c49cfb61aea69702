"""Requests out of a file, answered by the server's own endpoints without a socket."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from strobe.config import EngineConfig
from strobe.hub.locate import locate_models
from strobe.progress import Progress
from strobe.server.app import make_app
from strobe.server.engine_process.client import EngineClient, EngineDead
from strobe.server.launch import make_serving, served_names
from strobe.server.serving import read_template
from strobe.server.settings import ServerConfig
from strobe.text.tokenizer import Tokenizer
from strobe.wording import counted

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BEGINNING = b'{"id": "batch_req_'
"""What every line that is written begins with."""


class BatchLine(NamedTuple):
    """A line of the input file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def run_batch(config: EngineConfig, settings: ServerConfig, source: Path, out: Path) -> int:
    """Answer what `out` does not answer yet; the exit status, 1 where a request failed. Raises
    ValueError for files and settings that do not fit."""
    settings = replace(
        served_names(config, settings), access_log=False, api_key=(), api_key_file=None
    )
    settings = replace(settings, allowed_hosts=("*",))  # requests come from no network
    requests = read_requests(source)
    with closing(AnswerFile(out, source)) as answers:
        remaining = [line for line in requests if line.custom_id not in answers.answered]
        if done := len(requests) - len(remaining):
            left = f"{len(remaining)} {'is' if len(remaining) == 1 else 'are'} left"
            print(f"{out} has {counted(done, 'answer')} already; {left}.", file=sys.stderr)
        template = read_template(settings.chat_template)
        settings.logs.configure()
        config = locate_models(config)
        try:
            failed = asyncio.run(_run(config, settings, template, remaining, answers))
        except EngineDead as error:
            print(f"strobe: {error}", file=sys.stderr)
            return 1
    answered = counted(len(remaining) - failed, "request")
    print(f"{answered} answered, {failed} failed: {out}", file=sys.stderr)
    return int(failed > 0)


class AnswerFile:
    """The output file. Lines are only ever added to it, and are on the disk once they are, so that
    a run that is killed loses only the answers that it was making."""

    def __init__(self, path: Path, source: Path):
        """Read the answers that an existing file holds. Raises ValueError, leaving the file as it
        is, if it is the input or holds anything but answers."""
        self.path = path
        if path.exists() and path.samefile(source):
            raise self._refused(f"is the input file {source} itself")
        if path.exists() and not path.is_file():
            raise self._refused("is not a regular file")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._refused(f"cannot be opened ({error.strerror})") from None
        try:
            self._lock()
            self.answered = self._read()
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)

    async def add(self, line: Mapping[str, Any]) -> None:
        """Append an answer. Raises ValueError if that fails; the file keeps whole lines only."""
        # Escapes keep U+2028 and the like, which some programs take for ends of lines, out of it.
        data = json.dumps(line).encode() + b"\n"
        size, written = os.fstat(self._fd).st_size, 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise self._full(error) from None
        try:
            await asyncio.to_thread(os.fsync, self._fd)
        except OSError as error:
            raise self._full(error) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refused("is being written by another run") from None
        except OSError:
            pass  # a file system without locks

    def _read(self) -> set[str]:
        """The custom ids that are answered. A last line that was cut off is taken away."""
        data = self.path.read_bytes()
        *lines, last = data.split(b"\n")
        answered: set[str] = set()
        for number, line in enumerate([*lines, last], 1):
            answer = _answer(line)
            if answer is not None and answer["response"].get("status_code") == 200:
                answered.add(answer["custom_id"])
            cut_off = number > len(lines) and (
                line.startswith(_BEGINNING) or (number > 1 and _BEGINNING.startswith(line))
            )
            if answer is None and line.strip() and not cut_off:
                raise self._refused(f"holds something other than answers (line {number})")
        if _answer(last) is not None:
            os.write(self._fd, b"\n")
        elif last:
            os.ftruncate(self._fd, len(data) - len(last))
        return answered

    def _refused(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} {why}, so no answers are written to it; name another file with "
            "--output-file."
        )

    def _full(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self.path} cannot be written ({error.strerror}); it keeps the answers so far, and "
            "the same command goes on from there."
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    """A line of an output file; None if it is anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    shaped = isinstance(value, dict) and isinstance(value.get("custom_id"), str)
    if not shaped or "error" not in value or "response" not in value:
        return None
    response = value["response"]
    return value | {"response": response if isinstance(response, dict) else {}}


async def _run(
    config: EngineConfig,
    settings: ServerConfig,
    template: str | None,
    lines: list[BatchLine],
    answers: AnswerFile,
) -> int:
    """Write an answer to each; how many failed."""
    if not lines:
        return 0
    client = EngineClient(config, settings.logs)
    client.start()
    try:
        tokenizer = await asyncio.to_thread(Tokenizer, Path(config.target))
        facts = await client.ready()
        app = make_app(make_serving(settings, client, tokenizer, template))
        concurrency = asyncio.Semaphore(facts.max_num_seqs + min(settings.max_waiting, 64))
        failed = 0

        async def answer(line: BatchLine) -> None:
            nonlocal failed
            async with concurrency:
                status, body = await _call(app, line)
            if client.dead:
                raise EngineDead("The engine's process has ended; start again to go on.")
            await answers.add(_line(line, status, body))
            failed += status != 200
            shown.advance()

        with Progress("Answering", len(lines), unit="requests") as shown:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    group.create_task(answer(line))
        return failed
    except* (EngineDead, ValueError) as errors:
        raise errors.exceptions[0] from None
    finally:
        await client.stop()


async def _call(app: ASGIApp, line: BatchLine) -> tuple[int, Any]:
    """Status and body of the endpoint's answer."""
    messages: list[Message] = []
    body = json.dumps(line.body).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    async def send(message: Message) -> None:
        messages.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "POST", "path": line.url, "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    content = b"".join([message.get("body", b"") for message in messages[1:]])
    return messages[0]["status"], json.loads(content)


def _line(line: BatchLine, status: int, body: Any) -> dict[str, Any]:
    """An answer as OpenAI's output files have it."""
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": body.get("id", ""), "body": body},
        "error": body.get("error"),
    }


def read_requests(path: Path) -> list[BatchLine]:
    """The requests of a file. Raises ValueError, naming the line."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from None
    found: dict[str, BatchLine] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"Line {number} of {path}"
        try:
            one = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not JSON: {error}.") from None
        given = one if isinstance(one, dict) else {}
        name, url, body = (given.get(key) for key in ("custom_id", "url", "body"))
        if not isinstance(name, str) or not name or not isinstance(body, dict):
            raise ValueError(f"{where} must be an object with custom_id, url and body.")
        if url not in URLS or given.get("method", "POST") != "POST":
            raise ValueError(
                f"{where} asks for {given.get('method', 'POST')} {url}, but only POST is answered, "
                f"at {', '.join(URLS)}."
            )
        if body.get("stream"):
            raise ValueError(f"{where} asks for a stream, which a file cannot be; leave it out.")
        if name in found:
            raise ValueError(f"{where} has the custom_id {name!r} of an earlier line; change it.")
        found[name] = BatchLine(name, url, body)
    if not found:
        raise ValueError(
            f"{path} holds no requests; write one a line, with custom_id, url and body."
        )
    return list(found.values())
