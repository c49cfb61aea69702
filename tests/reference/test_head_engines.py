"""Whole engines with DFlash2 and DSpark drafters: answers are those of plain decoding, captured
steps and several ranks draft as eager steps of one rank do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from tests.support.bookkeeping_checks import check_engine
from tests.support.draft_heads import HEADS, to_dflash2, to_dspark
from tests.support.engine_runs import put, run, watched
from tests.support.full_marks import full_where, nightly_where
from tests.support.losslessness_matrix import (
    COMBINATIONS,
    SLOW_COMBINATIONS,
    Combination,
    Pair,
    PlainAnswers,
    compare,
    few_cases,
)
from tests.support.rank_threads import ranks
from tests.support.recorded_drafter import WatchedHead
from tests.support.simulated_graphs import captured
from tests.support.tiny_checkpoints import make_draft

DRAFTING = [
    c
    for c in dict.fromkeys([*COMBINATIONS, *SLOW_COMBINATIONS])
    if c.proposer in ("dflash", "per request")
]
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], [5, 6] * 10, [40, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLINGS = [
    GREEDY,
    GREEDY.clone(temperature=1.0, seed=3),
    GREEDY.clone(temperature=0.7, top_p=0.9, seed=5, presence_penalty=0.5),
    GREEDY.clone(temperature=2.0, seed=6),
]


PROPOSERS = dict(zip(HEADS, itertools.cycle(["dflash", "per request"])))
"""The way in which `make test-all` compares each head with plain decoding; "dspark" in both."""
SHORT = ("dspark", "dflash2")
"""Heads that `make test` compares."""


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same drafter with each head."""
    root = tmp_path_factory.mktemp("heads")
    source = make_draft(root / "dflash")
    return {name: write(source, root / name) for name, write in HEADS.items()}


@pytest.fixture(scope="module")
def plain(target: Any) -> PlainAnswers:
    return PlainAnswers(Pair(target.path, Path()))


@full_where(lambda name: name not in SHORT)
@nightly_where(lambda c, name: name != "dspark" and c.proposer != PROPOSERS[name])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("c", few_cases(DRAFTING, 2, more=6))
def test_outputs_equal_plain_decoding(
    c: Combination, name: str, target: Any, drafters: dict[str, Path], plain: PlainAnswers
):
    compare(c, Pair(target.path, drafters[name]), plain(c.workload))


def config(target: Any, drafter: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        target=str(target.path),
        draft=str(drafter),
        device="cpu",
        dtype="float32",
        kv_cache_memory="8MiB",
        max_model_len=96,
        max_num_seqs=4,
        page_size=4,
        **options,
    )


@full_where(lambda name, method: name not in SHORT or (method == "greedy" and name != "dspark"))
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("name", HEADS)
def test_captured_steps_draft_as_eager_ones(
    name: str,
    method: str,
    target: Any,
    drafters: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    """Requests end at different times, so that captured blocks are padded."""
    monkeypatch.setattr("strobe.runner.step_output.download", torch.clone)
    resolved = resolve(config(target, drafters[name], draft_sample_method=method))
    lengths = (24, 9, 17, 4)
    params = [s.clone(max_tokens=n) for s, n in zip(SAMPLINGS, lengths, strict=True)]
    seen: list[Any] = []
    answers: list[Any] = []
    for graphs in (False, True):
        parts = build(resolved)
        double = captured(parts, 4, resolved.limits.num_drafts) if graphs else None
        head = WatchedHead(parts)
        put(parts, {"dflash": head})
        engine = watched(Engine(resolved, components=parts))
        answers.append(run(engine, PROMPTS, params))
        check_engine(engine)
        seen.append({(id_of(d), d.start): d.tokens for d in head.true_drafts()})
        assert double is None or double.replayed > double.captured
    assert answers[0] == answers[1]
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


def id_of(drafted: Any) -> int:
    return drafted.request.tokens[0]


@full_where(lambda name, layers: name not in SHORT or (layers == 1 and name != "dspark"))
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("layers", [1, None], ids=["whole layers", "split layers"])
@pytest.mark.parametrize("name", HEADS)
def test_ranks_draft_as_one_does(
    name: str, layers: int | None, size: int, target: Any, drafters: dict[str, Path]
):
    """The vocabulary of 61 tokens divides by neither number of ranks."""
    settings = config(target, drafters[name], adaptive=False)
    alone = Engine(settings)
    expected = run(alone, PROMPTS, SAMPLINGS)
    split = {"draft_tensor_parallel_size": layers} if layers else {}
    with ranks(settings.with_(**split), size) as engine:
        assert run(engine, PROMPTS, SAMPLINGS) == expected
        accepted = [e.stats.draft_counts.num_accepted for e in (alone, engine)]
    assert accepted[0] == accepted[1]


def test_drafts_share_the_requests_noise(target: Any, tmp_path: Path):
    """At a very high temperature noise alone decides, which drafter and target share. The
    candidates lead its race, so that few are enough."""
    hot = SamplingParams(temperature=100.0, max_tokens=40, ignore_eos=True)
    source = make_draft(tmp_path / "source")
    writers = (
        to_dspark(source, tmp_path / "all", sample_from_anchor=False),
        to_dspark(source, tmp_path / "best", dspark_draft_topk=2, sample_from_anchor=False),
        to_dflash2(source, tmp_path / "selector", candidates=2),
    )
    accepted: list[int] = []
    for path in writers:
        engine = Engine(config(target, path, adaptive=False))
        run(engine, PROMPTS, [hot.clone(seed=seed) for seed in range(4)])
        accepted.append(engine.stats.draft_counts.num_accepted)
    everything, *some = accepted
    assert everything > 100
    assert min(some) > 0.9 * everything
