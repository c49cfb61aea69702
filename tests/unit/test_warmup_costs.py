"""Costs measured before the first request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, SamplingParams
from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Option
from strobe.speculation.costs import StepWork
from strobe.speculation.shadow.block_sums import BlockSums
from strobe.step import ScoredBlock
from strobe.warmup import cost_measurement as measured
from strobe.warmup.cost_measurement import StepKind, measure_costs
from tests.support.bookkeeping_checks import check_engine
from tests.support.losslessness_matrix import make_pair
from tests.support.random_engines import TARGETS
from tests.support.text_pair import Pair
from tests.support.tiny_checkpoints import make_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def policy_of(llm: LLM) -> AdaptiveDraftPolicy:
    policy = llm.engine.scheduler.draft_policy
    assert isinstance(policy, AdaptiveDraftPolicy)
    return policy


def whole(policy: AdaptiveDraftPolicy, count: int) -> Option:
    """All drafts of the widest block, for so many requests."""
    return Option(len(policy.widths) - 1, count, count * policy.widths[-1])


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[StepKind]:
    """Return a list that receives the kinds of steps that are timed."""
    timed: list[StepKind] = []
    true = measured._Timing.run

    def run(self: Any, kind: StepKind, seconds: float) -> Any:
        timed.append(kind)
        return true(self, kind, seconds)

    monkeypatch.setattr(measured._Timing, "run", run)
    monkeypatch.setitem(measured.SECONDS, "cpu", 60.0)  # however busy the machine is
    return timed


def test_costs_are_measured_and_leave_no_trace(pair: Pair, kinds: list[StepKind]):
    llm = LLM(pair.target, pair.draft, max_num_seqs=5)
    engine, policy = llm.engine, policy_of(llm)
    assert policy.costs is not None
    assert engine.stats.steps == 0
    assert not engine.has_work
    assert not policy.chances.counts.any()
    assert policy.forecast.step == 0
    assert {kind.requests for kind in kinds} == {1, 4, 5}
    for count in (1, 4, 5):
        timed = [kind.option for kind in kinds if kind.requests == count]
        assert {option.width for option in timed} == {-1, *range(len(policy.widths))}
        assert whole(policy, count) in timed
    table = policy.costs.as_dict()
    assert {"1", str(5 * (1 + policy.widths[-1]))} < set(table["verify"])
    assert all(ms > 0 for part in ("draft", "verify") for ms in table[part].values())
    assert policy.costs.ms(StepWork(0, 1)) > 0
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8
    check_engine(engine)


def test_cpu_is_timed_with_few_requests(pair: Pair, kinds: list[StepKind]):
    LLM(pair.target, pair.draft, max_num_seqs=64)
    assert {kind.requests for kind in kinds} == {1, 4, 8}


def test_fewest_and_most_requests_are_timed_first(pair: Pair, kinds: list[StepKind]):
    """Where time runs out, the costs between them can be interpolated."""
    LLM(pair.target, pair.draft, max_num_seqs=64)
    assert list(dict.fromkeys(kind.requests for kind in kinds)) == [1, 8, 4]


def test_busy_cpu_times_what_tells_costs_apart(
    pair: Pair, kinds: list[StepKind], monkeypatch: pytest.MonkeyPatch
):
    """Steps of several requests only would leave open whether rows or requests cost."""
    monkeypatch.setitem(measured.SECONDS, "cpu", 1e-9)
    monkeypatch.setattr(measured, "CPU_PATIENCE", 1e12)
    policy = policy_of(LLM(pair.target, pair.draft, max_num_seqs=64))
    assert policy.costs is not None
    assert {kind.requests for kind in kinds} == {1, 8}
    assert [kind.option for kind in kinds if kind.requests == 8] == [Option()]


def test_timing_stops_at_the_deadline(
    pair: Pair, kinds: list[StepKind], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(measured.SECONDS, "cpu", 0.0)
    llm = LLM(pair.target, pair.draft, max_num_seqs=5)
    assert len(kinds) == 1
    assert policy_of(llm).costs is None, "one kind of step tells too little"
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("method", ["ngram", "dflash+ngram"])
def test_drafter_is_timed_for_every_method(pair: Pair, method: str):
    """Prompts repeat, so that prompt lookup would find something."""
    llm = LLM(pair.target, pair.draft, max_num_seqs=2, method=method, overlap=1)
    policy = policy_of(llm)
    timing = measured._Timing(llm.engine, policy, "dflash")
    for work, ms in timing.run(StepKind(2, 1, whole(policy, 2)), 0.0):
        assert work.rows == 2 * (1 + policy.widths[-1])
        assert work.draft_rows == 2 * policy.block_rows[-1]
        assert ms > 0


def test_steps_are_timed_after_long_prompts(pair: Pair):
    """Beside requests that decode, prompts enter slowly."""
    llm = LLM(pair.target, pair.draft, max_num_seqs=4, max_num_batched_tokens=160)
    engine = llm.engine
    engine.limits = engine.scheduler.limits = replace(engine.limits, max_mixed_tokens=16)
    timing = measured._Timing(engine, policy_of(llm), "dflash")
    timed = timing.run(StepKind(4, 150, Option()), 0.0)
    assert {(work.rows, work.requests) for work, _ in timed} == {(4, 4)}
    assert min(work.context for work, _ in timed) >= 4 * 150
    timing.end()
    assert not engine.has_work


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_assumed_prompts_are_not_computed(family: str, tmp_path: Path):
    """Targets with windows have such contexts, too, and those with recurrent layers, whose states
    are kept here."""
    write, changes = TARGETS[family]
    pair = make_pair(tmp_path, write, device="cpu", width=16, **changes)
    make_tokenizer(pair.target)
    engine = Engine(
        EngineConfig(
            str(pair.target), draft=str(pair.draft), device="cpu", max_num_seqs=2, page_size=4,
            max_model_len=400, kv_cache_memory="32MiB",
        )
    )  # fmt: skip
    assert (engine.components.kept_states is not None) == (family == "qwen3_5")
    policy = engine.scheduler.draft_policy
    assert isinstance(policy, AdaptiveDraftPolicy)
    rows: list[int] = []
    engine.on_launch = lambda plan, in_flight: rows.extend(span.num_rows for span in plan.spans)
    kinds = [StepKind(2, 200, Option()), StepKind(2, 200, whole(policy, 2))]
    times = [ms for _, ms in measured.time_kinds(engine, policy, "dflash", kinds)]
    assert all(ms is not None for ms in times)
    assert max(rows) <= max(1 + policy.widths[-1], 4 + 1), "prompts are not prefilled"
    check_engine(engine)
    assert engine.components.pool.available == engine.components.pool.capacity


def test_requests_at_the_context_end_are_replaced(pair: Pair):
    llm = LLM(pair.target, pair.draft, max_num_seqs=2, max_model_len=128)
    policy = policy_of(llm)
    timing = measured._Timing(llm.engine, policy, "dflash")
    for _ in range(20):
        assert len(timing.run(StepKind(2, 1, whole(policy, 2)), 0.0)) >= measured.REPEATS


@pytest.mark.parametrize("options", [{"adaptive": False}, {"method": "none"}, {"draft": None}])
def test_nothing_is_timed_without_adaptive_policy(
    options: dict[str, Any], pair: Pair, kinds: list[StepKind]
):
    settings = {"draft": pair.draft, **options}
    llm = LLM(pair.target, **settings)
    measure_costs(llm.engine)
    adapts = isinstance(llm.engine.scheduler.draft_policy, AdaptiveDraftPolicy)
    assert bool(kinds) == adapts == (options == {"method": "none"})


def test_short_context_leaves_costs_unmeasured(pair: Pair):
    llm = LLM(pair.target, pair.draft, max_model_len=24)
    assert policy_of(llm).costs is None
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8


def test_shadow_mode_times_plain_steps_and_each_drafter(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Prompt lookup, too, whose chains would else not come about."""
    works: dict[str, list[StepWork]] = {}
    fit = measured.time_steps

    def time_steps(engine: Engine, blocks: Any, method: str) -> list[tuple[StepWork, float]]:
        steps = fit(engine, blocks, method)
        works[method] = [work for work, _ in steps]
        assert engine.shadow is not None
        assert engine.shadow.drafting.timed is None
        assert engine.shadow.ledger.fault is None
        return steps

    monkeypatch.setattr(measured, "time_steps", time_steps)
    monkeypatch.setitem(measured.SECONDS, "cpu", 60.0)  # however busy the machine is
    monkeypatch.setattr(measured, "SUSTAINED", 0.0)
    options = {"target": pair.target, "draft": pair.draft, "shadow": True, "max_num_seqs": 4}
    engine = Engine(EngineConfig().with_(device="cpu", **options))
    assert engine.shadow is not None
    measure_costs(engine)
    costs = engine.shadow.costs
    assert costs is not None
    draft, lookup = engine.shadow.drafters
    for timed in works.values():
        assert {work.rows for work in timed if not work.draft_rows} >= {1, 4}
    assert max(work.rows for work in works["ngram"]) == 4 * (1 + lookup.num_drafts)
    assert not any(work.draft_rows for work in works["ngram"])
    assert max(work.rows for work in works[draft.name]) == 4 * (1 + draft.num_drafts)
    block_rows = costs.drafters[draft.name].block_rows
    assert {work.draft_rows for work in works[draft.name]} == {0, block_rows, 4 * block_rows}
    assert costs.drafters["ngram"].block_rows == 0
    sums = BlockSums()
    sums.add([ScoredBlock(draft.name, start=9, num_drafts=draft.num_drafts, num_accepted=3)])
    for concurrency in (1, 4):
        speed_up = costs.speed_up(draft.name, sums, concurrency)
        assert speed_up is not None
        assert speed_up.estimate.value > 0
    assert engine.stats.steps == 0
    check_engine(engine)


def test_shadow_mode_without_costs_knows_no_speed_ups(pair: Pair):
    """One kind of step, after which the fixture stops, tells too little."""
    options = {"target": pair.target, "draft": pair.draft, "shadow": True}
    engine = Engine(EngineConfig().with_(device="cpu", **options))
    measure_costs(engine)
    assert engine.shadow is not None
    assert engine.shadow.costs is not None
    assert not engine.shadow.costs.drafters
