"""Batches of OpenAI and Anthropic: files, answers, cancelling, and what a restart resumes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from strobe.config import DEMO_MODELS
from strobe.server.app import make_app
from strobe.server.batches import bodies
from strobe.server.batches.batch_runner import BatchRunner
from strobe.server.batches.batch_store import BatchStore
from strobe.text.tokenizer import Tokenizer
from tests.server.support.answer_checks import check_body
from tests.server.support.asgi_client import call
from tests.server.support.engineless_server import serving
from tests.server.support.http_client import Talk
from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served

CHAT = "/v1/chat/completions"
SORT = {"messages": [{"role": "user", "content": "Sort these words: pear, apple, fig"}],
        "temperature": 0, "max_tokens": 12}  # fmt: skip
LINES = [
    {"custom_id": "a", "method": "POST", "url": CHAT, "body": SORT},
    {"custom_id": "bad", "method": "POST", "url": CHAT, "body": {**SORT, "temperature": -1}},
]


def jsonl(*lines: Any) -> bytes:
    return b"".join([json.dumps(line).encode() + b"\n" for line in lines])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODELS / "target")


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def is_documented(text: str, shape: type) -> None:
    """Assert that a list of the server's has items, and all fields of its type and no others."""
    assert json.loads(text)["data"]
    check_body(shape, json.loads(text))


def ended(client: openai.OpenAI, name: str) -> Any:
    """Wait for a batch's end, and return it."""
    running = ("validating", "in_progress", "cancelling")

    def look() -> Any:
        batch = client.batches.retrieve(name)
        return batch if batch.status not in running else None

    return until(look, "the batch's end")


