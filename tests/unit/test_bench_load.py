"""`strobe bench record` and `strobe bench load`: traces say what a pair would do, and a replay does
what they say. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.speculation.draft_policy import DraftPolicy
from strobe.step import Plan, StepResult
from strobe.tools.bench import load
from strobe.tools.bench.driver import Driver, Job, Life, Turn
from strobe.tools.bench.load import best_of_others
from strobe.tools.bench.record import record
from strobe.tools.bench.replay import ReplayEngine, widths_of
from strobe.tools.bench.settings import LoadSettings, RecordSettings
from strobe.tools.bench.traces import Traces, independent
from strobe.tools.bench.traces import load as load_traces

WIDTHS = (3, 7, 15)
PROMPTS = [[5, 6, 7, 8] * n for n in (1, 3, 8)]


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(device="cpu", max_num_seqs=3, enable_prefix_caching=False, **changes)


@pytest.fixture(scope="module")
def traces() -> Traces:
    """Of the demo models, at temperature 1."""
    settings = RecordSettings(max_tokens=40, temperature=1.0, ignore_eos=True, at_once=2)
    engine = Engine(config(adaptive=False, overlap=1), simulated_acceptance=_nothing)
    return record(engine, PROMPTS, settings, WIDTHS)


def _nothing(layout: Any, batch: Any) -> Any:
    return batch.starts * 0


@pytest.fixture(scope="module")
def easy_then_hard() -> Traces:
    """Two answers of 30 tokens, whose drafts are all right, and all wrong."""
    right = np.repeat(np.array([WIDTHS, (0, 0, 0)], dtype=np.uint8), 30, 0)
    margins = tuple(np.full((60, n), n, dtype=np.float16) for n in WIDTHS)
    return Traces(WIDTHS, np.array([30, 30]), right, margins, {})


class Watching(DraftPolicy):
    """Keeps what a budget is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Plan, StepResult]] = []

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.seen.append((plan, result))


def steps_of(traces: Traces, answer: int, width: int) -> list[int]:
    """Drafts kept in each verify step of an answer."""
    right = traces.right[:, WIDTHS.index(width)]
    at, end, kept = traces.starts[answer], traces.starts[answer] + traces.lengths[answer], []
    while at < end:
        kept.append(int(right[at]))
        at += 1 + right[at]
    return kept


# what is recorded


@pytest.mark.parametrize("width", WIDTHS)
def test_trace_matches_measured_steps(traces: Traces, width: int):
    engine = Engine(config(adaptive=False))
    params = SamplingParams(
        temperature=1.0, max_tokens=40, ignore_eos=True, speculation={"num_drafts": width}
    )
    requests = [engine.add(p, params, seed=engine.config.seed + i) for i, p in enumerate(PROMPTS)]
    while engine.has_work:
        engine.step()
    assert traces.lengths.tolist() == [39] * 3
    found = [request.draft_counts.steps for request in requests]
    assert found == [len(steps_of(traces, i, width)) for i in range(3)]
    assert traces.acceptance_length(width) == pytest.approx(3 * 39 / sum(found))
    assert max(found) < 39


def test_recorded_margins_match_each_width(traces: Traces):
    assert [rows.shape for rows in traces.margins] == [(117, n) for n in WIDTHS]
    narrow, wide = (rows.astype(float) for rows in (traces.margins[0], traces.margins[2][:, :3]))
    assert (narrow >= 0).all()
    assert narrow.max() > 1
    assert not np.allclose(narrow, wide)
    right = traces.right[:, 0] > 0
    assert narrow[right, 0].mean() > narrow[~right, 0].mean()


def test_traces_survive_the_file(traces: Traces, tmp_path: Path):
    replace(traces, note={"command": "x"}).save(tmp_path / "t.npz")
    found = load_traces(tmp_path / "t.npz")
    assert found.note == {"command": "x"}
    assert found.widths == WIDTHS
    for ours, theirs in zip((traces.lengths, traces.right, *traces.margins),
                            (found.lengths, found.right, *found.margins), strict=True):  # fmt: skip
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs)


