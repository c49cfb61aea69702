"""Thread waiting is set at load, before torch is imported, and never overrides the user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strobe.host import openmp

VARIABLES = ("OMP_NUM_THREADS", openmp.CHOSEN_THREADS, *openmp.WAIT_VARIABLES)


def test_idle_cores_spin_briefly():
    assert openmp.choose_environment({}, 2, 2, 2) == {"GOMP_SPINCOUNT": str(openmp.SPIN_COUNT)}


@pytest.mark.parametrize(("free", "threads"), [(-3, "1"), (0, "1"), (1, "1"), (3, "3")])
def test_busy_cores_are_left_alone(free: int, threads: str):
    """Each thread has an idle core, so it spins: also if there are more of them later."""
    assert openmp.choose_environment({}, 4, 4, free) == {
        "OMP_NUM_THREADS": threads,
        openmp.CHOSEN_THREADS: threads,
        "GOMP_SPINCOUNT": str(openmp.SPIN_COUNT),
    }


def test_more_threads_than_idle_cores_do_not_spin():
    own = {"OMP_NUM_THREADS": "4"}
    assert openmp.choose_environment(own, 4, 4, 3) == {"OMP_WAIT_POLICY": "PASSIVE"}


def load_file(tmp_path: Path, running: int) -> Path:
    file = tmp_path / "loadavg"
    file.write_text(f"9.00 9.00 9.00 {running}/512 12345\n")
    return file


@pytest.mark.parametrize(("running", "threads"), [(1, 4), (2, 3), (3, 2), (4, None), (9, None)])
def test_threads_are_raised_once_cores_are_idle(
    running: int, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that ran for a moment at import had halved the speed of a whole run."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(openmp, "READ_INTERVAL", 0)
    environ = openmp.choose_environment({}, 4, 4, 1)
    file = load_file(tmp_path, running)
    assert openmp.idle_threads(environ, 4, file) == threads
    assert openmp.idle_threads(environ, 4, load_file(tmp_path, 1)) is None, "it is settled"


def test_one_moment_of_idle_cores_raises_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short processes come and go: one read of many that finds idle cores is enough."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    reads = list[float]()

    def wait(seconds: float) -> None:
        reads.append(seconds)
        load_file(tmp_path, 1 if len(reads) == 30 else 2)

    monkeypatch.setattr(openmp.time, "sleep", wait)
    environ = openmp.choose_environment({}, 2, 2, 1)
    assert openmp.idle_threads(environ, 2, load_file(tmp_path, 2)) == 2
    assert len(reads) == 30


def test_threads_of_the_user_are_never_raised(tmp_path: Path):
    idle = load_file(tmp_path, 1)
    assert openmp.idle_threads({"OMP_NUM_THREADS": "1"}, 4, idle) is None
    assert openmp.idle_threads({}, 4, idle) is None, "there are as many as cores"
    others = {"OMP_NUM_THREADS": "1", openmp.CHOSEN_THREADS: "2"}
    assert openmp.idle_threads(others, 4, idle) is None


def test_threads_that_a_parent_chose_are_chosen_anew():
    chosen = {"OMP_NUM_THREADS": "1", openmp.CHOSEN_THREADS: "1"}
    assert openmp.user_threads(chosen) is None
    assert openmp.user_threads({"OMP_NUM_THREADS": "1"}) == "1"
    assert openmp.user_threads({"OMP_NUM_THREADS": "1", openmp.CHOSEN_THREADS: ""}) == "1"
    assert openmp.user_threads({}) is None


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
