"""The table of room sizes that docs/architecture.md shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.room_sizes import BEGIN, END, code_lines, core_files, room_sizes, with_table

ROOT = Path(__file__).parents[2]


def test_script_prints_every_room():
    done = subprocess.run(
        [sys.executable, "scripts/room_sizes.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    rooms = {path.parent.name for path in (ROOT / "strobe").glob("*/__init__.py")}
    assert len(rooms) > 10
    assert [room for room in sorted(rooms) if f"| `{room}/` | " not in done.stdout] == []
    assert "| of which the core | " in done.stdout


def test_only_lines_of_code_count(tmp_path: Path):
    room = tmp_path / "room"
    room.mkdir()
    text = '"""A docstring\nof two lines."""\n\n# a comment\nvalue = """a\nstring"""\n'
    (room / "one.py").write_text(text + "def f():\n    '''Return.'''\n    return 1\n")
    (tmp_path / "two.py").write_text("x = 1\n")
    assert code_lines(room / "one.py") == 4
    assert room_sizes(tmp_path) == {"room/": (1, 4), "files at the root": (1, 1)}


def test_core_has_engine_and_no_outer_room():
    names = {path.relative_to(ROOT / "strobe").as_posix() for path in core_files()}
    assert {"engine/engine.py", "models/families/qwen3.py", "step.py"} <= names
    assert not [name for name in names if name.startswith(("server/", "kernels/", "tools/"))]
    assert "models/families/gemma4.py" not in names


def test_core_must_exist(tmp_path: Path):
    with pytest.raises(ValueError, match="strobe/engine does not exist; correct CORE"):
        core_files(tmp_path)


def test_page_has_room_for_the_table():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert with_table(with_table(page, "| a |\n"), "| b |\n").count("| b |") == 1
    assert with_table(f"{BEGIN}old\n{END}after\n", "new\n") == f"{BEGIN}\nnew\n\n{END}after\n"
    with pytest.raises(ValueError, match="no marks"):
        with_table("text", "new\n")
