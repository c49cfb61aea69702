"""Record the golden documents of the server's tests again.

    python -m scripts.golden --openapi                 # the OpenAPI document
    python -m scripts.golden --responses [NAME...]     # responses, from the recorded events
    python -m scripts.golden --write [NAME...]         # events of the demo models, and responses
    python -m scripts.golden --clients PYTHON NAME...  # requests of clients in scripts/clients

NAME: of a file in tests/server/golden/transcripts. PYTHON: of an environment with the clients. A
new request is an entry in such a file with a name, a path and a body; --write adds the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from strobe.hub.locate import locate_models
from strobe.request import SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import EngineClient, Generation
from strobe.server.server_settings import LogSettings
from strobe.step import TokenEvent
from strobe.text.tokenizer import Tokenizer
from tests.server.support.golden import (
    CONFIG,
    OPENAPI,
    TRANSCRIPTS,
    Exchange,
    Placeholders,
    Replay,
    ask,
    describe_prompt,
    load,
    make_app_of,
    openapi_document,
    save,
    to_json,
)

ROOT = Path(__file__).parents[1]
KEY = "k-golden"
QUESTIONS = ["With 44 coins Tom buys 3 cups. Each cup costs 11 coins. How many coins are left?"]


class RecordingClient(EngineClient):
    """A client of a real engine that records the prompts and events of one exchange."""

    tokenizer: Tokenizer

    def __init__(self) -> None:
        super().__init__(locate_models(CONFIG), LogSettings())
        self.tapes: list[dict[str, Any]] = []

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingOptions,
    ) -> Generation:
        generation = super().submit(prompt_ids, params, request_id, scheduling)
        tape = describe_prompt(self.tokenizer, prompt_ids, params, scheduling)
        self.tapes.append(tape)
        add = generation.add_events
        fail = generation.fail

        def add_events(events: list[TokenEvent], ended: float = 0.0) -> None:
            tape.setdefault("steps", []).append([to_json(event) for event in events])
            add(events, ended)

        def reject(error: Exception) -> None:
            tape["rejected"] = str(error)
            fail(error)

        generation.add_events = add_events
        generation.fail = reject
        return generation


async def record(files: list[Path]) -> None:
    """Write the files' transcripts with the events of the demo models, and the responses."""
    client = RecordingClient()
    client.tokenizer = Tokenizer(Path(client.config.target))
    client.start()
    try:
        await client.ready()
        for file in files:
            transcript = await _record(client, load(file))
            save(file, await asyncio.to_thread(responses, transcript))
    finally:
        await client.stop()


async def _record(client: RecordingClient, transcript: dict[str, Any]) -> dict[str, Any]:
    app = make_app_of(client, client.tokenizer, transcript["settings"])
    placeholders = Placeholders()
    exchanges: list[Exchange] = []
    for exchange in transcript["exchanges"]:
        client.tapes = []
        await ask(app, placeholders, exchange)
        exchanges.append({**exchange, "engine": client.tapes})
    return {**transcript, "exchanges": exchanges}


def responses(transcript: dict[str, Any]) -> dict[str, Any]:
    """Return the transcript with the responses to its requests."""
    replay = Replay(transcript["settings"])
    exchanges = [replay.answer(exchange) for exchange in transcript["exchanges"]]
    return {**transcript, "exchanges": exchanges}


class _Proxy(BaseHTTPRequestHandler):
    """Passes requests on to a server, and keeps them."""

    url = ""
    kept: ClassVar[list[Exchange]] = []

    def _pass_on(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        exchange: Exchange = {
            "name": "",
            "method": self.command,
            "path": self.path,
            "body": json.loads(content) if content else None,
        }
        self.kept.append(exchange)
        names = ("content-type", "authorization", "x-api-key", "anthropic-version")
        headers = {name: self.headers[name] for name in names if name in self.headers}
        if "wrong" in str(headers):
            exchange["headers"] = {k: v for k, v in headers.items() if "wrong" in v}
        request = urllib.request.Request(
            self.url + self.path, content or None, headers, method=self.command
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, kind, body = answer.status, answer.headers["content-type"], answer.read()
                request_id = answer.headers["x-request-id"]
        except urllib.error.HTTPError as error:
            status, kind, body = error.code, error.headers["content-type"], error.read()
            request_id = error.headers["x-request-id"]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("x-request-id", request_id)
        self.send_header("request-id", request_id)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = _pass_on

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def proxy(url: str) -> Iterator[str]:
    """Run a proxy of a server; yield its URL."""
    _Proxy.url = url
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def record_clients(python: str, names: list[str]) -> None:
    """Write the requests of clients, without those that come twice."""
    sys.path.insert(0, str(ROOT / "scripts" / "clients"))
    from client import serving

    with TemporaryDirectory() as folder, serving(Path(folder) / "log", key=KEY) as url:
        questions = Path(folder) / "questions.json"
        questions.write_text(json.dumps(QUESTIONS), encoding="utf-8")
        for name in names:
            program = str(ROOT / "scripts" / "clients" / f"{name}_client.py")
            _Proxy.kept = []
            with proxy(url) as address:
                words = [python, program, address, KEY, str(questions), f"{folder}/out"]
                done = subprocess.run(words, check=False)
            print(name, done.returncode, len(_Proxy.kept), file=sys.stderr)
            exchanges: list[Exchange] = []
            for exchange in _Proxy.kept:
                if all({**other, "name": ""} != exchange for other in exchanges):
                    exchanges.append(exchange)
                    exchange["name"] = ""
            for number, exchange in enumerate(exchanges, 1):
                exchange["name"] = f"{name}, request {number}"
            save(TRANSCRIPTS / f"{name}.json", {"settings": {}, "exchanges": exchanges})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="files in tests/server/golden/transcripts")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--openapi", action="store_true", help="write the OpenAPI document")
    ways.add_argument("--responses", action="store_true", help="write the responses")
    ways.add_argument("--write", action="store_true", help="write the events and the responses")
    ways.add_argument("--clients", metavar="PYTHON", help="write the requests of clients")
    options = parser.parse_args()
    if options.openapi:
        save(OPENAPI, openapi_document())
        return
    if options.clients:
        record_clients(options.clients, options.names)
        return
    files = [TRANSCRIPTS / f"{name}.json" for name in options.names]
    files = files or sorted(TRANSCRIPTS.glob("*.json"))
    if options.write:
        asyncio.run(record(files))
        return
    for file in files:
        save(file, responses(load(file)))


if __name__ == "__main__":
    main()
