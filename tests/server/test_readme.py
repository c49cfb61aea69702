"""The examples of the README and of the first steps return what these pages say, every time."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strobe.hub.packaged import packaged_file
from tests.server.support.polling import PATIENCE
from tests.server.support.server_process import Served

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/first-steps.md")
TEXT = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
URL = "http://127.0.0.1:8000"


def printed_by(code: str) -> str:
    """Run an example and return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    return output.getvalue()


@pytest.fixture(scope="module", params=["demo", pytest.param("smollm2", marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Served, bool]]:
    """A server whose model is named smollm2, and whether it is; else it serves the demo models."""
    is_real = request.param == "smollm2"
    if is_real:
        try:
            packaged_file("smollm2")
        except ValueError as error:
            pytest.skip(str(error))
    options = ["smollm2"] if is_real else ["--served-model-name=smollm2", "--no-adaptive"]
    served = Served(*options)
    yield served, is_real
    assert served.stop() == 0


def block(language: str, holds: str) -> str:
    """Return the only code block of that language that contains these words."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    (text_block,) = [text for text in blocks if holds in text]
    return text_block


def test_curl_example_returns_the_answer_shown(server: tuple[Served, bool]):
    served, is_real = server
    words = shlex.split(block("bash", "curl "))
    assert words[:2] == ["curl", f"{URL}/v1/chat/completions"]
    body = words[words.index("-d") + 1]
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        response: Any = json.loads(answer.read())
    shown: Any = json.loads(block("json", "speculation"))
    message = response["choices"][0]["message"]
    assert set(shown["choices"][0]["message"]) <= set(message)
    assert set(shown["speculation"]) <= set(response["speculation"])
    speculation = response["speculation"]
    if speculation["drafted"]:  # none if drafting paid at no step, as on a busy machine
        assert speculation["acceptance_length"] >= 1
    else:
        assert speculation["rest_reason"]
    if is_real:
        assert message["content"] == shown["choices"][0]["message"]["content"]


def test_client_example_streams_the_answer_shown(server: tuple[Served, bool]):
    pytest.importorskip("openai")
    served, is_real = server
    code = block("python", "OpenAI(").replace(URL, served.url)
    text = printed_by(code)
    assert text
    assert f'This one prints "{text}"' in TEXT or not is_real


def test_five_lines_of_python_sort_the_words():
    code = block("python", "llm = LLM()").replace("LLM()", "LLM(adaptive=False)")
    output = printed_by(code)
    assert "Answer: apple, fig, pear" in output
    assert "acceptance_length=" in output