def test_mixes_choose_among_the_answers(easy_then_hard: Traces):
    lengths = [easy_then_hard.arranged(mix).acceptance_length(15) for mix in ("easy", "hard")]
    assert lengths == [30 / 2, 1]
    drifting = easy_then_hard.arranged("drifting")
    assert drifting.lengths.tolist() == [30]
    assert drifting.right[:, 2].tolist() == [15] * 15 + [0] * 15
    short = replace(easy_then_hard, lengths=np.array([1, 59])).arranged("drifting")
    assert short.right.shape == (int(short.lengths.sum()), 3)
    assert drifting.margins[0].shape == (30, 3)


@pytest.mark.parametrize("chance", [0.0, 0.845, 1.0])
def test_traces_reach_requested_acceptance_rate(chance: float):
    made = independent(chance, WIDTHS)
    for width in WIDTHS:
        expected = sum(chance**k for k in range(width + 1))
        assert made.acceptance_length(width) == pytest.approx(expected, rel=0.03)
    assert (made.right[:, 0] == np.minimum(made.right[:, 2], 3)).all()


# what a replay does


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("overlap", [1, 2])
def test_replay_accepts_what_traces_record(traces: Traces, width: int, overlap: int):
    engine = ReplayEngine(resolve(config(load_format="dummy", overlap=overlap)), traces)
    engine.scheduler.draft_policy = watching = Watching()
    params = SamplingParams(max_tokens=40, ignore_eos=True, speculation={"num_drafts": width})
    requests = [
        engine.add([1] * (4 + i), params, seed=int(start)) for i, start in enumerate(traces.starts)
    ]
    while engine.has_work:
        engine.step()
    for i, request in enumerate(requests):
        assert request.draft_counts.steps == len(steps_of(traces, i, width))
    slots = {0: 0, 1: 1, 2: 2}  # slots are given in the requests' order
    at = dict.fromkeys(slots, 0)
    for plan, result in watching.seen:
        for i, span in enumerate(plan.spans):
            if span.method is None or span.slot not in at:
                continue
            place = (traces.starts[slots[span.slot]] + at[span.slot]) % len(traces.right)
            left = max(39 - at[span.slot], 0)  # what lies behind the answer's end is not told
            assert result.num_accepted[i] == min(traces.right[place, WIDTHS.index(width)], left)
            if not left:
                continue
            assert result.margins is not None
            row = traces.margins[WIDTHS.index(width)][place]
            assert result.margins[i][:width] == row.tolist()
            at[span.slot] += 1 + result.num_accepted[i]


def test_requests_walk_through_a_mix_of_easy_and_hard_places(easy_then_hard: Traces):
    engine = ReplayEngine(resolve(config(load_format="dummy", adaptive=False)), easy_then_hard)
    params = SamplingParams(max_tokens=61, ignore_eos=True)
    request = engine.add([1, 2, 3], params, seed=0)
    kept: list[int] = []
    while engine.has_work:
        kept += [event.num_accepted for event in engine.step() if event.num_proposed]
    assert kept[:2] == [15, 15]
    assert set(kept[2:]) == {0}
    assert request.num_output == 61


def test_traces_of_another_block_size_are_rejected(traces: Traces):
    narrow = replace(traces, widths=WIDTHS[:2], margins=traces.margins[:2])
    with pytest.raises(ValueError, match="of blocks of 3 and 7 drafts, but this drafter's have 3, "
                                         "7 and 15; record"):  # fmt: skip
        ReplayEngine(resolve(config(load_format="dummy")), narrow)


@pytest.mark.parametrize("overlap", [1, 2])
def test_driver_sends_next_request_when_one_ends(easy_then_hard: Traces, overlap: int):
    settings = config(load_format="dummy", adaptive=False, overlap=overlap)
    engine = ReplayEngine(resolve(settings), easy_then_hard)
    most: list[int] = []
    usual = engine.step

    def step() -> Any:
        most.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return usual()

    engine.step = step
    settings = LoadSettings(prompt_len=5, concurrency="2")
    jobs = [Job(0.0, 30 * (i % 2), 5 + i) for i in range(6)]
    turn = Driver(engine, settings, "7", 2).run(jobs)
    assert max(most) == 2
    assert [life.tokens for life in turn.lives[:5]] == [5, 6, 7, 8, 9]
    assert turn.lives[5].tokens <= 10  # the clock stops when one is left
    assert 0 < turn.tokens < 45
    assert turn.ended > turn.began >= max(life.first for life in turn.lives[:2])
    assert not engine.has_work


