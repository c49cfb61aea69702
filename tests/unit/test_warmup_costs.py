"""Costs measured before the first request, kept for the next start, and measured anew where they
do not fit."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textpair import Pair

from strobe import LLM, SamplingParams
from strobe.spec.adaptive import AdaptiveBudget, Choice
from strobe.spec.costs import Work
from strobe.warmup import costs as measured
from strobe.warmup.costs import adapt

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for bound in ("FITS", "FAR"):
        monkeypatch.setattr(measured, bound, 1e9)  # however busy the machine is
    return tmp_path / "strobe" / "costs"


def budget_of(llm: LLM) -> AdaptiveBudget:
    budget = llm.engine.scheduler.budget
    assert isinstance(budget, AdaptiveBudget)
    return budget


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """What is timed."""
    found: list[tuple[int, Any]] = []
    true = measured._Survey.time

    def time(self: Any, count: int, choice: Any) -> tuple[float, float, int]:
        found.append((count, choice))
        return true(self, count, choice)

    monkeypatch.setattr(measured._Survey, "time", time)
    return found


def test_an_engine_knows_its_costs_and_is_as_if_nothing_had_run(
    pair: Pair, cache: Path, times: list[tuple[int, Any]]
):
    llm = LLM(pair.target, pair.draft, max_num_seqs=5)
    engine, budget = llm.engine, budget_of(llm)
    assert budget.costs is not None
    assert engine.stats.steps == 0
    assert not engine.has_work
    assert {count for count, _ in times} == {1, 4, 5}
    assert {choice.most for _, choice in times} == {0, *budget.widths}
    (path,) = cache.iterdir()
    table = json.loads(path.read_text())
    assert {1, 4, 5} <= set(map(int, table["verify"]))
    assert {n * rows for n in (1, 4, 5) for rows in budget.slots} == set(map(int, table["draft"]))
    assert all(ms > 0 for part in ("draft", "verify") for ms in table[part].values())
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8
    engine.check()


@pytest.mark.parametrize("method", ["ngram", "dflash+ngram"])
def test_the_drafter_is_surveyed_whatever_the_engines_method_is(pair: Pair, method: str):
    """Prompts of the survey repeat, so that prompt lookup would find something."""
    llm = LLM(pair.target, pair.draft, max_num_seqs=2, method=method, overlap=1)
    budget = budget_of(llm)
    whole = Choice(len(budget.widths) - 1, budget.widths[-1])
    with measured._Survey(llm.engine, budget) as survey:
        for _ in range(3):
            assert survey.time(2, whole)[2] == 2 * (1 + whole.most)


def test_steps_are_timed_once_long_prompts_are_through_beside_requests_that_decode(pair: Pair):
    llm = LLM(pair.target, pair.draft, max_num_seqs=4, max_num_batched_tokens=160)
    engine, budget = llm.engine, budget_of(llm)
    engine.limits = engine.scheduler.limits = replace(engine.limits, max_mixed_tokens=16)
    with measured._Survey(engine, budget) as survey:
        survey.requests = [engine.add([i] * 150, measured._ENDLESS) for i in range(4)]
        assert survey.time(4, Choice())[2] == 4


def test_long_contexts_are_long_when_they_are_timed(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    llm = LLM(pair.target, pair.draft, max_num_seqs=2)
    budget, sizes = budget_of(llm), list[int]()
    true = measured._Survey.time
    monkeypatch.setattr(measured, "LONG", 1024)  # twice what the pair reads

    def time(self: Any, count: int, choice: Any) -> tuple[float, float, int]:
        found = true(self, count, choice)
        sizes.extend([len(request.tokens) for request in self.requests])
        return found

    monkeypatch.setattr(measured._Survey, "time", time)
    with measured._Survey(llm.engine, budget) as survey:
        survey.context(Choice(len(budget.widths) - 1, budget.widths[-1]))
    assert len(sizes) == 4
    assert max(sizes[:2]) < 100 < 350 < min(sizes[2:])


def test_the_next_start_takes_the_costs_of_the_one_before(
    pair: Pair, cache: Path, times: list[tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measured, "FITS", 1e9)  # however unevenly this machine runs
    monkeypatch.setattr(measured, "FAR", 1e9)
    first = budget_of(LLM(pair.target, pair.draft, max_num_seqs=2))
    count = len(times)
    again = budget_of(LLM(pair.target, pair.draft, max_num_seqs=2))
    assert len(times) == count + 2, "two kinds of steps are looked at"
    assert first.costs is not None
    assert again.costs is not None
    assert again.costs.as_dict() == first.costs.as_dict()
    LLM(pair.target, pair.draft, max_num_seqs=3)
    assert len(list(cache.iterdir())) == 2, "other settings have a table of their own"
    monkeypatch.setattr(measured, "FITS", 0.0)
    count = len(times)
    LLM(pair.target, pair.draft, max_num_seqs=2)
    assert len(times) > count + 3, "what does not fit is measured anew"


@pytest.mark.parametrize(("slower", "kept"), [((3.0, 3.0), True), ((1.0, 3.0), False),
    ((30.0, 30.0), False)])  # fmt: skip
def test_a_machine_on_which_all_steps_take_longer_keeps_its_table_and_a_pace(
    slower: tuple[float, float], kept: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """slower: how much plain steps and those of a block are."""
    llm = LLM(pair.target, pair.draft, max_num_seqs=2)
    costs, budget = budget_of(llm).costs, budget_of(llm)
    assert costs is not None
    monkeypatch.setattr(measured, "FITS", 0.3)
    monkeypatch.setattr(measured, "FAR", 4.0)

    def time(self: Any, count: int, choice: Any) -> tuple[float, float, int]:
        draft = budget.slots[-1] if choice.most else 0
        ms = float(costs.ms(Work(draft, 1 + choice.most))) / costs.pace
        return 0.0, ms * slower[choice.most > 0], 1 + choice.most

    monkeypatch.setattr(measured._Survey, "time", time)
    costs.pace = 1.0
    assert measured._fits(llm.engine, budget, costs) is kept
    if kept:
        assert costs.pace == pytest.approx(3.0)


RATES = '"request": 0, "context": 0, "context_row": 0, "device": "HERE"'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"draft": {}}', '{"draft": 1, "verify": 2}',
    f'{{"draft": {{"4": "x", "8": 1}}, "verify": {{"1": 1, "2": 2}}, {RATES}}}',
    f'{{"draft": {{"4": 1}}, "verify": {{"1": 1, "2": 2}}, {RATES}}}',
    f'{{"draft": {{"4": 0, "8": 0}}, "verify": {{"1": 0, "2": 0}}, {RATES}}}',
    f'{{"draft": {{"4": 1, "8": 1}}, "verify": {{"1": 1, "2": NaN}}, {RATES}}}'])  # fmt: skip
def test_a_damaged_table_is_measured_anew_with_a_warning(
    text: str, pair: Pair, cache: Path, caplog: pytest.LogCaptureFixture
):
    LLM(pair.target, pair.draft, max_num_seqs=2)
    (path,) = cache.iterdir()
    good = json.loads(path.read_text())
    path.write_text(text.replace("HERE", good["device"]))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        llm = LLM(pair.target, pair.draft, max_num_seqs=2)
    assert str(path) in caplog.text
    assert "measured anew" in caplog.text
    assert budget_of(llm).costs is not None
    assert json.loads(path.read_text()).keys() == good.keys()


def test_a_table_of_another_device_is_measured_anew_with_a_warning(
    pair: Pair, cache: Path, caplog: pytest.LogCaptureFixture
):
    LLM(pair.target, pair.draft, max_num_seqs=2)
    (path,) = cache.iterdir()
    good = json.loads(path.read_text())
    path.write_text(json.dumps({**good, "device": "an abacus"}))
    with caplog.at_level(logging.WARNING):
        llm = LLM(pair.target, pair.draft, max_num_seqs=2)
    (told,) = [one.message for one in caplog.records if "abacus" in one.message]
    assert told == f"{path} is of an abacus, not of {good['device']}: costs are measured anew."
    assert budget_of(llm).costs is not None
    assert json.loads(path.read_text())["device"] == good["device"]


def test_steps_of_many_requests_tell_what_a_request_costs_beside_its_rows():
    steps = [(rows, n, 2.0 + 0.25 * rows + 0.5 * n) for n in (1, 4, 16)
             for rows in (n, 4 * n, 16 * n)]  # fmt: skip
    by_rows, request = measured._by_rows(steps)
    assert request == pytest.approx(0.5)
    assert by_rows == pytest.approx({n: 2.0 + 0.25 * n for n in (1, 4, 16, 64, 256)})
    dear = [(rows, n, 9.0 + rows - 0.5 * n) for rows, n, _ in steps]
    assert measured._by_rows(dear)[1] == 0.0
    alone = [(rows, 1, 2.0 + rows) for rows in (1, 4, 16)]
    assert measured._by_rows(alone) == ({1: 3.0, 4: 6.0, 16: 18.0}, 0.0)


def test_a_cache_that_cannot_be_written_does_no_harm(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs is not None
    assert "not kept" in caplog.text


@pytest.mark.parametrize("options", [{"adaptive": False}, {"method": "none"}, {"draft": None}])
def test_nothing_is_measured_where_nothing_adapts(
    options: dict[str, Any], pair: Pair, cache: Path, times: list[tuple[int, Any]]
):
    given = {"draft": pair.draft, **options}
    llm = LLM(pair.target, **given)
    adapt(llm.engine)
    measures = isinstance(llm.engine.scheduler.budget, AdaptiveBudget)
    assert bool(times) == measures == (options == {"method": "none"})
    assert cache.exists() == measures


def test_a_context_without_room_for_measuring_leaves_whole_blocks(pair: Pair, cache: Path):
    llm = LLM(pair.target, pair.draft, max_model_len=24)
    assert budget_of(llm).costs is None
    assert not cache.exists()
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8