def test_openai_batch_gives_the_answers_of_its_requests(server: Served, client: openai.OpenAI):
    content = jsonl(*LINES)
    source = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (source.filename, source.bytes) == ("in.jsonl", len(content))
    assert client.files.content(source.id).content == content
    batch = client.batches.create(
        input_file_id=source.id, endpoint=CHAT, completion_window="24h", metadata={"k": "v"}
    )
    batch = ended(client, batch.id)
    assert (batch.status, batch.metadata) == ("completed", {"k": "v"})
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    (answer,) = client.files.content(batch.output_file_id).text.splitlines()
    with Talk(server.url, CHAT, SORT) as talk:
        direct = talk.json()["choices"][0]["message"]
    check_body(bodies.BatchAnswer, json.loads(answer))
    body = json.loads(answer)["response"]["body"]
    assert body["choices"][0]["message"]["content"] == direct["content"]
    (error,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(error)["custom_id"] == "bad"
    assert json.loads(error)["response"]["status_code"] == 400
    assert client.files.retrieve(batch.output_file_id).bytes == len(answer) + 1
    assert batch.id in [listed.id for listed in client.batches.list(limit=1)]
    assert source.id in [listed.id for listed in client.files.list(purpose="batch")]
    is_documented(server.get("/v1/files"), bodies.FileList)
    is_documented(server.get("/v1/batches"), bodies.BatchList)
    assert client.files.delete(source.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(source.id)


def test_invalid_file_is_a_failed_batch(client: openai.OpenAI):
    other = {**LINES[0], "url": "/v1/completions"}
    source = client.files.create(file=("in.jsonl", jsonl(LINES[0], other)), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    assert batch.status == "failed"
    assert batch.errors.data[0].message.startswith(f"Line 2 of {source.id} asks for POST /v1/comp")


def test_message_batch_gives_the_answers_of_its_requests(server: Served):
    good = {key: SORT[key] for key in ("messages", "temperature", "max_tokens")}
    requests = [{"custom_id": "a", "params": good}, {"custom_id": "bad", "params": {}}]
    path = "/v1/messages/batches"
    with Talk(server.url, path, {"requests": requests}) as talk:
        batch = talk.json()
    assert (batch["type"], batch["results_url"]) == ("message_batch", None)

    def look() -> Any:
        with Talk(server.url, f"{path}/{batch['id']}") as talk:
            found = talk.json()
        return found["processing_status"] == "ended" and found

    found = until(look, "the batch's end")
    counts = {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
    assert found["request_counts"] == counts
    results = server.get(found["results_url"].removeprefix(server.url)).splitlines()
    check_body(list[bodies.MessageBatchResult], [json.loads(line) for line in results])
    by_id = {line["custom_id"]: line["result"] for line in map(json.loads, results)}
    with Talk(server.url, "/v1/messages", good) as talk:
        direct = talk.json()
    assert by_id["a"]["message"]["content"] == direct["content"]
    assert by_id["bad"]["error"]["error"]["type"] == "invalid_request_error"
    assert batch["id"] in server.get(path)
    is_documented(server.get(path), bodies.MessageBatchList)
    with Talk(server.url, f"{path}/{batch['id']}", method="DELETE") as talk:
        assert talk.json() == {"id": batch["id"], "type": "message_batch_deleted"}


# with scripted answers

Answer = Callable[[dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]


def runner(tokenizer: Tokenizer, directory: Path, answer: Answer) -> BatchRunner:
    """Return a runner whose requests `answer` answers by their bodies."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        status, reply = await answer(body)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(reply).encode()})

    return BatchRunner(serving(tokenizer), BatchStore(directory), app)


def add(runner: BatchRunner, *names: str) -> str:
    lines = [{"custom_id": name, "url": CHAT, "body": {"name": name}} for name in names]
    source = runner.store.add("file", "", {})
    runner.store.write_lines(source["id"], jsonl(*lines))
    known = {"endpoint": CHAT, "lines": source["id"], "metadata": None, "total": len(lines),
             "errors": None, "status": "validating"}  # fmt: skip
    return runner.store.add("batch", "", known)["id"]


async def status_is(runner: BatchRunner, name: str, status: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while (runner.store.get(name) or {})["status"] != status:
            await asyncio.sleep(0.01)


def test_restart_resumes_a_batch(tokenizer: Tokenizer, tmp_path: Path):
    asked: list[str] = []

    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.append(body["name"])
        if body["name"] == "slow" and len(asked) < 3:
            await asyncio.Event().wait()
        return 200, {"id": body["name"]}

    async def first_run() -> str:
        first = runner(tokenizer, tmp_path, answer)
        name = add(first, "quick", "slow")
        first.start(name)
        async with asyncio.timeout(PATIENCE):
            while len(asked) < 2 or first.counts(name) != (1, 0):
                await asyncio.sleep(0.01)
        await first.stop()
        assert (first.store.get(name) or {})["status"] == "in_progress"
        return name

    async def second_run(name: str) -> None:
        second = runner(tokenizer, tmp_path, answer)
        second.resume()
        await status_is(second, name, "completed")
        assert second.counts(name) == (2, 0)
        await second.stop()

    name = asyncio.run(first_run())
    asyncio.run(second_run(name))
    assert asked == ["quick", "slow", "slow"]


def test_cancelled_batch_keeps_its_answers(tokenizer: Tokenizer, tmp_path: Path):
    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["name"] == "slow":
            await asyncio.Event().wait()
        return 200, {"id": body["name"]}

    async def run() -> None:
        batches = runner(tokenizer, tmp_path, answer)
        name, waiting = add(batches, "quick", "slow"), add(batches, "later")
        batches.start(name)
        batches.start(waiting)
        async with asyncio.timeout(PATIENCE):
            while batches.counts(name) != (1, 0):
                await asyncio.sleep(0.01)
        for batch in (waiting, name):
            assert batches.cancel(batches.store.get(batch) or {})["status"] == "cancelling"
        await status_is(batches, name, "cancelled")
        await status_is(batches, waiting, "cancelled")
        assert (batches.counts(name), batches.counts(waiting)) == ((1, 0), (0, 0))
        await batches.stop()

    asyncio.run(run())


def test_batch_requests_wait_for_room_behind_others(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.server.batches.batch_runner._RETRY_SECONDS", 0.01)
    priorities: list[int] = []

    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        priorities.append(body["priority"])
        return (429, {}) if len(priorities) < 3 else (200, {"id": "x"})

    async def run() -> None:
        batches = runner(tokenizer, tmp_path, answer)
        name = add(batches, "one")
        batches.start(name)
        await status_is(batches, name, "completed")
        await batches.stop()

    asyncio.run(run())
    assert priorities == [1, 1, 1]


def test_batch_that_fails_in_the_server_has_a_documented_error(
    tokenizer: Tokenizer, tmp_path: Path
):
    async def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        raise OSError("The disk is full.")

    async def run() -> dict[str, Any]:
        batches = runner(tokenizer, tmp_path, answer)
        name = add(batches, "one")
        batches.start(name)
        await status_is(batches, name, "failed")
        await batches.stop()
        return batches.store.get(name) or {}

    (problem,) = asyncio.run(run())["errors"]
    check_body(bodies.BatchError, problem)


def test_batches_belong_to_their_api_key(tmp_path: Path):
    store = BatchStore(tmp_path)
    name = store.add("file", "a1", {})["id"]
    store.write_lines(name, b"x")
    assert store.content(name, "a1") == b"x"
    assert store.content(name, "b2") is None
    assert store.records("file", "b2") == []
    assert store.get("../secret") is None


def upload(server: Served, body: bytes, kind: str, **headers: str) -> tuple[int, str]:
    headers = {"Authorization": "Bearer x", **headers, "Content-Type": kind}
    shown = {name: value for name, value in headers.items() if value}
    with Talk(server.url, "/v1/files", body, headers=shown) as talk:
        return talk.status, talk.error["message"]


def test_invalid_upload_is_one_sentence(server: Served):
    kind = "multipart/form-data; boundary=b"
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    status, sentence = upload(server, part % (b"purpose", b"assistants") + b"--b--\r\n", kind)
    assert (status, sentence[:25]) == (400, 'purpose is "assistants", ')
    status, sentence = upload(server, part % (b"purpose", b"batch") + b"--b--\r\n", kind)
    assert (status, sentence) == (400, "file is missing; the upload needs it.")
    assert upload(server, b"x", kind)[0] == 400
    assert upload(server, b"x", "text/plain")[0] == 415
    assert upload(server, b"x", kind, Authorization="")[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/batches", {"input_file_id": "file_x", "endpoint": CHAT}, "input_file_id"),
        ("/v1/batches", {"input_file_id": "file_x", "endpoint": "/v1/x"}, "endpoint"),
        ("/v1/batches", {"endpoint": CHAT}, "input_file_id"),
        ("/v1/batches", {"input_file_id": "x", "endpoint": CHAT, "metadata": {"a": 1}},
         "metadata.a"),
    ],
)  # fmt: skip
def test_invalid_batch_names_the_field(server: Served, path: str, body: Any, param: str):
    with Talk(server.url, path, body) as talk:
        assert talk.error["param"] == param


@pytest.mark.parametrize(
    "requests",
    [
        [],
        [{"custom_id": "a"}],
        [{"custom_id": "", "params": {}}],
        [{"custom_id": "a", "params": {}}] * 2,
        [{"custom_id": "a", "params": {"stream": True}}],
    ],
)
def test_invalid_message_batch_is_one_sentence(server: Served, requests: Any):
    with Talk(server.url, "/v1/messages/batches", {"requests": requests}) as talk:
        assert talk.status == 400
        assert talk.json()["error"]["message"].startswith("requests")


def test_server_without_a_directory_says_how_to_get_one(tokenizer: Tokenizer):
    answer = call(make_app(serving(tokenizer)), "/v1/batches", body=[b"{}"])
    assert answer.status == 501
    assert "start it with --batch-dir DIR" in answer.error["message"]
