"""What the commands of `strobe/tools` print and write, word for word, with numbers masked.

After an intended change, record anew with STROBE_RECORD_OUTPUT=1 and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import DEMO_MODELS
from strobe.tools.bench import rates
from strobe.tools.report import device_name

RECORDED = Path(__file__).parents[1] / "recorded" / "tools"
VARIABLE = ("config", "limits", "shapes", "costs", "definitions", "settings")
"""Entries of a JSON file that list settings or depend on the machine."""
CPU = "--device=cpu"
SHORT = ("--concurrency=1,2", "--max-tokens=4")
COMMANDS = {
    "bench_step": ("bench", "step", CPU, "--concurrency=1,2", "--steps=2", "--warmup=0",
                   "--prompt-len=8", "--prefill=2x4", "--json={dir}/bench_step.json"),
    "bench_offline": ("bench", "offline", CPU, *SHORT, "--prompts=2", "--repeats=1",
                      "--json={dir}/bench_offline.json"),
    "bench_record": ("bench", "record", CPU, "--prompts=2", "--max-tokens=6", "--ignore-eos",
                     "--out={dir}/traces.npz"),
    "bench_load": ("bench", "load", CPU, *SHORT, "--answers=2", "--prompt-len=4",
                   "--ways=plain,7,adaptive", "--acceptance-rate=0.5",
                   "--json={dir}/bench_load.json"),
    "bench_load_rate": ("bench", "load", CPU, "--concurrency=2", "--max-tokens=4", "--rate=50",
                        "--answers=2", "--prompt-len=4", "--ways=plain,7"),
    "bench_break_even": ("bench", "load", CPU, "--break-even", "--concurrency=1,2",
                         "--contexts=64,999999", "--json={dir}/bench_break_even.json"),
    "eval_acceptance": ("eval", "acceptance", CPU, "--prompts=6", "--max-tokens=4",
                        "--expect=demo"),
    "eval_accuracy": ("eval", "accuracy", CPU, "--prompts=2", "--max-tokens=4",
                      "--expect-accuracy=0.5"),
    "eval_speed": ("eval", "speed", CPU, *SHORT, "--prompts=2", "--output={dir}"),
    "doctor": ("doctor", CPU),
    "info": ("info",),
    "demo": ("demo", CPU, "--prompts=2", "--max-tokens=4", "--repeats=1"),
}  # fmt: skip
SLOW = ("doctor", "demo", "bench_load_rate", "eval_accuracy")


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's rates with small buffers."""
    monkeypatch.setattr(rates, "_CPU", (1 << 20, 64))


def masked(text: str, directory: Path) -> str:
    """Return the text without numbers, widths of columns, and names of this machine."""
    names = {
        str(directory): "DIRECTORY",
        str(DEMO_MODELS): "DEMO",
        device_name(torch.device("cpu")): "DEVICE",
        torch.__version__: "VERSION",
    }
    for name, mask in names.items():
        text = text.replace(name, mask)
    text = re.sub(r"\b[0-9a-f]{16}\b", "HASH", text)
    text = re.sub(r"[+-]?(\d[\d,]*\d|\d)?\.?\d+(e\+\d+)?", "#", text)
    text = re.sub(r"(?<= )(-|[+-]inf)(?=\s)", "#", text)
    text = re.sub(r"(?<=best other way, ).*", "WAY.", text)
    text = re.sub(r" +", " ", re.sub(r"[─━]+", "─", text))
    return "\n".join(line.strip() for line in text.splitlines()) + "\n"


def outline(value: Any, name: str = "") -> Any:
    """Return the keys of a JSON value, with the first entry of each list and the types of the
    others."""
    if isinstance(value, dict):
        if name in VARIABLE:
            return "object"
        return {key: outline(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [outline(entry) for entry in value[:1]]
    if value is None or isinstance(value, int | float):
        return "number"
    return type(value).__name__


def check(name: str, text: str) -> None:
    """Compare with the recorded text, or record it."""
    path = RECORDED / name
    if os.environ.get("STROBE_RECORD_OUTPUT"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in COMMANDS]
)
def test_command_prints_and_writes_as_recorded(name: str, main: Callable[..., Any], tmp_path: Path):
    words = [word.format(dir=tmp_path) for word in COMMANDS[name]]
    status, out, err = main(*words)
    assert status in (0, 1)
    assert "Traceback" not in err
    out = re.sub(r"Plots need .*\n", "", out)
    check(f"{name}.txt", masked(out, tmp_path))
    for path in sorted([*tmp_path.glob("*.json"), *tmp_path.glob("*.md")]):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            text = json.dumps(outline(json.loads(text)), indent=1) + "\n"
        else:
            text = re.sub(r"!\[.*\n+", "", text)  # drawn only where matplotlib is installed
            text = re.sub(r"- Plots need .*\n", "", text)
            text = re.sub(r"(?<=[^\n|])\n *(?=[a-z`])", " ", text)  # depends on names' lengths
            text = masked(re.sub(r"\d{4}-\d\d-\d\d", "DATE", text), tmp_path)
        check(f"{name}.{path.stem}{path.suffix}" if path.stem == "report" else path.name, text)
