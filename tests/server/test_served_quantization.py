"""Servers of the recorded quantized checkpoints, whose weights stay as stored."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, SamplingParams
from tests.server.support.polling import PATIENCE
from tests.server.support.server_process import Served
from tests.support.full_marks import full_where
from tests.support.tested_formats import RECORDED
from tests.support.tiny_checkpoints import make_tokenizer

DIRECTORY = Path(__file__).parents[1] / "recorded"
SHORT = ("compressed-tensors-mixed",)
"""Checkpoints that `make test` serves."""
PROMPT = [5, 6, 5, 6, 5, 6]


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


@full_where(lambda name: name not in SHORT)
@pytest.mark.parametrize("name", RECORDED)
def test_served_checkpoint_answers_as_the_dequantized_one(name: str, tmp_path: Path):
    target = shutil.copytree(DIRECTORY / name, tmp_path / "target")
    make_tokenizer(target)
    options = {"dtype": "float32", "kv_cache_memory": "8MiB"}
    llm = LLM(target, method="none", device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    server = Served(
        str(target),
        "--method=ngram",
        "--weight-dtype=stored",
        "--dtype=float32",
        "--kv-cache-memory=8MiB",
    )
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = ask(server.url, body)
    assert answer["choices"][0]["text"] == output.outputs[0].text
    assert answer["usage"]["completion_tokens"] == 12
    assert server.stop() == 0
