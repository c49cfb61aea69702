"""Grammars that never finish, in the trial process and after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.grammars import trial as trials
from strobe.grammars.trial import GrammarsUnavailable, GrammarTrial
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling_params import StructuredOutputs
from tests.server.support.polling import until
from tests.support.processes import has_ended

FILE = DEMO_MODELS / "target" / "tokenizer.json"
RULES = "\n".join(f'x{i}: x{i + 1} x{i + 1} | "{i}"' for i in range(3000))
HEAVY = StructuredOutputs(grammar=f'start: x0\n{RULES}\nx3000: "b"')
LIGHT = StructuredOutputs(regex="[ab]+")

ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "first": ({"grammar": 'start: /a*/ start "a"'}, "a"),
    "after one": ({"grammar": 'start: /a+/ "a"'}, "a"),
    "after some": ({"grammar": 'start: ("b"|"c"){3} /(ab)+/ "ab"'}, "bcbab"),
    "option": ({"grammar": '%llguidance {"no_forcing": false}\nstart: /a+/ "a"'}, "a"),
    "alternative": ({"regex": "x", "alternative": 'start: /a+/ "a"'}, "a"),
    "white space": (
        {"json": {"items": {"const": True}, "type": "array", "minItems": 1,
                  "x-guidance": {"whitespace_pattern": "t+"}}}, "[tt"),
}  # fmt: skip
"""Grammars, and texts after which llguidance would force letters without end."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(FILE, 2048, [2])


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(FILE, 2048, [2])
    yield trial
    trial.close()


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_forced_text_is_not_computed(compiler: GrammarCompiler, name: str):
    fields, text = ENDLESS[name]
    matcher = compiler.compile(StructuredOutputs(**fields))
    for letter in text:
        (token,) = compiler.tokenizer.tokenize_str(letter)
        assert matcher.compute_ff_tokens() == []
        assert any(matcher.compute_bitmask())
        assert matcher.consume_token(token)
    assert any(matcher.compute_bitmask())
    assert not matcher.is_error()


def test_grammar_over_the_time_limit_is_rejected_and_the_next_tried(trial: GrammarTrial):
    trial.check(LIGHT)
    first, trial.seconds = trial.pid, 1e-3
    with pytest.raises(ValueError, match=r"more than 0\.001 seconds; simplify it.$"):
        trial.check(HEAVY)
    trial.seconds = trials.TIMEOUT_SECONDS
    with pytest.raises(ValueError, match=r"more than 0\.001 seconds"):  # it is not tried again
        trial.check(HEAVY)
    assert trial.pid != first
    trial.check(StructuredOutputs(choice=("a", "b")))
    assert trial.pid != first


def test_grammar_over_the_memory_limit_is_rejected(
    trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trials, "MEMORY_BYTES", 1 << 20)
    small = GrammarTrial(FILE, 2048, [2])
    with pytest.raises(ValueError, match=r"more than 1 MiB of memory; simplify it\.$"):
        small.check(HEAVY)
    small.close()
    trial.check(HEAVY)


def test_trial_caches_verdicts_and_reuses_its_process(trial: GrammarTrial):
    wrong = StructuredOutputs(regex="(a")
    assert trial.check(LIGHT) == trial.check(LIGHT)
    with pytest.raises(ValueError, match="does not compile") as first:
        trial.check(wrong)
    pid = trial.pid
    os.kill(pid, signal.SIGSTOP)  # a request to it would wait forever
    trial.check(LIGHT)
    with pytest.raises(ValueError, match="does not compile") as second:
        trial.check(wrong)
    assert str(first.value) == str(second.value)
    assert trial.pid == pid


def test_killed_trial_process_is_replaced(trial: GrammarTrial):
    trial.check(LIGHT)
    first = trial.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    trial.check(StructuredOutputs(regex="c"))
    assert trial.pid != first


def test_trial_is_unavailable_until_its_process_starts(monkeypatch: pytest.MonkeyPatch):
    trial = GrammarTrial(FILE, 2048, [2])
    executable = sys.executable
    for wrong in ("/no/such/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", wrong)
        with pytest.raises(GrammarsUnavailable, match=r"^Structured output is unavailable: .*\.$"):
            trial.check(LIGHT)
    monkeypatch.setattr(sys, "executable", executable)
    trial.start()
    trial.check(LIGHT)
    trial.close()


def test_trial_process_imports_neither_torch_nor_numpy():
    code = "import sys, strobe.grammars.trial_process as t\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "llguidance" in loaded
    assert not {"torch", "transformers", "numpy", "pydantic"} & loaded


SCRIPT = """
import os, signal, sys
from strobe.grammars.trial import GrammarTrial
from strobe.sampling_params import StructuredOutputs
trial = GrammarTrial(sys.argv[1], 2048, [2])
trial.check(StructuredOutputs(regex="a"))
print(trial.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "interrupted":
    os.killpg(0, signal.SIGINT)
"""


@pytest.mark.parametrize("ending", ["killed", "interrupted", "returned"])
def test_trial_process_exits_with_its_owner(ending: str):
    """It exits when its pipe closes."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(FILE), ending],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, start_new_session=True,
    )  # fmt: skip
    pid = int(done.stdout)
    until(lambda: has_ended(pid), "the trial process has ended")
    assert "trial_process" not in done.stderr
