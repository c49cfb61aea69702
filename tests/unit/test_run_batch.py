"""`strobe run-batch`: OpenAI's batch files, answered, gone on with and refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return asked, tmp_path / "answers.jsonl"


def run(files: tuple[Path, Path]) -> tuple[int, str]:
    arguments = ["run-batch", "-i", str(files[0]), "-o", str(files[1]), "--device=cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "strobe", *arguments, "--log-level=warning"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == ""
    return done.returncode, done.stderr


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}


def test_every_line_is_answered_and_a_second_run_goes_on_where_the_first_was(
    files: tuple[Path, Path],
):
    status, said = run(files)
    assert status == 1
    assert f"3 requests answered, 1 failed: {files[1]}" in said
    told = answers(files[1])
    assert told.keys() == {"a", "b", "c", "bad"}
    first = told["a"]["response"]
    assert first["status_code"] == 200
    assert first["request_id"] == first["body"]["id"]
    assert first["body"]["choices"][0]["message"]["content"].endswith("Answer: apple, fig, pear")
    assert told["b"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert told["c"]["response"]["body"]["object"] == "response"
    assert told["bad"]["response"]["status_code"] == 400
    assert told["bad"]["error"]["param"] == "temperature"
    assert told["a"]["error"] is None
    lines = files[1].read_text().splitlines()
    kept = [line for line in lines if '"custom_id": "b"' in line]
    files[1].write_text(kept[0] + "\n" + lines[0][:40])  # a run that was killed
    status, said = run(files)
    assert f"{files[1]} has 1 answers already; 3 are left." in said
    again = answers(files[1])
    assert again.keys() == told.keys()
    assert again["b"] == told["b"]
    assert again["a"]["response"]["body"]["choices"] == first["body"]["choices"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "Line 2 of .* is no JSON"),
        ("[]", "must be an object with custom_id, url and body"),
        ({"custom_id": "x", "url": TEXT}, "must be an object with custom_id, url and body"),
        ({"custom_id": "", "url": TEXT, "body": {}}, "must be an object with custom_id"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "asks for POST /v1/embeddings"),
        ({"custom_id": "x", "method": "GET", "url": TEXT, "body": {}}, "asks for GET"),
        ({"custom_id": "x", "url": TEXT, "body": {"stream": True}}, "asks for a stream"),
        (LINES[0], "has the custom_id 'a' of an earlier line"),
    ],
)
def test_a_line_that_cannot_be_answered_is_a_sentence_before_anything_is_loaded(
    main: Callable[..., Any], files: tuple[Path, Path], line: Any, sentence: str
):
    text = line if isinstance(line, str) else json.dumps(line)
    files[0].write_text(json.dumps(LINES[0]) + "\n" + text + "\n")
    status, _, err = main("run-batch", f"-i={files[0]}", f"-o={files[1]}", "--device=cpu")
    assert (status, err.count("\n")) == (2, 1)
    assert re.search(sentence, err)
    assert not files[1].exists()


def test_files_that_are_not_there_are_sentences(main: Callable[..., Any], tmp_path: Path):
    assert "No input file was given; name it with --input-file." in main("run-batch")[2]
    status, _, err = main("run-batch", "-i", f"{tmp_path}/none", "-o", f"{tmp_path}/out")
    assert status == 2
    assert "none cannot be read" in err
