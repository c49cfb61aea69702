"""The lower bounds of dependencies, as `make test-floors` installs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import floors

ROOT = Path(__file__).parents[2]


def test_each_requirement_is_pinned_to_its_floor():
    pins = floors.floors(["a>=1.2", "b[c]>=3", "d-e>=0.21; sys_platform != 'win32'"])
    assert list(pins.values()) == ["a==1.2", "b[c]==3", "d-e==0.21; sys_platform != 'win32'"]
    with pytest.raises(
        ValueError, match=r"'a<2' in pyproject\.toml is not of the form NAME>=FLOOR"
    ):
        floors.floors(["a<2"])


def test_constraints_are_no_older_than_floors():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)

    def numbers(version: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", version)]

    for name, pin in floors.declared().items():
        floor = pin.partition("==")[2].partition(";")[0]
        assert name not in versions or numbers(versions[name]) >= numbers(floor), name


def test_suite_and_its_tools_exist():
    assert [path for path in floors.SUITE if not (ROOT / path).exists()] == []
    assert len(floors.test_tools()) == len(floors.TEST_TOOLS)
