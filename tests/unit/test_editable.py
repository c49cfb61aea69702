"""An editable installation, used from the directory that contains the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as build, sys; build.build_editable(sys.argv[1])"
SCRIPT = "import site, sys; site.addsitedir(sys.argv[1]); from strobe import LLM; print(LLM)"


def test_script_beside_the_clone_imports_the_package(tmp_path: Path):
    """The clone's folder has the package's name, and no __init__.py."""
    clone, site = tmp_path / "strobe", tmp_path / "site"
    package = clone / "strobe"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.0'\nLLM = 'the engine'\n")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path)],
        cwd=clone,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)

    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-S", "script.py", str(site)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert (run.stdout, run.stderr) == ("the engine\n", "")
