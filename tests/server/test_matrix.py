"""Every feature of the API gives the same answers with and without drafts, streamed or whole.

All cells run concurrently on one server, each in these ways:

             speculation off    dflash             ngram
    greedy   whole, stream      whole, stream      stream
    sampled  whole              whole, stream      whole

The acceptance length of each feature is printed at the end; STROBE_MATRIX_REPORT names a file that
gets it as JSON. tests/reference/test_processors_lossless.py shows with scripted drafts that no
feature rejects correct drafts.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from openai.resources.chat.completions import Completions as Chats
from openai.resources.completions import Completions as Texts

from tests.server.support.feature_cells import Cell, cells
from tests.server.support.outcomes import AnswerResult, Outcome, streamed, whole
from tests.server.support.server_process import Served

SPECULATION: dict[str, Any] = {
    "off": False,
    "dflash": True,
    "ngram": {"method": "ngram", "num_drafts": 6},
}
TEMPERATURES = {"greedy": 0.0, "sampled": 1.0}


class Way(NamedTuple):
    """How a cell's request is sent: method, whole or streamed, greedy or sampled."""

    speculation: str
    form: str
    mode: str

    def __str__(self) -> str:
        return "-".join(self)


BASES = [Way("off", "whole", mode) for mode in TEMPERATURES]
WAYS = [
    Way("off", "stream", "greedy"),
    *(Way("dflash", form, mode) for mode in TEMPERATURES for form in ("whole", "stream")),
    Way("ngram", "stream", "greedy"),
    Way("ngram", "whole", "sampled"),
]
CELLS = {cell.id: cell for cell in cells()}


def with_cells(chosen: Callable[[Cell], bool]) -> pytest.MarkDecorator:
    cells = [pytest.param(cell, id=name) for name, cell in CELLS.items() if chosen(cell)]
    return pytest.mark.parametrize("cell", cells)


@dataclass
class Matrix:
    """The outcomes of all cells, each computed once."""

    client: openai.OpenAI
    model: str
    pool: ThreadPoolExecutor
    outcomes: dict[tuple[str, Way], Future[Outcome]]

    def outcome(self, cell: Cell, way: Way) -> Outcome:
        """Start the request if necessary and wait for its outcome."""
        self.begin(cell, way)
        return self.outcomes[cell.id, way].result()

    def begin(self, cell: Cell, way: Way) -> None:
        if (cell.id, way) not in self.outcomes:
            self.outcomes[cell.id, way] = self.pool.submit(self._ask, cell, way)

    def _ask(self, cell: Cell, way: Way) -> Outcome:
        """Send the request: OpenAI's fields as the client's arguments, others as extra_body."""
        resource: Any = self.client.chat.completions if cell.chat else self.client.completions
        body = cell.body() | {"model": self.model, "temperature": TEMPERATURES[way.mode]}
        body["speculation"] = SPECULATION[way.speculation]
        if way.form == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        known = inspect.signature((Chats if cell.chat else Texts).create).parameters
        extra = {name: body.pop(name) for name in list(body) if name not in known}
        answer = resource.create(**body, extra_body=extra)
        if way.form == "whole":
            return whole(answer.model_dump())
        return streamed(chunk.model_dump(exclude_unset=True) for chunk in answer)


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, server: Served) -> Iterator[Matrix]:
    """Starts all requests of the selected tests at once."""
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="-", timeout=900) as client,
        ThreadPoolExecutor(24) as pool,
    ):
        matrix = Matrix(client, client.models.list().data[0].id, pool, {})
        for item in request.session.items:
            values: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
            if item.path == request.path and "cell" in values:
                for way in [*BASES, *([values["way"]] if "way" in values else [])]:
                    matrix.begin(values["cell"], way)
        try:
            yield matrix
        finally:
            pool.shutdown(cancel_futures=True)
        report = Report(matrix)
        request.config.pluginmanager.register(report)
        if os.environ.get("STROBE_MATRIX_REPORT"):
            Path(os.environ["STROBE_MATRIX_REPORT"]).write_text(json.dumps(report.rows, indent=1))


class Report:
    """Acceptance lengths by cell, method and temperature, for pytest's summary."""

    def __init__(self, matrix: Matrix):
        self.rows: dict[str, dict[str, float | None]] = {}
        for (name, way), future in matrix.outcomes.items():
            done = future.done() and not future.cancelled() and future.exception() is None
            if done and way.speculation != "off":
                length = future.result().report["acceptance_length"]
                self.rows.setdefault(name, {})[f"{way.speculation} {way.mode}"] = length

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        columns = [
            (f"{place}-", f"{method} {mode}")
            for place in ("chat", "text")
            for method in ("dflash", "ngram")
            for mode in TEMPERATURES
        ]
        line = terminalreporter.line
        terminalreporter.section("acceptance length, in chats and in completions")
        methods = "dflash T=0    T=1 ngram T=0    T=1"
        line(f"{'':20}{methods:>35}   {methods:>35}")
        for name in dict.fromkeys(name[5:] for name in self.rows):
            values = [self.rows.get(place + name, {}).get(column) for place, column in columns]
            cells = [f"{'' if value is None else f'{value:.1f}':>8}" for value in values]
            line(f"{name:20}" + "".join(cells[:4]) + "      " + "".join(cells[4:]))


