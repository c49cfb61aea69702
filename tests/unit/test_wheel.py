"""A wheel built from the source contains the demo models and runs them."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from strobe import __version__

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out), "."]
    subprocess.run([*command, "--no-build-isolation"], cwd=ROOT, check=True)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_contains_only_models_and_examples(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    models = ("target/model.safetensors", "target/chat_template.jinja", "draft/config.json")
    for name in (*models, "heldout.jsonl"):
        assert f"strobe/demo_models/{name}" in names
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        assert f"strobe/smollm2_draft/{name}" in names
    assert "strobe/py.typed" in names
    assert "strobe/tools/eval/published_figures.json" in names
    assert wheel.name.startswith(f"strobe-{__version__}-")
    assert wheel.stat().st_size < 60e6
    assert not [name for name in names if name.startswith("strobe/demo_models/tasks")]
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "scripts/"))]


def test_installed_wheel_runs_the_demo(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "strobe",
            "demo",
            "--json",
            "--prompts",
            "2",
            "--repeats",
            "1",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(run.stdout)
    assert figures["identical"] is True
    assert figures["prompts"] == 2
