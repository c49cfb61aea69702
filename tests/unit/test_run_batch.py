"""`strobe run-batch`: OpenAI's batch files, answered, resumed and rejected."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from strobe.server.batches import batch_file
from strobe.server.batches.lines import AnswerFile, BatchLine, read_requests
from strobe.server.batches.tally import BatchTally
from strobe.server.server_settings import LogSettings

ROOT = Path(__file__).parents[2]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SORT = {
    "messages": [{"role": "user", "content": "Sort these words: pear, apple, fig"}],
    "temperature": 0,
}
LINES: list[dict[str, Any]] = [
    {"custom_id": "a", "method": "POST", "url": CHAT, "body": SORT},
    {"custom_id": "b", "url": TEXT, "body": {"prompt": "Hi", "max_tokens": 3, "seed": 1}},
    {"custom_id": "c", "url": "/v1/responses", "body": {"input": "Hi", "max_output_tokens": 16}},
    {"custom_id": "bad", "url": TEXT, "body": {"prompt": "Hi", "temperature": -1}},
]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return requests, tmp_path / "answers.jsonl"


def arguments(files: tuple[Path, Path]) -> list[str]:
    options = ["-i", str(files[0]), "-o", str(files[1]), "--device=cpu", "--no-adaptive"]
    return ["run-batch", *options, "--log-level=warning"]


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_second_run_resumes_after_answered_lines(
    files: tuple[Path, Path],
    main: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
):
    run = subprocess.run(
        [sys.executable, "-m", "strobe", *arguments(files)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (1, "")
    err = run.stderr
    assert f"3 requests answered, 1 failed: {files[1]}\n1 failed: 1 × temperature is -1" in err
    first_run = answers(files[1])
    assert first_run.keys() == {"a", "b", "c", "bad"}
    first = first_run["a"]["response"]
    assert first["status_code"] == 200
    assert first["request_id"] == first["body"]["id"]
    assert first["body"]["choices"][0]["message"]["content"].endswith("Answer: apple, fig, pear")
    assert first_run["b"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert first_run["c"]["response"]["body"]["object"] == "response"
    assert first_run["bad"]["response"]["status_code"] == 400
    assert first_run["bad"]["error"]["param"] == "temperature"
    assert first_run["a"]["error"] is None
    lines = files[1].read_text().splitlines()
    (answer_b,) = (line for line in lines if '"custom_id": "b"' in line)
    files[1].write_text(answer_b + "\n" + lines[0][:40])  # a run that was killed
    monkeypatch.setattr(LogSettings, "configure", lambda self: None)  # else for all later tests
    _, _, err = main(*arguments(files))
    assert f"{files[1]} has 1 answer already; 3 are left." in err
    second_run = answers(files[1])
    assert second_run.keys() == first_run.keys()
    assert second_run["b"] == first_run["b"]
    assert second_run["a"]["response"]["body"]["choices"] == first["body"]["choices"]


def test_two_engines_answer_and_take_over(
    files: tuple[Path, Path],
    main: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
):
    """A line whose engine ended is asked once more."""
    call, asked = batch_file.call, list[str]()

    async def first_fails(app: Any, line: Any) -> tuple[int, Any]:
        asked.append(line.custom_id)
        return (503, {}) if asked.count(line.custom_id) == 1 else await call(app, line)

    monkeypatch.setattr(batch_file, "call", first_fails)
    monkeypatch.setattr(LogSettings, "configure", lambda self: None)
    status, _, err = main(*arguments(files), "--data-parallel-size=2", "--kv-cache-memory=64MiB")
    assert status == 1
    assert "3 requests answered, 1 failed" in err
    found = answers(files[1])
    assert [found[name]["response"]["status_code"] for name in ("a", "b", "c", "bad")] == [
        *[200] * 3, 400,
    ]  # fmt: skip
    assert sorted(asked) == sorted(2 * list(found))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "Line 2 of .* is not JSON"),
        ("[]", "must be an object with custom_id, url and body"),
        ({"custom_id": "x", "url": TEXT}, "must be an object with custom_id, url and body"),
        ({"custom_id": "", "url": TEXT, "body": {}}, "must be an object with custom_id"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "asks for POST /v1/embeddings"),
        ({"custom_id": "x", "method": "GET", "url": TEXT, "body": {}}, "asks for GET"),
        ({"custom_id": "x", "url": TEXT, "body": {"stream": True}}, "asks for a stream"),
        (LINES[0], "has the custom_id 'a' of an earlier line"),
    ],
)
def test_invalid_line_is_rejected_before_loading(
    main: Callable[..., Any], files: tuple[Path, Path], line: Any, sentence: str
):
    text = line if isinstance(line, str) else json.dumps(line)
    files[0].write_text(json.dumps(LINES[0]) + "\n" + text + "\n")
    status, _, err = main("run-batch", f"-i={files[0]}", f"-o={files[1]}", "--device=cpu")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(sentence, err)
    assert not files[1].exists()


def test_every_broken_line_is_named(main: Callable[..., Any], files: tuple[Path, Path]):
    broken = ["{", json.dumps(LINES[0]), "[]", json.dumps(LINES[0])]
    files[0].write_text("\n".join([*broken, *["{}"] * 30]))
    status, _, err = main("run-batch", f"-i={files[0]}", f"-o={files[1]}", "--device=cpu")
    assert status == 2
    named = re.findall(r"Line (\d+) of ", err)
    assert named == [str(number) for number in (1, *range(3, 22))]
    assert err.endswith("13 more lines are no requests either.\n")
    assert not files[1].exists()


def test_ctrl_c_says_how_far_the_run_is(
    main: Callable[..., Any], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    async def interrupted(*, tally: BatchTally, **arguments: Any) -> None:
        tally.add(200, {"usage": {"completion_tokens": 3}})
        tally.add(404, {"error": {"message": "The model 'm' is not served here."}})
        raise KeyboardInterrupt

    monkeypatch.setattr(batch_file, "_run", interrupted)
    monkeypatch.setattr(LogSettings, "configure", lambda self: None)
    status, _, err = main(*arguments(files))
    assert status == 130
    assert err.splitlines()[-3:] == [
        "Stopped after 2 of 4 requests; the same command goes on from there.",
        f"1 request answered, 1 failed: {files[1]}",
        "1 failed: 1 × The model 'm' is not served here.",
    ]


def test_failures_are_counted_by_reason():
    tally = BatchTally([])
    for number in range(13):
        tally.add(404, {"error": {"message": "The model 'm' is not served here."}})
        tally.add(400, {"error": {"message": f"The prompt has {number + 9} tokens."}})
    for letter in "abcdef":
        tally.add(400, {"error": {"message": f"{letter} is wrong."}})
    tally.add(200, {"usage": {"output_tokens": 3}})
    assert (tally.answered, tally.failed, tally.ended) == (1, 32, 33)
    assert tally.failures() == [
        "13 × The model 'm' is not served here.",
        "13 × The prompt has 9 tokens.",
        "1 × a is wrong.",
        "1 × b is wrong.",
        "1 × c is wrong.",
        "3 × other reasons",
    ]


def test_bar_moves_within_an_answer():
    bodies = [{"max_tokens": 300}, {"max_completion_tokens": 100}, {}]
    tally = BatchTally([BatchLine(str(index), TEXT, body) for index, body in enumerate(bodies)])
    tally.running = 2
    assert [tally.unfinished(tokens, context=500) for tokens in (0, 30, 150)] == [0, 0.1, 0.5]
    assert tally.unfinished(9999, context=500) == 0.95 * 2
    tally.running = 1
    tally.add(200, {"usage": {"completion_tokens": 40}})
    assert tally.unfinished(50, context=500) == 10 / 40  # answers are as long as the first one


def test_missing_files_are_one_line_errors(main: Callable[..., Any], tmp_path: Path):
    assert "No input file was given; name it with --input-file." in main("run-batch")[2]
    status, _, err = main("run-batch", "-i", f"{tmp_path}/none", "-o", f"{tmp_path}/out")
    assert status == 2
    assert "none cannot be read" in err


# the output file


class NoEngine:
    """An engine that must not be started."""

    def __init__(self, *arguments: Any):
        raise AssertionError("an engine was started")


@pytest.fixture
def run_rejected(
    main: Callable[..., Any], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], str]:
    """Return a function that runs the command, checks that it fails with one sentence before the
    engine starts, and returns the sentence."""
    monkeypatch.setattr("strobe.server.batches.batch_file.make_client", NoEngine)

    def run() -> str:
        status, _, err = main("run-batch", f"-i={files[0]}", f"-o={files[1]}", "--device=cpu")
        assert (status, err.count("\n")) == (2, 1)
        return err

    return run


ANSWER = {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200}, "error": None}


@pytest.mark.parametrize("kind", ["same path", "symlink", "hard link"])
def test_output_that_is_the_input_is_rejected(
    files: tuple[Path, Path], run_rejected: Callable[[], str], kind: str
):
    requests, out = files
    before = requests.read_bytes()
    if kind == "symlink":
        out.symlink_to(requests)
    elif kind == "hard link":
        out.hardlink_to(requests)
    else:
        requests.rename(out)
        requests.symlink_to(out)
    assert f"{out} is the input file {requests} itself" in run_rejected()
    assert requests.read_bytes() == out.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "Buy milk.\n",
        "Buy milk.",
        "{",
        json.dumps(ANSWER) + "\nBuy milk.\n",
        json.dumps(ANSWER) + "\nBuy milk.",
        '{"id": "batch_req_\n' + json.dumps(ANSWER) + "\n",
        json.dumps(LINES[0]) + "\n",
        json.dumps({"custom_id": "a", "response": 1}) + "\n",
        "[" * 200_000,
    ],
)
def test_output_with_other_lines_is_rejected_unchanged(
    files: tuple[Path, Path], run_rejected: Callable[[], str], text: str
):
    files[1].write_text(text)
    assert f"{files[1]} holds something other than answers (line " in run_rejected()
    assert files[1].read_text() == text


def test_binary_output_is_rejected_unchanged(
    files: tuple[Path, Path], run_rejected: Callable[[], str]
):
    files[1].write_bytes(b"\xff\x00\xfe")
    assert "holds something other than answers (line 1)" in run_rejected()
    assert files[1].read_bytes() == b"\xff\x00\xfe"


def test_output_that_cannot_be_opened_is_a_one_line_error(
    files: tuple[Path, Path], run_rejected: Callable[[], str]
):
    files[1].mkdir()
    assert "is not a regular file" in run_rejected()
    files[1].rmdir()
    files[1].symlink_to(files[1].parent / "none" / "answers.jsonl")
    assert "cannot be opened (No such file or directory)" in run_rejected()


def test_output_of_a_running_batch_is_rejected(
    files: tuple[Path, Path], run_rejected: Callable[[], str]
):
    with closing(AnswerFile(files[1], files[0])):
        assert "is being written by another run" in run_rejected()


def test_input_without_requests_is_a_one_line_error(
    files: tuple[Path, Path], run_rejected: Callable[[], str]
):
    files[0].write_text("\n \n")
    assert f"{files[0]} holds no requests" in run_rejected()


def test_start_keeps_answers_and_drops_a_truncated_line(files: tuple[Path, Path]):
    failed = {**ANSWER, "custom_id": "b", "response": {"status_code": 500}}
    null = {**ANSWER, "custom_id": "c", "response": None, "error": {"code": "batch_expired"}}
    whole = "".join(json.dumps(line) + "\n" for line in (ANSWER, failed, null))
    for tail in ("", '{"id', json.dumps(ANSWER)[:-1], '{"id": "batch_req_2", "custom_id": "\u2028'):
        files[1].write_text(whole + tail)
        with closing(AnswerFile(files[1], files[0])) as out:
            assert out.answered == {"a"}
        assert files[1].read_text() == whole
    files[1].write_text(whole[:-1])  # only the end of the line is missing
    with closing(AnswerFile(files[1], files[0])):
        assert files[1].read_text() == whole


def test_start_never_empties_the_file(
    main: Callable[..., Any], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    """A kill between opening the file and the first answer loses nothing."""
    text = json.dumps(ANSWER) + "\n"
    files[1].write_text(text)
    inode = files[1].stat().st_ino

    def stop(path: str | None) -> Any:
        raise ValueError(f"The file holds {len(files[1].read_text())} characters.")

    monkeypatch.setattr("strobe.server.batches.batch_file.read_template", stop)
    status, _, err = main("run-batch", f"-i={files[0]}", f"-o={files[1]}", "--device=cpu")
    assert status == 2
    assert f"The file holds {len(text)} characters." in err
    assert "has 1 answer already; 3 are left." in err
    assert files[1].stat().st_ino == inode


def test_only_newlines_end_lines(files: tuple[Path, Path]):
    odd = "a\u2028b\x85c\x0bd\x1ce\ud800"
    line = {**ANSWER, "response": {"status_code": 200, "body": odd}}
    with closing(AnswerFile(files[1], files[0])) as out:
        asyncio.run(out.add(line))
    assert len(files[1].read_text().splitlines()) == 1
    assert json.loads(files[1].read_text()) == line
    body = {"prompt": odd[:-1]}
    files[0].write_text(
        "\ufeff" + json.dumps({"custom_id": "a", "url": TEXT, "body": body}, ensure_ascii=False)
        + "\r\n"
    )  # fmt: skip
    (request,) = read_requests(files[0])
    assert request.body == body


def test_full_disk_leaves_complete_lines(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    write = os.write

    def write_part(fd: int, data: bytes) -> int:
        if len(data) < 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:40])

    with closing(AnswerFile(files[1], files[0])) as out:
        asyncio.run(out.add(ANSWER))
        monkeypatch.setattr(os, "write", write_part)
        with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
            asyncio.run(out.add(ANSWER))
    assert files[1].read_text() == json.dumps(ANSWER) + "\n"
