"""Files of requests and of their answers, one per line, in the format of OpenAI's batches."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from starlette.types import ASGIApp, Message

from strobe.server.batches.bodies import BatchAnswer

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
URLS: tuple[str, ...] = get_args(BatchUrl)
_BEGINNING = b'{"id": "batch_req_'
"""The first bytes of every line in an output file."""
_SHOWN_PROBLEMS = 20
"""Number of broken lines that an error names."""


class BatchLine(NamedTuple):
    """A line of the input file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


class AnswerFile:
    """The output file. It is append-only and synced after every line, so a killed run loses only
    its unfinished answers."""

    def __init__(self, path: Path, source: Path):
        """Read the answers that an existing file holds. Raises ValueError, leaving the file as it
        is, if it is the input or holds anything but answers."""
        self.path = path
        if path.exists() and path.samefile(source):
            raise self._unusable(f"is the input file {source} itself")
        if path.exists() and not path.is_file():
            raise self._unusable("is not a regular file")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(f"cannot be opened ({error.strerror})") from None
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
        # json.dumps escapes U+2028 and the like, which some programs take for line breaks.
        data = json.dumps(line).encode() + b"\n"
        size = os.fstat(self._fd).st_size
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise self._write_failed(error) from None
        try:
            await asyncio.to_thread(os.fsync, self._fd)
        except OSError as error:
            raise self._write_failed(error) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._unusable("is being written by another run") from None
        except OSError:
            pass  # a file system without locks

    def _read(self) -> set[str]:
        """Return the custom ids that have an answer. A last line that was cut off is removed."""
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
                raise self._unusable(f"holds something other than answers (line {number})")
        if _answer(last) is not None:
            os.write(self._fd, b"\n")
        elif last:
            os.ftruncate(self._fd, len(data) - len(last))
        return answered

    def _unusable(self, why: str) -> ValueError:
        return ValueError(
            f"{self.path} {why}, so no answers are written to it; name another file with "
            "--output-file."
        )

    def _write_failed(self, error: OSError) -> ValueError:
        return ValueError(
            f"{self.path} cannot be written ({error.strerror}); it keeps the answers so far, and "
            "the same command goes on from there."
        )


def _answer(line: bytes) -> dict[str, Any] | None:
    """Parse a line of an output file; None if it is anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    shaped = isinstance(value, dict) and isinstance(value.get("custom_id"), str)
    if not shaped or "error" not in value or "response" not in value:
        return None
    response = value["response"]
    return value | {"response": response if isinstance(response, dict) else {}}


async def call(app: ASGIApp, line: BatchLine) -> tuple[int, Any]:
    """Return the status and body of the endpoint's response."""
    messages: list[Message] = []
    body = json.dumps(line.body).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # never disconnect
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


def answer_line(line: BatchLine, status: int, body: Mapping[str, Any]) -> BatchAnswer:
    """Return a line of the output file, in OpenAI's format."""
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": body.get("id", ""), "body": body},
        "error": body.get("error"),
    }


def read_requests(
    path: Path, name: str | None = None, urls: Sequence[str] = URLS
) -> list[BatchLine]:
    """Read the requests of a file. name: of the file in errors. urls: the endpoints that they may
    ask. Raises BrokenLines, which names all of them, and ValueError if there are no requests."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{name or path} cannot be read ({error.strerror}).") from None
    requests: dict[str, BatchLine] = {}
    problems: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"Line {number} of {name or path}"
        try:
            request = _read_line(line, where, urls)
            if request.custom_id in requests:
                raise ValueError(
                    f"{where} has the custom_id {request.custom_id!r} of an earlier line; "
                    "change it."
                )
        except ValueError as error:
            problems[number] = str(error)
        else:
            requests[request.custom_id] = request
    if problems:
        raise BrokenLines(problems)
    if not requests:
        raise ValueError(
            f"{name or path} holds no requests; write one per line, with custom_id, url and body."
        )
    return list(requests.values())


class BrokenLines(ValueError):
    """Lines of a file that are no requests. problems: a sentence for each, by its number."""

    def __init__(self, problems: Mapping[int, str]):
        self.problems = problems
        shown = list(problems.values())[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"{len(problems) - len(shown)} more lines are no requests either.")
        super().__init__("\n".join(shown))


def _read_line(line: bytes, where: str, urls: Sequence[str]) -> BatchLine:
    """Read a request. Raises ValueError."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    fields = value if isinstance(value, dict) else {}
    custom_id, url, body = (fields.get(key) for key in ("custom_id", "url", "body"))
    method = fields.get("method", "POST")
    if not isinstance(custom_id, str) or not custom_id or not isinstance(body, dict):
        raise ValueError(f"{where} must be an object with custom_id, url and body.")
    if not isinstance(url, str) or url not in urls or method != "POST":
        raise ValueError(
            f"{where} asks for {method} {url}, but only POST is answered, at {', '.join(urls)}."
        )
    if body.get("stream"):
        raise ValueError(f"{where} asks for a stream, which a file cannot be; leave it out.")
    return BatchLine(custom_id, url, body)
