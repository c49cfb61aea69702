"""The output, files and exit status of `strobe eval`, on a random pair and a few rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, SamplingParams
from strobe.tools.bench.plot_style import missing
from strobe.tools.eval.answering import Answering, Run
from tests.support.text_pair import Pair

PICTURES = ["histogram.png", "positions.png", "speedup.png"]


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows to a file of JSON lines."""

    def write(*rows: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def printed_table(out: str, title: str) -> list[list[str]]:
    """Return the cells of the printed table with this title, the header first."""
    rows = [line.strip() for line in out.splitlines()]
    header, _, *rest = rows[rows.index(title) + 1 :]
    last = next(i for i, row in enumerate(rest) if not row.startswith("custom "))
    return [re.split(r"\s{2,}", row) for row in (header, *rest[:last])]


def markdown_table(page: str, title: str) -> list[list[str]]:
    """Return the cells of the Markdown table with this title, the header first."""
    rows = page.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [cells[0], *cells[2:]]


def test_speed_reports_both_methods_and_writes_results(
    main: Callable[..., Any], lines: Callable[..., Path], pair: Pair, tmp_path: Path
):
    path = lines({"turns": ["Hello", "Again"], "answer": "4"}, *({"turns": ["Hi"]},) * 2)
    folder = tmp_path / "report"
    status, out, err = main(
        "eval", "speed", "--data", path, "--target", pair.target, "--draft", pair.draft,
        "--concurrency=1,2", "--max-tokens=6", "--output", folder, "--save-answers",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "Every answer has the same tokens with speculation and without." in out
    figures = json.loads((folder / "report.json").read_text())
    rows = [(row["concurrency"], row["method"], row["answers"]) for row in figures["rows"]]
    assert rows == [(1, "plain", 4), (1, "dflash", 4), (2, "plain", 4), (2, "dflash", 4)]
    assert [pair["identical"] for pair in figures["pairs"]] == [3, 3]
    assert figures["rows"][0]["accuracy"]["graded"] == 1
    assert figures["rows"][0]["acceptance"] is None
    page = (folder / "report.md").read_text()
    assert "## Speed-up" in page
    assert "1 of 3 prompts can be graded; no answer is known to the others" in page
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 12
    assert [len(answer["answers"]) for answer in answers[:3]] == [2, 1, 1]
    rates = [f"{100 * r:.0f}" for r in figures["rows"][1]["acceptance"]["rate_by_position"]]
    places = [f"{i + 1}" for i in range(len(rates))]
    speedups = [f"{pair['speedup']:.2f}x" for pair in figures["pairs"]]
    ways = [["custom", f"{c}", way, "0", "1", "0.0"] for c in (1, 2) for way in ("plain", "dflash")]
    tables = {
        "Speed-up": [["data set", "c = 1", "c = 2"], ["custom", *speedups]],
        "Acceptance rate by position": [["data set", *places], ["custom", *rates]],
        "Accuracy": [["data set", "c", "method", "right", "of", "per cent"], *ways],
    }
    assert len(rates) == 7
    for title, cells in tables.items():
        assert printed_table(out, title) == markdown_table(page, title) == cells
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures == ([] if missing() else PICTURES)
    assert sorted(path.name for path in folder.glob("*.png")) == pictures
    for name in pictures:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_accuracy_is_counted_with_and_without_speculation(
    main: Callable[..., Any], lines: Callable[..., Path], pair: Pair
):
    params = SamplingParams(temperature=0, max_tokens=6)
    (output,) = LLM(pair.target, method="none").chat(
        [{"role": "user", "content": "Hi"}], params, chat_template_kwargs={"enable_thinking": False}
    )
    right, wrong = output.outputs[0].text, "no random model answers this"
    path = lines(
        {"turns": ["Hi"], "answer": right},
        {"turns": ["Hi"], "answer": wrong},
        {"turns": ["Hi"]},
    )
    flags = ["--data", path, "--target", pair.target, "--max-tokens=6"]
    drafted = ["--draft", pair.draft]
    status, out, err = main("eval", "accuracy", *flags, *drafted, "--expect-accuracy=0.5")
    assert (status, err) == (0, "")
    header = ["data set", "c", "method", "right", "of", "per cent"]
    row = ["custom", "3", "dflash", "1", "2", "50.0"]
    assert printed_table(out, "Accuracy") == [header, [*row[:2], "plain", *row[3:]], row]
    assert "Every answer has the same tokens with speculation and without." in out
    status, out, err = main("eval", "accuracy", *flags, "--method=none")
    assert (status, err) == (0, "")
    assert printed_table(out, "Accuracy") == [header, [*row[:2], "plain", *row[3:]]]
    status, out, _ = main("eval", "accuracy", *flags, *drafted, "--expect-accuracy=0.6")
    assert status == 1
    assert "Below the expected value: 1 of 1 figure." in out


def test_different_fp32_answers_fail_the_evaluation(
    main: Callable[..., Any],
    lines: Callable[..., Path],
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
):
    """With a drafter, a token of one answer is changed."""
    answering_run = Answering.run

    def run_and_change(self: Answering, *arguments: Any) -> Run:
        run = answering_run(self, *arguments)
        if self.engine.resolved.config.draft is not None:
            run.conversations[1].answers[0].token_ids[-1] ^= 1
        return run

    monkeypatch.setattr(Answering, "run", run_and_change)
    path = lines(*({"turns": [text]} for text in ("Hi", "Hello", "Again")))
    status, out, err = main(
        "eval", "accuracy", "--data", path, "--target", pair.target, "--draft", pair.draft,
        "--max-tokens=4",
    )  # fmt: skip
    assert (status, err) == (1, "")
    sentence = "with speculation, the answers to 1 of 3 prompts differ (in fp32 they must not)."
    assert f"custom, c = 3: {sentence}" in out
    assert "Every answer has the same tokens" not in out