def test_requests_arrive_at_their_times(easy_then_hard: Traces):
    engine = ReplayEngine(resolve(config(load_format="dummy", adaptive=False)), easy_then_hard)
    settings = LoadSettings(prompt_len=5, concurrency="3", rate="100", max_tokens=4)
    ((load_of, jobs, count),) = load._loads(settings, easy_then_hard, 0)
    assert (load_of, count, len(jobs)) == ({"rate": 100.0, "concurrency": 3}, 3, 3000)
    gaps = np.diff([0.0, *[job.at for job in jobs]])
    assert gaps.mean() == pytest.approx(0.01, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08)  # as of an exponential distribution
    turn = Driver(engine, settings, "plain", 3).run(jobs[:5])
    assert [life.tokens for life in turn.lives] == [4] * 5
    for life, job in zip(turn.lives, jobs, strict=False):
        assert life.due == turn.began + job.at < life.first < life.newest
    assert turn.made == 0


def test_best_other_method_is_of_the_same_load():
    rows = [
        {"way": way, "concurrency": c, "tokens_per_s": rate}
        for way, c, rate in (("plain", 1, 5), ("3", 1, 9), ("adaptive", 1, 10), ("plain", 2, 99))
    ]
    assert best_of_others(rows, rows[2]) == rows[1]


# the command line


