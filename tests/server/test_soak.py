"""The soak in a short form: benchmarks/soak.py with few streams and a count of requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from served import ENVIRONMENT, ROOT


def test_a_few_hundred_good_bad_and_broken_requests_leave_the_server_as_it_was(tmp_path: Path):
    """A queue of eight places makes many of them wait for room."""
    found = tmp_path / "soak.json"
    command = [sys.executable, "benchmarks/soak.py", "--streams=40", "--requests=240"]
    run = subprocess.run(
        [*command, "--max-waiting=8", f"--json={found}"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(found.read_text())
    assert not report["faults"]
    became = report["requests"]
    assert sum(became.values()) >= 300
    good = {
        kind: count for kind, count in became.items() if kind.startswith(("chat", "compl", "resp"))
    }
    assert sum(count for kind, count in good.items() if kind.endswith(": answered")) > 80
    assert sum(count for kind, count in good.items() if kind.endswith(": left")) > 20
    for kind in ("bad body: refused", "bad HTTP: refused", "oversized prompt: refused"):
        assert became[kind] > 0
    assert report["asked_again_after_429"] > 0
