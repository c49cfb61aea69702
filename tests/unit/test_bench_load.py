"""`strobe bench record` and `strobe bench load`: traces match real steps, and a replay matches the
traces. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.models.architectures import load_draft_config
from strobe.ranks.leader import start_engine
from strobe.speculation.draft_policy import DraftPolicy
from strobe.step import Plan, StepResult
from strobe.tools.bench import request_load
from strobe.tools.bench.bench_settings import LoadSettings, RecordSettings
from strobe.tools.bench.draft_traces import Traces, independent
from strobe.tools.bench.draft_traces import load as load_traces
from strobe.tools.bench.driver import Arrival, Driver, LoadRun, RequestTimes
from strobe.tools.bench.engine_step import located_shapes
from strobe.tools.bench.record import RecordingEngine, record
from strobe.tools.bench.replay import ReplayEngine, widths_of
from strobe.tools.bench.request_load import TRACES, best_fixed
from tests.support.full_marks import full_where

WIDTHS = (3, 7, 15)
PROMPTS = [[5, 6, 7, 8] * n for n in (1, 3, 8)]


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(device="cpu", max_num_seqs=3, enable_prefix_caching=False, **changes)


@pytest.fixture(scope="module")
def traces() -> Traces:
    """Traces of the demo models at temperature 1."""
    return recorded(RecordingEngine(resolve(config(adaptive=False, overlap=1))))


def recorded(engine: RecordingEngine) -> Traces:
    settings = RecordSettings(max_tokens=40, temperature=1.0, ignore_eos=True, at_once=2)
    return record(engine, PROMPTS, settings)


@pytest.fixture(scope="module")
def easy_then_hard() -> Traces:
    """Two answers of 30 tokens: all drafts right in the first, all wrong in the second."""
    right = np.repeat(np.array([WIDTHS, (0, 0, 0)], dtype=np.uint8), 30, 0)
    margins = tuple(np.full((60, n), n, dtype=np.float16) for n in WIDTHS)
    return Traces(WIDTHS, np.array([30, 30]), right, margins, {})


class ObservingPolicy(DraftPolicy):
    """Keeps the plans and results that a policy observes."""

    def __init__(self) -> None:
        self.observed: list[tuple[Plan, StepResult]] = []

    def observe(self, plan: Plan, result: StepResult) -> None:
        self.observed.append((plan, result))


@pytest.mark.parametrize(
    ("name", "widths"), [("traces.npz", (3, 7, 15)), ("traces_smollm2.npz", (3, 7))]
)
def test_shipped_traces_have_answers_of_both_kinds(name: str, widths: tuple[int, ...]):
    shipped = load_traces(TRACES.with_name(name))
    assert shipped.widths == widths
    easy, hard = (shipped.arranged(mix).acceptance_length(7) for mix in ("easy", "hard"))
    assert easy > 4 > 2 > hard


def test_shapes_take_the_block_of_the_traces():
    with located_shapes("qwen3-8b", EngineConfig(), 8) as config:
        draft = load_draft_config(Path(config.draft or ""))
    assert widths_of(draft) == (3, 7)


def accepted_per_step(traces: Traces, answer: int, width: int) -> list[int]:
    """Return the drafts accepted in each verify step of an answer."""
    right = traces.right[:, WIDTHS.index(width)]
    place, end = traces.starts[answer], traces.starts[answer] + traces.lengths[answer]
    accepted: list[int] = []
    while place < end:
        accepted.append(int(right[place]))
        place += 1 + right[place]
    return accepted


# recording


@pytest.mark.full
def test_two_ranks_record_what_one_does(traces: Traces):
    setup = resolve(config(adaptive=False, overlap=1, tensor_parallel_size=2))
    engine = start_engine(setup, make=RecordingEngine)
    assert isinstance(engine, RecordingEngine)
    of_two = recorded(engine)
    assert of_two.lengths.tolist() == traces.lengths.tolist()
    assert np.array_equal(of_two.right, traces.right)
    for margins, expected in zip(of_two.margins, traces.margins, strict=True):
        np.testing.assert_allclose(margins, expected, atol=0.05)


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
    steps = [request.draft_counts.steps for request in requests]
    assert steps == [len(accepted_per_step(traces, i, width)) for i in range(3)]
    assert traces.acceptance_length(width) == pytest.approx(3 * 39 / sum(steps))
    assert max(steps) < 39


def test_recorded_margins_match_each_width(traces: Traces):
    assert [rows.shape for rows in traces.margins] == [(117, n) for n in WIDTHS]
    narrow, wide = (rows.astype(float) for rows in (traces.margins[0], traces.margins[2][:, :3]))
    assert (narrow >= 0).all()
    assert narrow.max() > 1
    assert not np.allclose(narrow, wide)
    right = traces.right[:, 0] > 0
    assert narrow[right, 0].mean() > narrow[~right, 0].mean()


def test_saved_traces_load_unchanged(traces: Traces, tmp_path: Path):
    replace(traces, note={"command": "x"}).save(tmp_path / "t.npz")
    loaded = load_traces(tmp_path / "t.npz")
    assert loaded.note == {"command": "x"}
    assert loaded.widths == WIDTHS
    before = traces.lengths, traces.right, *traces.margins
    after = loaded.lengths, loaded.right, *loaded.margins
    for saved_array, loaded_array in zip(before, after, strict=True):
        assert saved_array.dtype == loaded_array.dtype
        assert np.array_equal(saved_array, loaded_array)


def test_mixes_select_easy_and_hard_answers(easy_then_hard: Traces):
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
    traces = independent(chance, WIDTHS)
    for width in WIDTHS:
        expected = sum(chance**k for k in range(width + 1))
        assert traces.acceptance_length(width) == pytest.approx(expected, rel=0.03)
    assert (traces.right[:, 0] == np.minimum(traces.right[:, 2], 3)).all()


# replay


@full_where(lambda overlap, width: (overlap, width) in ((1, 7), (2, 3)))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("overlap", [1, 2])
def test_replay_accepts_drafts_as_recorded(traces: Traces, width: int, overlap: int):
    engine = ReplayEngine(resolve(config(load_format="dummy", overlap=overlap)), traces=traces)
    engine.scheduler.draft_policy = policy = ObservingPolicy()
    params = SamplingParams(max_tokens=40, ignore_eos=True, speculation={"num_drafts": width})
    requests = [
        engine.add([1] * (4 + i), params, seed=int(start)) for i, start in enumerate(traces.starts)
    ]
    while engine.has_work:
        engine.step()
    for i, request in enumerate(requests):
        assert request.draft_counts.steps == len(accepted_per_step(traces, i, width))
    offsets = [0, 0, 0]  # by slot; requests take slots in order
    for plan, result in policy.observed:
        for i, span in enumerate(plan.spans):
            if span.method is None or span.slot >= len(offsets):
                continue
            place = (traces.starts[span.slot] + offsets[span.slot]) % len(traces.right)
            left = max(39 - offsets[span.slot], 0)  # accepted tokens after the end are dropped
            assert result.num_accepted[i] == min(traces.right[place, WIDTHS.index(width)], left)
            if not left:
                continue
            assert result.margins is not None
            row = traces.margins[WIDTHS.index(width)][place]
            assert result.margins[i][:width] == row.tolist()
            offsets[span.slot] += 1 + result.num_accepted[i]


@pytest.mark.full
def test_two_ranks_replay_as_recorded(traces: Traces):
    setup = resolve(config(load_format="dummy", overlap=2, tensor_parallel_size=2))
    engine = start_engine(setup, make=partial(ReplayEngine, traces=traces))
    params = SamplingParams(max_tokens=40, ignore_eos=True, speculation={"num_drafts": WIDTHS[-1]})
    requests = [engine.add([1] * 4, params, seed=int(start)) for start in traces.starts]
    while engine.has_work:
        engine.step()
    for i, request in enumerate(requests):
        assert request.draft_counts.steps == len(accepted_per_step(traces, i, WIDTHS[-1]))


def test_replay_continues_into_the_next_answer(easy_then_hard: Traces):
    engine = ReplayEngine(
        resolve(config(load_format="dummy", adaptive=False)), traces=easy_then_hard
    )
    params = SamplingParams(max_tokens=61, ignore_eos=True)
    request = engine.add([1, 2, 3], params, seed=0)
    accepted: list[int] = []
    while engine.has_work:
        accepted += [event.num_accepted for event in engine.step() if event.num_proposed]
    assert accepted[:2] == [15, 15]
    assert set(accepted[2:]) == {0}
    assert request.num_output == 61


def test_traces_of_another_block_size_are_rejected(traces: Traces):
    narrow = replace(traces, widths=WIDTHS[:2], margins=traces.margins[:2])
    with pytest.raises(ValueError, match="of blocks of 3 and 7 drafts, but this drafter's have 3, "
                                         "7 and 15; record"):  # fmt: skip
        ReplayEngine(resolve(config(load_format="dummy")), traces=narrow)


@pytest.mark.parametrize("overlap", [1, 2])
def test_driver_sends_next_request_when_one_ends(easy_then_hard: Traces, overlap: int):
    settings = config(load_format="dummy", adaptive=False, overlap=overlap)
    engine = ReplayEngine(resolve(settings), traces=easy_then_hard)
    num_active: list[int] = []
    engine_step = engine.step

    def step() -> Any:
        num_active.append(len(engine.scheduler.running) + len(engine.scheduler.waiting))
        return engine_step()

    engine.step = step
    settings = LoadSettings(prompt_len=5, concurrency="2")
    arrivals = [Arrival(0.0, 30 * (i % 2), 5 + i) for i in range(6)]
    run = Driver(engine, settings, "7", 2).run(arrivals)
    assert max(num_active) == 2
    assert [times.tokens for times in run.requests[:5]] == [5, 6, 7, 8, 9]
    assert run.requests[5].tokens <= 10  # the clock stops when one is left
    assert 0 < run.tokens < 45
    assert run.ended > run.began >= max(times.first for times in run.requests[:2])
    assert not engine.has_work


def test_requests_arrive_at_their_times(easy_then_hard: Traces):
    engine = ReplayEngine(
        resolve(config(load_format="dummy", adaptive=False)), traces=easy_then_hard
    )
    settings = LoadSettings(prompt_len=5, concurrency="3", rate="100", max_tokens=4)
    ((labels, arrivals, count),) = request_load._loads(settings, easy_then_hard, 0)
    assert (labels, count, len(arrivals)) == ({"rate": 100.0, "concurrency": 3}, 3, 3000)
    gaps = np.diff([0.0, *[arrival.at for arrival in arrivals]])
    assert gaps.mean() == pytest.approx(0.01, rel=0.06)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.08)  # an exponential distribution
    run = Driver(engine, settings, "plain", 3).run(arrivals[:5])
    assert [times.tokens for times in run.requests] == [4] * 5
    for times, arrival in zip(run.requests, arrivals, strict=False):
        assert times.due == run.began + arrival.at < times.first < times.last
    assert run.draft_counts.num_proposed == 0


def test_best_fixed_compares_rows_of_the_same_load():
    rows = [
        {"way": way, "concurrency": c, "tokens_per_s": rate}
        for way, c, rate in (("plain", 1, 5), ("3", 1, 9), ("adaptive", 1, 10), ("plain", 2, 99))
    ]
    assert best_fixed(rows, rows[2]) == rows[1]


# the command line


def test_record_and_load_from_the_command_line(main: Callable[..., Any], pair: Any, tmp_path: Path):
    flags = [f"--target={pair.target}", f"--draft={pair.draft}", "--device=cpu"]
    out, file, plot = tmp_path / "t.npz", tmp_path / "f.json", tmp_path / "load.svg"
    status, text, err = main("bench", "record", *flags, "--prompts=3", "--max-tokens=12",
                             "--ignore-eos", f"--out={out}")  # fmt: skip
    assert (status, err) == (0, "")
    assert "3 answers, 33 places; tokens per step by number of drafts: " in text
    recorded = load_traces(out)
    assert recorded.note["command"].startswith("strobe bench record --prompts 3 --max-tokens 12")
    ways = "plain,adaptive," + str(recorded.widths[0])
    status, text, err = main("bench", "load", *flags, f"--traces={out}", "--concurrency=1,2",
                             "--answers=4", "--prompt-len=8", f"--ways={ways}", "--repeats=3",
                             f"--json={file}", f"--plot={plot}")  # fmt: skip
    assert (status, err) == (0, "")
    assert "drafts are accepted as in the traces" in text
    assert "c = 2: adaptive reaches" in text
    assert "…" not in text
    figures = json.loads(file.read_text())
    assert [(r["way"], r["concurrency"]) for r in figures["rows"]] == [
        (way, c) for c in (1, 2) for way in ways.split(",")
    ]
    for row in figures["rows"]:
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"], rel=0.02)
        if row["way"] != "adaptive":  # adaptive drafting may turn itself off for this pair
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
        ("load", ["--rate=0"], "rate is '0', but must be numbers above 0 separated by commas, "),
        ("load", ["--rate=2,x"], "rate is '2,x', but must be numbers above 0 separated by commas"),
        ("load", ["--rate=1", "--steady"], "rate and steady are both set; set one of them."),
        ("load", ["--ways=plain,fast"], "ways is 'plain,fast', but must be plain, adaptive and "),
        ("load", ["--ways=0"], "ways is '0', but must be plain, adaptive and numbers of drafts"),
        ("load", ["--ways=16"], "ways names 16 drafts, but a step verifies at most 15; leave it "),
        ("load", ["--traces=/nowhere"], "/nowhere holds no traces ("),
        ("load", ["--traces={wrong}"], "holds traces whose parts do not match; record them again "),
        ("load", ["--traces={narrow}"], "The traces are of blocks of 3 and 7 drafts, but this "),
        ("load", ["--traces=x", "--acceptance-rate=0.5"], "acceptance_rate is set together with "),
        ("load", ["--acceptance-rate=2"], "acceptance_rate is 2, but must be at most 1"),
        ("load", ["--mix=odd", "--traces={good}"], "mix is 'odd'; name one of all, easy, hard, "),
        ("load", ["--acceptance-rate=1", "--prompt-len=1900"], "lower prompt_len or max_tokens, "),
        ("load", ["--answers=4", "--traces={good}"], "answers is 4, but concurrency is 32; ask "),
        ("load", ["--no-adaptive", "--traces={good}"], "adaptive is off, but ways names it; leave"),
        ("load", ["--method=none"], "Nothing drafts; name shapes with a drafter, or leave "),
        ("load", ["--plot=/nowhere/x.png"], "plot is '/nowhere/x.png', but /nowhere is not a "),
        ("load", ["--plot=x.txt"], "plot is 'x.txt', but must end in one of .png, .svg, .pdf."),
        ("load", ["--break-even", "--contexts=0"], "contexts is '0', but must be whole numbers "),
        ("load", ["--break-even", "--steady"], "steady is set, but break_even sends no load; "),
        ("load", ["--contexts=9"], "contexts is '9', but only break_even uses it; set it as "),
        ("load", ["--break-even", "--method=none"], "Nothing drafts; name shapes with a "),
        ("record", ["--out=x.txt"], "out is 'x.txt', but must end with .npz."),
        ("record", ["--method=ngram"], "Nothing drafts; name a drafter, or leave --method "),
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
    good = easy_then_hard
    narrow = replace(good, widths=WIDTHS[:2], margins=good.margins[:2], right=good.right[:, :2])
    files = {
        "good": good,
        "narrow": narrow,
        "wrong": replace(good, lengths=np.array([30, 31])),
    }
    for kind, traces in files.items():
        traces.save(tmp_path / f"{kind}.npz")
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


def test_restarted_run_keeps_its_requests():
    run = LoadRun(tokens=5, steps=2)
    run.requests.append(RequestTimes(0.0, tokens=5))
    run.restart()
    assert (run.tokens, run.steps, len(run.requests)) == (0, 0, 1)
    assert run.began > 0
