"""DFlash2 and DSpark drafters for SmolLM2 draft as vLLM 0.32 does, step by step; see
`head_oracles.py`. Skipped where SmolLM2 cannot be fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, SamplingParams
from strobe.config import EngineConfig
from strobe.hub.locate import locate_models
from strobe.hub.packaged import packaged_file
from strobe.models.checkpoint import Checkpoint
from tests.support import head_oracles

SHORT = ("d2k4",)
"""Run by `make test`, with one prompt; `make test-all` runs all."""
CASES = [(name, 1) for name in SHORT] + [
    pytest.param(name, None, marks=pytest.mark.full) for name in head_oracles.NAMES
]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a checkpoint by its name."""
    try:
        packaged_file("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    heads = head_oracles.Heads(head_oracles.shipped())
    target = locate_models(EngineConfig("smollm2")).target
    embedding = Checkpoint(Path(target)).read("embed_tokens.weight")

    def write_named(name: str) -> Path:
        return head_oracles.write(name, heads, embedding, tmp_path_factory.mktemp(name))

    return write_named


@pytest.mark.parametrize(("name", "prompts"), CASES)
def test_every_draft_and_step_equals_vllm(
    write: Callable[[str], Path], name: str, prompts: int | None
):
    recorded = head_oracles.recorded(name)[:prompts]
    num_drafts = len(recorded[0]["drafts"][0]) - 2
    llm = LLM(
        "smollm2",
        draft=str(write(name)),
        dtype="float32",
        weight_dtype="float32",
        adaptive=False,
        max_model_len=512,
        max_num_seqs=1,
        num_drafts=num_drafts,
    )
    for row in recorded:
        check(llm, row)


def check(llm: LLM, row: dict[str, Any]) -> None:
    """Compare one prompt's answer, steps and drafts. A step after the first shows the drafts that
    the newest token led to."""
    params = SamplingParams(
        temperature=0,
        max_tokens=len(row["answer"]),
        ignore_eos=True,
        speculation={"return_drafts": True},  # type: ignore[arg-type]
    )
    expected = {position: (anchor, drafts) for anchor, position, *drafts in row["drafts"]}
    tokens = list(row["prompt"])
    steps = list[int]()
    compared = 0
    for delta in llm.stream(row["prompt"], params):
        if delta.drafts:
            anchor, drafts = expected[len(tokens) - 1]
            assert anchor == tokens[-1]
            # Near the end of the answer fewer drafts are verified.
            assert list(delta.drafts) == drafts[: len(delta.drafts)]
            compared += 1
        tokens += delta.token_ids
        steps.append(len(delta.token_ids))
    assert tokens[len(row["prompt"]) :] == row["answer"]
    assert steps == row["steps"]
    assert compared >= len(steps) - 2
