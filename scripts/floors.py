"""Install the lowest versions that pyproject.toml allows in their own environment, and run a short
suite there (`make test-floors`).

    python scripts/floors.py [--directory build/floors] [--torch 2.9.0] [--only llguidance,fastapi]

Every dependency of the package and of the extras `eval`, `kv-events` and `otel` is pinned to its
floor; what these depend on is the newest that fits. If two floors contradict each other, pip says
so, and one of them is wrong. pytest and its plug-ins are those of constraints.txt.

torch: on x86-64 Linux PyPI has torch for CUDA only, so that the environment takes 6 GB, of which 3
GB are downloaded once. `--torch` tests another release instead (`--torch 2.13.0`). An index of CPU
builds in PIP_EXTRA_INDEX_URL is preferred.

Not tested: the extras `quack` (it needs a GPU), `ray` (its floor is the release in constraints.txt)
and `dev`; torch's floor on a GPU; answers compared with transformers' own models, most of which
its floor lacks (Strobe itself takes only its tokenizers); other systems and versions of Python than
the one that runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("eval", "kv-events", "otel")
TEST_TOOLS = (
    "pytest",
    "pytest-random-order",
    "pytest-timeout",
    "pytest-xdist",
    "hypothesis",
    "httpx",
    "websockets",
    "openai",
)
SUITE = (
    "tests/server/test_kv_events.py",
    "tests/server/test_metrics.py",
    "tests/server/test_protocol.py",
    "tests/server/test_traces.py",
    "tests/server/test_readme.py",
    "tests/unit/test_cli.py",
    "tests/unit/test_config.py",
    "tests/unit/test_eval_graders.py",
    "tests/unit/test_gguf.py",
    "tests/unit/test_grammar.py",
    "tests/unit/test_pull.py",
    "tests/unit/test_llm.py",
    "tests/unit/test_loading.py",
    "tests/unit/test_options_file.py",
    "tests/unit/test_progress.py",
    "tests/unit/test_text.py",
)
"""Test files that use every dependency, at least one for each."""

_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?P<extras>\[.*?\])?>=(?P<floor>[\w.]+)\s*(?P<marker>;.*)?"
)


def floors(requirements: Iterable[str]) -> dict[str, str]:
    """Return each requirement, pinned to its floor, by name. Raises ValueError without a floor."""
    pinned: dict[str, str] = {}
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement!r} in pyproject.toml is not of the form NAME>=FLOOR.")
        name, extras, floor, marker = match.group("name", "extras", "floor", "marker")
        pinned[name] = f"{name}{extras or ''}=={floor}{marker or ''}"
    return pinned


def declared() -> dict[str, str]:
    """Return the pins of all dependencies that are tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in EXTRAS:
        requirements += project["optional-dependencies"][extra]
    return floors(requirements)


def test_tools() -> list[str]:
    """Return the lines of constraints.txt for the tools that run the suite."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in TEST_TOOLS]


def install(directory: Path, pins: Sequence[str]) -> Path:
    """Make the environment if it is missing, install the pins, and return its interpreter."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *pins, *test_tools(), "--editable", str(ROOT)], check=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "floors")
    parser.add_argument("--torch", help="release of torch to test in place of its floor")
    parser.add_argument("--only", help="comma-separated names to pin; the others are the newest")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; by default a short suite")
    options = parser.parse_args()
    pins = declared()
    if options.torch:
        pins["torch"] = f"torch=={options.torch}"
    if options.only:
        chosen = options.only.split(",")
        unknown = sorted(set(chosen) - set(pins))
        if unknown:
            parser.error(f"{', '.join(unknown)} is no dependency; there are {', '.join(pins)}.")
        pins = {name: pin if name in chosen else name for name, pin in pins.items()}
    print(f"Installing in {options.directory}: {', '.join(pins.values())}", flush=True)
    try:
        python = install(options.directory, list(pins.values()))
    except subprocess.CalledProcessError:
        print("pip cannot install these versions together; its reason is above.", file=sys.stderr)
        return 1
    pytest = [str(python), "-m", "pytest", "-rs", "-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    tests = options.tests or ["-m", "not full", *SUITE]
    return subprocess.run([*pytest, *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
