"""What /proc says of processes, which may end at any time."""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def children_of(pid: int, word: str) -> list[int]:
    """Return the ids of a process's children with a word in their command lines."""
    children: list[int] = []
    for path in (PROC / str(pid) / "task").glob("*/children"):
        children += map(int, _read(path).split())
    return [child for child in children if word in _read(PROC / str(child) / "cmdline")]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not asked for its exit status."""
    state = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return not state or state[0] == "Z"


def _read(path: Path) -> str:
    """Return a file's text; empty if its process or thread has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
