"""Thread waiting is set at load, before torch is imported, and never overrides the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strobe.host import openmp

VARIABLES = ("OMP_NUM_THREADS", *openmp.WAIT_VARIABLES)


def test_idle_cores_spin_briefly():
    assert openmp.choose_environment({}, 2, 2, 2) == {"GOMP_SPINCOUNT": str(openmp.SPIN_COUNT)}


@pytest.mark.parametrize(("free", "threads"), [(-3, "1"), (0, "1"), (1, "1"), (3, "3")])
def test_busy_cores_are_left_alone_and_nothing_spins(free: int, threads: str):
    expected = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    assert openmp.choose_environment({}, 4, 4, free) == expected


@pytest.mark.parametrize("name", openmp.WAIT_VARIABLES)
@pytest.mark.parametrize("free", [1, 8])
def test_user_settings_are_not_overridden(name: str, free: int):
    assert openmp.choose_environment({name: "7", "OMP_NUM_THREADS": "9"}, 2, 8, free) == {}


@pytest.mark.parametrize(("usable", "threads"), [(2, "2"), (8, None)])
def test_quota_limits_threads(usable: int, threads: str | None):
    assert openmp.choose_environment({}, usable, 8, 8).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu.max": "100 0"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_container_quota_is_read(files: dict[str, str], cores: int | None, tmp_path: Path):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert openmp.core_quota(tmp_path) == cores


@pytest.mark.parametrize(
    ("running", "enough", "free"),
    [(1, 4, 4), (2, 4, 3), (5, 4, 0), (2, 3, 3), (4, 1, 1), (9, 1, 0)],
)
def test_free_cores_are_those_without_a_running_thread(
    running: int, enough: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(openmp, "READ_INTERVAL", 0)
    file = tmp_path / "loadavg"
    file.write_text(f"9.00 9.00 9.00 {running}/512 12345\n")
    assert openmp.free_cores(enough, file) == free


@pytest.mark.parametrize("text", ["", "1.0 2.0", "1 2 3 x/y 4"])
def test_unknown_load_counts_as_idle(text: str, tmp_path: Path):
    file = tmp_path / "loadavg"
    assert openmp.free_cores(3, file) == 3
    file.write_text(text)
    assert openmp.free_cores(3, file) == 3


def environment_after(code: str, **variables: str) -> dict[str, str]:
    """Return the VARIABLES that a fresh interpreter has after running the code."""
    others = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    show = (
        f"import os; print(*[f'{{n}}={{os.environ[n]}}' for n in {VARIABLES} if n in os.environ])"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{show}"], env=others | variables, check=True,
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return dict(part.split("=") for part in run.stdout.split())


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch has on Linux")
def test_import_sets_how_threads_wait():
    for code in ("import strobe", "import strobe.cli.main", "from strobe import LLM"):
        assert {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & environment_after(code).keys()
    own = environment_after("import strobe", OMP_WAIT_POLICY="ACTIVE", OMP_NUM_THREADS="3")
    assert own == {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "3"}
    late = environment_after("import sys; sys.modules['torch'] = sys; import strobe")
    assert late == {}
