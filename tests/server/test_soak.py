"""Short forms of benchmarks/soak.py and benchmarks/hostile_grammars.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.support.server_process import ENVIRONMENT, ROOT

GOOD = ("chat", "compl", "resp")


def soak(path: Path, *options: str) -> tuple[dict[str, int], int]:
    """Run a soak. Returns the requests' outcomes by kind and the number of retries, and checks that
    there are no faults."""
    run = subprocess.run(
        [sys.executable, "benchmarks/soak.py", f"--json={path}", *options],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(path.read_text())
    assert not report["faults"]
    return report["requests"], report["asked_again_after_429"]


def count(became: dict[str, int], what: str) -> int:
    """The number of well-formed requests with an outcome."""
    return sum(n for kind, n in became.items() if kind.startswith(GOOD) and kind.endswith(what))


@pytest.mark.full
def test_mixed_requests_leave_no_trace(tmp_path: Path):
    became, _ = soak(tmp_path / "soak.json", "--streams=12", "--requests=60")
    assert sum(became.values()) >= 75
    assert count(became, ": answered") > 15
    assert count(became, ": left") > 3


@pytest.mark.full
def test_mixed_requests_leave_no_trace_with_a_small_pool_and_host_memory(tmp_path: Path):
    options = "--streams=12", "--requests=60", "--small-pool", "--known=12"
    became, _ = soak(tmp_path / "soak.json", *options)
    assert count(became, ": answered") > 8
    assert became["known: answered"] > 3


@pytest.mark.full
def test_hundreds_of_requests_with_short_queue_leave_no_trace(tmp_path: Path):
    """A queue of four makes many of them wait."""
    options = "--streams=40", "--requests=240", "--max-waiting=4"
    became, again = soak(tmp_path / "soak.json", *options)
    assert sum(became.values()) >= 300
    assert count(became, ": answered") > 80
    assert count(became, ": left") > 20
    for kind in ("bad body: refused", "bad HTTP: refused", "oversized prompt: refused"):
        assert became[kind] > 0
    assert again > 0


@pytest.mark.full
def test_hostile_grammars_do_not_disturb_honest_requests(tmp_path: Path):
    """Five of the grammars force endless text. Waiting times and memory are checked by the long
    form only, since a test's machine may be busy."""
    path = tmp_path / "grammars.json"
    run = subprocess.run(
        [sys.executable, "benchmarks/hostile_grammars.py", "--count=40", "--at-once=8",
         "--honest=2", "--alone=0.2", "--most-wait=200",
         "--most-memory=1000", f"--json={path}"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(path.read_text())
    assert report["faults"] == []
    assert report["hostile"].keys() == {"200", "400"}
    assert sum(report["hostile"].values()) == 40
    refused = [line for line in run.stderr.splitlines() if "the grammar does not compile" in line]
    assert refused
    assert all("WARNING strobe.server.generation.run: request " in line for line in refused)
    assert "Traceback" not in run.stderr


def test_soak_reports_any_growth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from soak import Vitals

    now = {"server": 7, "engine": 4}
    before = Vitals(now, now, {"server": 0, "engine": 0}, 4)
    assert before.faults(before) == []
    for change in (
        {"descriptors": {**now, "server": 8}},
        {"threads": {**now, "server": 8}},
        {"threads": {**now, "engine": 5}},
        {"memory": {"server": 0, "engine": 100 << 20}},
        {"tasks": 5},
    ):
        assert len(before._replace(**change).faults(before)) == 1, change
