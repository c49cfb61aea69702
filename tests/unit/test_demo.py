"""The figures of `strobe demo`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strobe.counters import DraftCounts
from strobe.outputs import NOT_WORTHWHILE, CompletionOutput, RequestOutput, SpeculationReport
from strobe.tools import demo_comparison


@pytest.mark.parametrize(
    ("steps", "length", "line"),
    [
        ([(0, 0), (0, 0), (0, 0)], 1.0, f"DFlash drafted nothing: {NOT_WORTHWHILE}."),
        ([(15, 4), (0, 0), (0, 0)], 2.333, ""),
        ([(15, 4), (15, 1), (15, 0)], 2.667, ""),
    ],
)
def test_demo_counts_steps_without_drafts(
    steps: list[tuple[int, int]],
    length: float,
    line: str,
    capsys: pytest.CaptureFixture[str],
):
    """All steps are without drafts if drafting does not pay, as on a busy machine."""
    counts = DraftCounts()
    for drafted, accepted in steps:
        counts.add(drafted, accepted)
    num_tokens = 1 + sum(1 + accepted for _, accepted in steps)
    report = SpeculationReport.from_counts(counts, "dflash", None, num_tokens)
    answer = CompletionOutput(0, "", list(range(num_tokens)), "stop", speculation=report)
    runs = [demo_comparison.Run([RequestOutput("r", None, [1], [answer])], [1.0]) for _ in range(2)]
    device: Any = SimpleNamespace(device="cpu", dtype="torch.float32")
    llm: Any = SimpleNamespace(engine=SimpleNamespace(resolved=device))
    figures = demo_comparison.compare(*runs, llm)
    assert figures["acceptance_length"] == length
    assert figures["off_reason"] == (NOT_WORTHWHILE if line else None)
    demo_comparison._table(figures)
    out = capsys.readouterr().out
    assert f"{length:.2f}" in out
    rested = f"Drafting rested in 67% of the steps: {NOT_WORTHWHILE}."
    assert (rested in out) == (steps == [(15, 4), (0, 0), (0, 0)])
    assert (line in out, "drafted nothing" in out) == (True, bool(line))