def test_record_and_load_from_the_command_line(main: Callable[..., Any], pair: Any, tmp_path: Path):
    flags = [f"--target={pair.target}", f"--draft={pair.draft}", "--device=cpu"]
    out, file, plot = tmp_path / "t.npz", tmp_path / "f.json", tmp_path / "load.svg"
    status, text, err = main("bench", "record", *flags, "--prompts=3", "--max-tokens=12",
                             "--ignore-eos", f"--out={out}")  # fmt: skip
    assert (status, err) == (0, "")
    assert "3 answers, 33 places; tokens a step by drafts: " in text
    found = load_traces(out)
    assert found.note["command"].startswith("strobe bench record --prompts 3 --max-tokens 12")
    ways = "plain,adaptive," + str(found.widths[0])
    status, text, err = main("bench", "load", *flags, f"--traces={out}", "--concurrency=1,2",
                             "--answers=4", "--prompt-len=8", f"--ways={ways}", "--repeats=3",
                             f"--json={file}", f"--plot={plot}")  # fmt: skip
    assert (status, err) == (0, "")
    assert "drafts are kept as traces say" in text
    assert "c = 2: adaptive brings" in text
    assert "…" not in text
    figures = json.loads(file.read_text())
    assert [(r["way"], r["concurrency"]) for r in figures["rows"]] == [
        (way, c) for c in (1, 2) for way in ways.split(",")
    ]
    for row in figures["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.02)
        if row["way"] != "adaptive":  # which may find that this pair's drafts do not pay
            assert (row["drafts_made_per_token"] == 0) == (row["way"] == "plain")
        assert 0 < row["tpot_ms_p50"] <= row["tpot_ms_p99"]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize("flags", [["--steady", "--max-tokens=9"], ["--rate=50", "--answers=4"]])
def test_load_runs_steadily_and_at_a_rate(
    main: Callable[..., Any], tmp_path: Path, flags: list[str]
):
    file = tmp_path / "f.json"
    status, text, err = main(
        "bench", "load", "--device=cpu", "--concurrency=3", "--acceptance-rate=0.5",
        "--ways=plain,7", "--prompt-len=4", "--max-tokens=9", f"--json={file}", *flags,
    )  # fmt: skip
    assert (status, err) == (0, "")
    plain, drafted = json.loads(file.read_text())["rows"]
    if "--steady" in flags:
        assert plain["tokens"] == 27
        assert 27 <= drafted["tokens"] < 27 + 24
        assert plain["requests"] == 3
    else:
        assert "50/s" in text
        assert plain["tokens"] == drafted["tokens"] == 4 * 9
        assert plain["rate"] == 50


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("load", ["--rate=0"], "rate is '0', but must be requests a second above 0 with commas "),
        ("load", ["--rate=2,x"], "rate is '2,x', but must be requests a second above 0"),
        ("load", ["--rate=1", "--steady"], "rate is given beside steady; give one of them."),
        ("load", ["--ways=plain,fast"], "ways is 'plain,fast', but must be plain, adaptive and "),
        ("load", ["--ways=0"], "ways is '0', but must be plain, adaptive and numbers of drafts"),
        ("load", ["--ways=16"], "ways names 16 drafts, but a step verifies at most 15; leave it "),
        ("load", ["--traces=/nowhere"], "/nowhere holds no traces ("),
        ("load", ["--traces={wrong}"], "holds traces whose parts do not fit each other; record "),
        ("load", ["--traces={narrow}"], "The traces are of blocks of 3 and 7 drafts, but this "),
        ("load", ["--traces=x", "--acceptance-rate=0.5"], "acceptance_rate is given beside traces"),
        ("load", ["--acceptance-rate=2"], "acceptance_rate is 2, but must be at most 1"),
        ("load", ["--mix=odd", "--traces={good}"], "mix is 'odd'; name one of all, easy, hard, "),
        ("load", ["--acceptance-rate=1", "--prompt-len=1900"], "lower prompt_len or max_tokens, "),
        ("load", ["--answers=4", "--traces={good}"], "answers is 4, but concurrency is 32; ask "),
        ("load", ["--no-adaptive", "--traces={good}"], "adaptive is off, but ways names it; leave"),
        ("load", ["--method=none"], "DFlash drafts nothing; name shapes with a drafter, or leave "),
        ("load", ["--plot=/nowhere/x.png"], "plot is '/nowhere/x.png', but /nowhere is not a "),
        ("load", ["--plot=x.txt"], "plot is 'x.txt', but must end in one of .png, .svg, .pdf."),
        ("record", ["--out=x.txt"], "out is 'x.txt', but must end with .npz."),
        ("record", ["--method=ngram"], "DFlash drafts nothing; name a drafter, or leave --method "),
        ("record", ["--data=/nowhere"], "data is '/nowhere', which cannot be read ("),
    ],
)  # fmt: skip
def test_bad_input_is_a_one_line_error(
    main: Callable[..., Any],
    easy_then_hard: Traces,
    tmp_path: Path,
    name: str,
    arguments: list[str],
    sentence: str,
):
    given = easy_then_hard
    narrow = replace(given, widths=WIDTHS[:2], margins=given.margins[:2], right=given.right[:, :2])
    files = {
        "good": given,
        "narrow": narrow,
        "wrong": replace(given, lengths=np.array([30, 31])),
    }
    for kind, one in files.items():
        one.save(tmp_path / f"{kind}.npz")
    names = {kind: str(tmp_path / f"{kind}.npz") for kind in files}
    words = [word.format(**names) for word in arguments]
    status, out, err = main("bench", name, "--device=cpu", *words)
    assert (status, out) == (2, "")
    assert err.startswith("strobe: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_widths_match_the_drafter():
    draft = resolve(config()).draft
    assert draft is not None
    assert widths_of(draft) == WIDTHS
    assert widths_of(replace(draft, block_size=8)) == (3, 7)
    assert widths_of(replace(draft, anchor_first=True)) == (4, 8, 16)


def test_restarted_turn_keeps_its_requests():
    turn = Turn(tokens=5, steps=2)
    turn.lives.append(Life(0.0, tokens=5))
    turn.begin()
    assert (turn.tokens, turn.steps, len(turn.lives)) == (0, 0, 1)
    assert turn.began > 0