def ways(cell: Cell) -> list[Way]:
    return [way for way in WAYS if cell.streams or way.form == "whole"]


PAIRS = [
    pytest.param(
        cell,
        way,
        id=f"{name}-{way}",
        marks=[] if number % len(ways(cell)) == index else [pytest.mark.full],
    )
    for number, (name, cell) in enumerate(CELLS.items())
    for index, way in enumerate(ways(cell))
]
"""Each cell in each way; `make test` runs one way per cell."""


@pytest.mark.parametrize(("cell", "way"), PAIRS)
def test_answer_is_independent_of_serving_mode(matrix: Matrix, cell: Cell, way: Way):
    base = matrix.outcome(cell, Way("off", "whole", way.mode))
    outcome = matrix.outcome(cell, way)
    assert outcome.usage == base.usage
    assert len(outcome.choices) == len(base.choices)
    for answer, expected in zip(outcome.choices, base.choices, strict=True):
        assert_close(answer.logprobs, expected.logprobs)
        assert_close(answer.prompt_logprobs, expected.prompt_logprobs)
        left_out: Any = {"logprobs": [], "prompt_logprobs": None, "steps": []}
        assert replace(answer, **left_out) == replace(expected, **left_out)


@pytest.mark.parametrize(("cell", "way"), PAIRS)
def test_reports_and_steps_add_up(matrix: Matrix, cell: Cell, way: Way):
    outcome = matrix.outcome(cell, way)
    report = outcome.report
    drafts = report["used"]
    assert report["method"] == ("none" if way.speculation == "off" else way.speculation)
    assert drafts == (report["steps"] > 0) == (report["off_reason"] is None)
    assert sum(report["accepted_per_position"]) == report["accepted"] <= report["drafted"]
    if drafts:
        assert report["acceptance_length"] == 1 + report["accepted"] / report["steps"]
    if way.speculation != "ngram":  # n-gram may find no match
        assert drafts == (way.speculation == "dflash" and cell.drafts)
    if way.form == "stream":
        steps = [step for answer in outcome.choices for step in answer.steps]
        assert sum(step["drafted"] for step in steps) == report["drafted"]
        assert sum(step["accepted"] for step in steps) == report["accepted"]
        assert sum(step["drafted"] > 0 for step in steps) == report["steps"]
        for answer in outcome.choices:
            assert_reported(answer, echo=bool(cell.fields.get("echo")))


@pytest.mark.parametrize("name", ["chat-stop", "chat-stops", "text-stop", "text-stops"])
def test_stop_text_inside_a_block_drops_later_drafts(matrix: Matrix, name: str):
    (answer,) = matrix.outcome(CELLS[name], Way("dflash", "stream", "greedy")).choices
    last = answer.steps[-1]
    assert last["accepted"] == len(last["tokens"]) <= last["drafted"]
    assert answer.text + str(answer.stop_reason) in "".join(
        t for s in answer.steps for t, _ in s["tokens"]
    )


def assert_reported(answer: AnswerResult, *, echo: bool) -> None:
    """Check that a stream's steps list every token, accepted drafts first."""
    reported = [token for step in answer.steps for token in step["tokens"]]
    assert len(reported) == len(answer.token_ids)
    for step in answer.steps:
        flags = [accepted for _, accepted in step["tokens"]]
        assert flags == sorted(flags, reverse=True)
        assert sum(flags) == step["accepted"]
        assert len(flags) - sum(flags) <= 1
    if not echo:
        assert answer.text in "".join(text for text, _ in reported)


def assert_close(actual: Any, expected: Any) -> None:
    """Compare with a tolerance of 1e-4; near ties among top tokens may name another token."""
    if isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, dict) and isinstance(actual, dict):
        values = [sorted(map(_value, side.values())) for side in (actual, expected)]
        assert_close(*values)
        for key in actual.keys() & expected.keys():
            assert_close(_value(actual[key]), _value(expected[key]))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_close(left, right)
    else:
        assert actual == expected


def _value(entry: Any) -> float:
    return entry["logprob"] if isinstance(entry, dict) else entry


@with_cells(lambda cell: True)
def test_answer_satisfies_the_request(matrix: Matrix, cell: Cell):
    for way in BASES:
        outcome = matrix.outcome(cell, way)
        cell.check(outcome)
        for answer in outcome.choices:
            assert len(answer.token_ids) <= cell.tokens
            assert answer.finish_reason in ("stop", "length", "tool_calls")


@with_cells(lambda cell: bool(cell.unlike))
def test_field_changes_the_answer(matrix: Matrix, cell: Cell):
    plain = [matrix.outcome(CELLS[cell.unlike or ""], way).choices for way in BASES]
    assert [matrix.outcome(cell, way).choices for way in BASES] != plain


@with_cells(lambda cell: cell.siblings)
def test_siblings_with_one_seed_differ(matrix: Matrix, cell: Cell):
    greedy, sampled = ([answer.text for answer in matrix.outcome(cell, w).choices] for w in BASES)
    assert len(set(greedy)) == 1
    assert len(set(sampled)) > 1


@with_cells(lambda cell: cell.drafts)
def test_drafts_are_accepted(matrix: Matrix, cell: Cell):
    length = matrix.outcome(cell, Way("dflash", "whole", "greedy")).report["acceptance_length"]
    assert length >= cell.accepts
