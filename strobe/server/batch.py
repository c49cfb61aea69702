"""Requests out of a file, answered by the server's own endpoints without a socket."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from starlette.types import ASGIApp, Message
from tqdm import tqdm

from strobe.config import EngineConfig
from strobe.hub.locate import located
from strobe.server.app import make_app
from strobe.server.engine_process.client import EngineClient, EngineDead
from strobe.server.launch import make_serving, named
from strobe.server.serving import read_template
from strobe.server.settings import ServerConfig
from strobe.text.tokenizer import Tokenizer

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Asked(NamedTuple):
    """A line of the input file."""

    custom_id: str
    url: str
    body: Mapping[str, Any]


def run_batch(config: EngineConfig, settings: ServerConfig, source: Path, out: Path) -> int:
    """Answer what `out` does not answer yet; the exit status, 1 where a request failed. Raises
    ValueError for files and settings that do not fit."""
    settings = replace(named(config, settings), access_log=False, api_key=(), api_key_file=None)
    every, done = _asked(source), _answered(out)
    asked = [one for one in every if one.custom_id not in done]
    settings.logs.configure()
    if done:
        print(f"{out} has {len(done)} answers already; {len(asked)} are left.", file=sys.stderr)
    template = read_template(settings.chat_template)
    config = located(config)
    try:
        with out.open("a", encoding="utf-8") as file:
            failed = asyncio.run(_run(config, settings, template, asked, file))
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error.strerror or error}.") from None
    except EngineDead as error:
        print(f"strobe: {error}", file=sys.stderr)
        return 1
    print(f"{len(asked) - failed} requests answered, {failed} failed: {out}", file=sys.stderr)
    return int(failed > 0)


async def _run(
    config: EngineConfig,
    settings: ServerConfig,
    template: str | None,
    asked: list[Asked],
    file: IO[str],
) -> int:
    """Write an answer to each; how many failed."""
    if not asked:
        return 0
    client = EngineClient(config, settings.logs)
    client.start()
    try:
        tokenizer = await asyncio.to_thread(Tokenizer, Path(config.target))
        facts = await client.ready()
        app = make_app(make_serving(settings, client, tokenizer, template))
        most = asyncio.Semaphore(facts.max_num_seqs + min(settings.max_waiting, 64))
        failed = 0

        async def answer(one: Asked) -> None:
            nonlocal failed
            async with most:
                status, body = await _call(app, one)
            if client.dead:
                raise EngineDead("The engine's process has ended; start again to go on.")
            failed += status != 200
            file.write(json.dumps(_line(one, status, body), ensure_ascii=False) + "\n")
            file.flush()
            progress.update()

        with tqdm(total=len(asked), unit="request", disable=not sys.stderr.isatty()) as progress:
            async with asyncio.TaskGroup() as group:
                for one in asked:
                    group.create_task(answer(one))
        return failed
    except* EngineDead as errors:
        raise errors.exceptions[0] from None
    finally:
        await client.stop()


async def _call(app: ASGIApp, one: Asked) -> tuple[int, Any]:
    """Status and body of the endpoint's answer."""
    said: list[Message] = []
    body = json.dumps(one.body).encode()
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    async def send(message: Message) -> None:
        said.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "POST", "path": one.url, "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "state": {},
    }  # fmt: skip
    await app(scope, receive, send)
    whole = b"".join([message.get("body", b"") for message in said[1:]])
    return said[0]["status"], json.loads(whole)


def _line(one: Asked, status: int, body: Any) -> dict[str, Any]:
    """An answer as OpenAI's output files have it."""
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": one.custom_id,
        "response": {"status_code": status, "request_id": body.get("id", ""), "body": body},
        "error": body.get("error"),
    }


def _asked(path: Path) -> list[Asked]:
    """The requests of a file. Raises ValueError, naming the line."""
    found: dict[str, Asked] = {}
    for number, line in _lines(path):
        where = f"Line {number} of {path}"
        try:
            one = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is no JSON: {error}.") from None
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
        found[name] = Asked(name, url, body)
    return list(found.values())


def _answered(path: Path) -> set[str]:
    """The custom ids of the answers that a file holds; of a line that was cut off, nothing."""
    if not path.exists():
        return set()
    found: set[str] = set()
    kept: list[str] = []
    for _, line in _lines(path):
        try:
            one = json.loads(line)
            answered = one["response"]["status_code"] == 200
        except (ValueError, TypeError, LookupError):
            continue
        if answered:
            found.add(one["custom_id"])
            kept.append(line)
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return found


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    lines = enumerate(text.splitlines(), 1)
    return [(number, line) for number, line in lines if line.strip()]
