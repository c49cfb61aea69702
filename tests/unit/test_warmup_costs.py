"""Costs measured before the first request, kept for the next start, and measured anew where they
do not fit."""

from __future__ import annotations

import json
import logging
import math
import os
import pwd
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textpair import Pair

from strobe import LLM, SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Choice
from strobe.speculation.costs import Work
from strobe.warmup import costs as measured
from strobe.warmup.costs import adapt

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for bound in ("FITS", "FAR"):
        monkeypatch.setattr(measured, bound, 1e9)  # however busy the machine is
    return tmp_path / "strobe" / "costs"


def budget_of(llm: LLM) -> AdaptiveDraftPolicy:
    budget = llm.engine.scheduler.draft_policy
    assert isinstance(budget, AdaptiveDraftPolicy)
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


def test_one_undisturbed_look_keeps_the_costs(
    pair: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another program may run during one kind of step and not during the other."""
    costs = budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs
    assert costs is not None
    (path,) = cache.iterdir()
    table = path.read_text()
    monkeypatch.setattr(measured, "FITS", 0.3)
    monkeypatch.setattr(measured, "FAR", 4.0)
    disturbed = [1.0, 3.0, 3.0, 1.0, 2.0, 2.0]  # three looks at plain steps and at those of a block

    def time(self: Any, count: int, choice: Any) -> tuple[float, float, int]:
        draft = self.budget.slots[-1] if choice.most else 0
        ms = float(costs.ms(Work(draft, 1 + choice.most))) / costs.pace
        return 0.0, ms * disturbed.pop(0), 1 + choice.most

    monkeypatch.setattr(measured._Survey, "time", time)
    again = budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs
    assert again is not None
    assert again.pace == pytest.approx(2.0, rel=1e-4)  # the drafter took next to nothing
    assert (disturbed, path.read_text()) == ([], table)


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


POINTS = {"1": 1.0, "2": 2.0}
TABLE: dict[str, Any] = {
    "device": "here", "draft": POINTS, "verify": POINTS, "request": 0, "context": 0,
    "context_row": 0,
}  # fmt: skip
BAD_POINTS: list[Any] = [None, 1, "x", [1.0, 2.0], [], {}, {"1": 1.0}, {"1": 1.0, "1.5": 2.0},
    {"1": 1.0, "-2": 2.0}, {"0": 1.0, "1": 2.0}, {"1": 1.0, "9" * 400: 2.0}, {"1": 1.0, "": 2.0},
    {"1": 1.0, "2": "2.0"}, {"1": 1.0, "2": None}, {"1": 1.0, "2": [2.0]}, {"1": True, "2": 2.0},
    {"1": 1.0, "2": 1e300}, {"1": 1.0, "2": 10**400}, {"1": -1.0, "2": 1.0}, {"1": 0, "2": 1.0},
    {"1": 1.0, "2": math.nan}, {"1": 1.0, "2": math.inf}, {"1": 5e-324, "2": 1.0}]  # fmt: skip
BAD_RATES: list[Any] = [None, "0", [0], {}, True, -1e-9, -1e300, 1e300, 10**400, math.nan, math.inf]
BAD_TEXTS = ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "null", "1", '"text"', "[1, 2]", "{}",
    "\ufeff{}", " ", "{" + '"device": 1, ' * 10 + "}"]  # fmt: skip
BAD_TABLES = [
    *[(f"{name} {bad!r:.40}", json.dumps({**TABLE, name: bad}))
      for name in ("draft", "verify") for bad in BAD_POINTS],
    *[(f"{name} {bad!r:.40}", json.dumps({**TABLE, name: bad}))
      for name in ("request", "context", "context_row") for bad in BAD_RATES],
    *[(f"no {name}", json.dumps({n: v for n, v in TABLE.items() if n != name})) for name in TABLE],
    *[(f"device {bad!r}", json.dumps({**TABLE, "device": bad})) for bad in (None, 1, [], {}, "")],
    *[(f"text {bad:.20}", bad) for bad in BAD_TEXTS],
]  # fmt: skip


@pytest.mark.parametrize("text", [text for _, text in BAD_TABLES], ids=[n for n, _ in BAD_TABLES])
def test_bad_table_is_not_taken(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "table.json"
    path.write_text(text)
    assert measured._read(path, "here") is None
    (record,) = caplog.records
    assert str(path) in record.message
    assert record.message.endswith("costs are measured anew.")
    assert len(record.message) < 400


def test_zero_rates_are_good(tmp_path: Path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(TABLE))
    costs = measured._read(path, "here")
    assert costs is not None
    assert float(costs.ms(Work(0, 3, context=1 << 20))) == 3.0


def _directory(path: Path) -> None:
    path.mkdir()


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 32)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _bytes(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00{}")


@pytest.mark.parametrize("put", [_directory, _pipe, _huge, _endless, _bytes])
def test_what_is_no_table_does_no_harm(
    put: Callable[[Path], None], pair: Pair, cache: Path, caplog: pytest.LogCaptureFixture
):
    LLM(pair.target, pair.draft, max_num_seqs=2)
    (path,) = cache.iterdir()
    path.unlink()
    put(path)
    caplog.clear()
    assert budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs is not None
    assert str(path) in caplog.text
    assert list(cache.iterdir()) == [path], "nothing half written stays"


@pytest.mark.parametrize("name", ["open", "is_file", "mkdir", "write_text"])
def test_folder_of_another_user_does_no_harm(
    name: str,
    pair: Pair,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Root may read and write everything, so that the error is made here."""
    LLM(pair.target, pair.draft, max_num_seqs=2)
    true = getattr(Path, name)

    def denied(path: Path, *rest: Any, **options: Any) -> Any:
        if cache in (path, path.parent):
            raise PermissionError(13, "Permission denied", str(path))
        return true(path, *rest, **options)

    monkeypatch.setattr(Path, name, denied)
    monkeypatch.setattr(measured, "FITS", 0.0)  # measured anew, and so written
    caplog.clear()
    assert budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs is not None
    assert "Permission denied" in caplog.text


def test_user_without_home_keeps_no_costs(
    pair: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert budget_of(LLM(pair.target, pair.draft, max_num_seqs=2)).costs is not None
    assert "no home directory; set HOME or XDG_CACHE_HOME" in caplog.text
    assert not cache.exists()


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


def test_noisy_survey_gives_no_negative_costs():
    noisy = [(1, 1, 2.0), (4, 4, 3.0), (16, 1, 1.0), (16, 16, 100.0)]
    by_rows, request = measured._by_rows(noisy)
    assert request == 0.0
    assert min(by_rows.values()) > 0


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
    measures = isinstance(llm.engine.scheduler.draft_policy, AdaptiveDraftPolicy)
    assert bool(times) == measures == (options == {"method": "none"})
    assert cache.exists() == measures


def test_a_context_without_room_for_measuring_leaves_whole_blocks(pair: Pair, cache: Path):
    llm = LLM(pair.target, pair.draft, max_model_len=24)
    assert budget_of(llm).costs is None
    assert not cache.exists()
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 8
