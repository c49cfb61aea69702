"""Each head drafts the same in every dialect of its config, and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.hub.download import find_checkpoint
from strobe.models.architectures import load_draft_config
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.head_dialects import GGUF, HEADS, PAIRS, write_dialect
from tests.support.recorded_drafter import WatchedHead

PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
Drafts = tuple[list[list[int]], list[list[int]]]


def drafts_of(target: Any, draft: Path) -> Drafts:
    """Return the answers, and the drafts of each block."""
    settings = EngineConfig(str(target.path), draft=str(draft), max_model_len=64, page_size=4)
    engine = make_engine(settings, lambda parts, _: WatchedHead(parts), names=["dflash"])
    head: Any = engine.proposers["dflash"]
    answers = run(engine, PROMPTS, PARAMS)
    return answers, [block.tokens for block in head.true_drafts()]


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    engine = make_engine(EngineConfig(str(target.path), max_model_len=64))
    return run(engine, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a drafter with a head, once."""
    return cache(lambda head: HEADS[head][0](tmp_path_factory.mktemp("head")))


@pytest.fixture(scope="module")
def expected(target: Any, source: Callable[[str], Path]) -> Callable[[str], Drafts]:
    """Return what runs that drafter, once."""
    return cache(lambda head: drafts_of(target, source(head)))


@pytest.mark.parametrize(("head", "dialect"), PAIRS)
def test_head_drafts_alike_in_every_dialect(
    head: str,
    dialect: str,
    target: Any,
    plain: list[list[int]],
    source: Callable[[str], Path],
    expected: Callable[[str], Drafts],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_dialect(source(head), tmp_path / "drafter", dialect)
    config = load_draft_config(Path(find_checkpoint(str(path), None)))
    assert config.method == head.split(",")[0]
    assert dialect == GGUF or config.format == dialect
    answers, drafts = drafts_of(target, path)
    assert answers == plain
    assert (answers, drafts) == expected(head)
    assert len(drafts) > 4
