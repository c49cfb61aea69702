"""The command line with closed or full standard files, and with an early Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strobe.cli import main as cli
from strobe.parallel.group import RankFailed
from tests.support.processes import PROC, children_of

ROOT = Path(__file__).parents[2]


def shell(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `strobe ARGUMENTS` in a shell, with redirections."""
    return subprocess.run(
        f"{sys.executable} -m strobe {arguments}",
        shell=True, cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ("chat <&-", 2, "Standard input is closed, but a chat reads it; leave it open."),
        ("generate hi >&-", 2, "Standard output is closed, but answers go there; leave it open."),
        ("--help >/dev/full", 1, "Standard output cannot be written: No space left on device."),
        ("info >/dev/full", 1, "Standard output cannot be written: No space left on device."),
        (
            "generate hi --max-tokens=1 --device=cpu --no-adaptive >/dev/full",
            1,
            "Standard output cannot be written: No space left on device.",
        ),
    ],
)
def test_closed_or_full_standard_file_is_a_one_line_error(
    arguments: str, status: int, sentence: str
):
    run = shell(arguments)
    assert (run.returncode, run.stdout, run.stderr) == (status, "", f"strobe: {sentence}\n")


def test_command_runs_without_unneeded_standard_file():
    assert shell("info --json <&-").returncode == 0
    assert shell("generate 2>&-").returncode == 2


def test_chat_without_input_ends_quietly():
    run = shell("chat --device=cpu --no-adaptive --max-tokens=1 </dev/null")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_ctrl_c_during_imports_is_quiet(main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    assert main("serve") == (130, "", "")


@pytest.mark.full
@pytest.mark.skipif(not PROC.exists(), reason="needs /proc")
def test_ctrl_c_while_a_server_loads_is_quiet():
    """As on a terminal, the whole process group receives it, the engine's process included."""
    server = subprocess.Popen(
        [sys.executable, "-m", "strobe", "serve", "--port=0", "--device=cpu", "--no-adaptive"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not children_of(server.pid, "spawn_main"):
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)  # the engine's process imports torch, which takes seconds
        os.killpg(server.pid, signal.SIGINT)
        error = server.communicate(timeout=60)[1]
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 0, error
    assert "Traceback" not in error
    assert "KeyboardInterrupt" not in error


def test_end_of_a_rank_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def lose_rank(arguments: Any) -> int:
        raise RankFailed("Rank 1 has ended in step 3 (exit code -9).")

    monkeypatch.setattr(cli, "_run", lose_rank)
    assert cli.main(["generate"]) == 1
    assert capsys.readouterr().err == "strobe: Rank 1 has ended in step 3 (exit code -9).\n"
