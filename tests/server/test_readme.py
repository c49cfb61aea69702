"""The README's examples return what the README says, every time."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from polling import PATIENCE
from served import ENVIRONMENT, ROOT, Served

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served()
    yield served
    assert served.stop() == 0


def block(language: str, holds: str) -> str:
    """Return the only code block of that language that contains these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    (text_block,) = [text for text in blocks if holds in text]
    return text_block


def test_curl_example_sorts_words_and_reports_drafting(server: Served):
    words = shlex.split(block("bash", "curl "))
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    body = words[words.index("-d") + 1]
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        response: Any = json.loads(answer.read())
    content = response["choices"][0]["message"]["content"]
    assert content.strip().endswith("Answer: apple, fig, pear")
    assert response["speculation"]["acceptance_length"] > 2


def test_client_example_gets_requested_json(server: Served):
    pytest.importorskip("openai")
    code = block("python", "OpenAI(").replace(URL, server.url)
    for _ in range(3):  # at the model's own temperature
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, "README.md", "exec"), {})
        assert json.loads(output.getvalue()) == {
            "city": "Oslo",
            "day": "Saturday",
            "temperature": 12,
        }


def test_five_lines_of_python_sort_the_words():
    code = block("python", "llm = LLM()").replace("LLM()", 'LLM(device="cpu")')
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "Answer: apple, fig, pear" in run.stdout
    assert "acceptance_length=" in run.stdout
