"""Servers of the recorded quantized checkpoints with drafters in the same formats, whose weights
stay as stored."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, SamplingParams
from tests.server.support.polling import PATIENCE
from tests.server.support.server_process import Served
from tests.support.draft_heads import to_dflash2, to_dspark
from tests.support.full_marks import nightly_where
from tests.support.stored_weights import is_quantizable, store
from tests.support.tested_formats import FORMATS, RECORDED
from tests.support.tiny_checkpoints import make_draft, make_tokenizer

DIRECTORY = Path(__file__).parents[1] / "recorded"
SHORT = (
    "autoawq-gemm",
    "autoround-auto-round-asymmetric",
    "compressed-tensors-mixed",
    "llmcompressor-nvfp4a16",
    "modelopt-fp8",
)
"""One checkpoint of each library, which `make test-all` serves. `tests/reference` computes with all
of them, in `make test`."""
PROMPT = [5, 6, 5, 6, 5, 6]
WRITTEN = {name: row.written for row in FORMATS.values() for name in row.recorded}
OTHERS = {"compressed-tensors-mixed": "NVFP4", "compressed-tensors-int8-packed": "int8"}
"""Formats of drafters of checkpoints whose own is not among those that tests write."""
HEADS: tuple[Callable[[Path, Path], Path], ...] = (
    to_dflash2,
    lambda source, path: source.rename(path),
    partial(to_dspark, markov_rank=32),
)
"""Of DFlash2, DFlash and DSpark, in turns."""


def make_quantized_draft(path: Path, name: str) -> Path:
    """Write a random drafter for a recorded checkpoint."""
    source = make_draft(
        path / "source",
        layer_ids=(0,),
        target_layers=1,
        intermediate=64,
        hidden=64,
        vocab=64,
    )
    draft = HEADS[RECORDED.index(name) % len(HEADS)](source, path / "draft")
    format = next(iter(WRITTEN[name]), None) or OTHERS[name]
    store(draft, path / "dense", format, partial(is_quantizable, format=format))
    return draft


def ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


@pytest.mark.full
@nightly_where(lambda name: name not in SHORT)
@pytest.mark.parametrize("name", RECORDED)
def test_served_pair_answers_as_its_target_alone(name: str, tmp_path: Path):
    target = shutil.copytree(DIRECTORY / name, tmp_path / "target")
    make_tokenizer(target)
    options = {"dtype": "float32", "kv_cache_memory": "8MiB"}
    llm = LLM(target, method="none", device="cpu", **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    server = Served(
        str(target),
        f"--draft={make_quantized_draft(tmp_path, name)}",
        "--no-adaptive",
        "--weight-dtype=stored",
        "--dtype=float32",
        "--kv-cache-memory=8MiB",
    )
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = ask(server.url, body)
    assert answer["choices"][0]["text"] == output.outputs[0].text
    assert answer["usage"]["completion_tokens"] == 12
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    assert server.stop() == 0
