"""Other projects' clients, each in an environment of its own, get the same answers with speculation
on and off. Skipped where their packages cannot be fetched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    "client",
    # tests/server/test_openai_client.py and test_matrix.py use the same client in `make test`.
    [pytest.param("openai", marks=pytest.mark.nightly), "anthropic", "ollama"],
)
def test_client_gets_the_same_answers_without_drafts(client: str, tmp_path: Path):
    requirements = ROOT / "scripts" / "clients" / f"{client}.txt"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    fetched = subprocess.run([*pip, "-d", str(tmp_path / "fetched"), "-r", str(requirements)])
    if fetched.returncode:
        pytest.skip(f"the packages of {requirements.name} cannot be fetched")
    command = ["scripts/clients/run.py", client, "--count", "3", "--directory", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 equal on and off" in done.stdout
