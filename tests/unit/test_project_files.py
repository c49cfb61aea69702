"""The files that a project needs agree with each other and with the commands that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import strobe
from scripts.release_notes import release_notes

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
CHANGELOG = """# Changelog

## Unreleased

## 0.2.0 (2026-12-01)

- new

## 0.1.0 (2026-11-26)
"""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def workflow_commands(name: str) -> str:
    """Return all commands of a workflow."""
    jobs = yaml.safe_load(read(f".github/workflows/{name}"))["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


def test_version_is_written_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "strobe.__version__"}
    version = re.escape(strobe.__version__)
    headings = rf"^## (?:Unreleased \({version}\)|{version} \(\d{{4}}-\d\d-\d\d\))$"
    assert len(re.findall(headings, read("CHANGELOG.md"), re.MULTILINE)) == 1


def test_images_in_the_pages_have_the_version():
    tags = re.findall(r"strobe(?:-ray)?:(\d+\.\d+\.\d+)", read("docs/deployment.md"))
    for path in DOCKERFILES:
        tags += re.findall(r"strobe:(\d+\.\d+\.\d+)", path.read_text(encoding="utf-8"))
    assert set(tags) == {strobe.__version__}


def test_description_is_the_readmes():
    words = PROJECT["project"]["description"].removeprefix("A ")
    assert words in read("README.md").replace("*", "").replace("\n", " ")


def test_package_is_typed():
    assert (ROOT / "strobe" / "py.typed").exists()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["strobe"]


def test_ci_runs_the_same_script_and_the_floors():
    commands = workflow_commands("ci.yml").splitlines()
    assert ".ci/run" in commands
    assert "make test-floors" in commands


@pytest.mark.parametrize(
    "name", ["CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml", ".pre-commit-config.yaml"]
)
def test_named_make_targets_exist(name: str):
    (declared,) = re.findall(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)
    named = re.findall(r"(?:^|`|run: )make ([a-z-]+)", read(name), re.MULTILINE)
    assert named
    assert set(named) <= set(declared.split())


def test_hooks_run_what_make_check_runs():
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    entries = [hook["entry"].replace(" --force-exclude", "") for hook in hooks]
    makefile = read("Makefile").replace("$(BIN)", ".venv/bin")
    assert len(entries) == 4
    assert [entry for entry in entries if f"\t{entry}" not in makefile] == []


@pytest.mark.parametrize("form", ["bug.yml", "feature.yml"])
def test_issue_forms_have_unique_fields(form: str):
    body = yaml.safe_load(read(f".github/ISSUE_TEMPLATE/{form}"))["body"]
    ids = [field["id"] for field in body if field["type"] != "markdown"]
    assert ids
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_copy_files_that_exist(path: Path):
    text = path.read_text(encoding="utf-8")
    ignored = read(".dockerignore")
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE)]
    names = [name for words in copied for name in words]
    assert names
    for name in names:
        assert (ROOT / name).exists()
        assert f"!{name}\n" in ignored
    assert '\nENTRYPOINT ["strobe"]\n' in text
    assert "\nUSER 10001\n" in text


def test_release_notes_are_the_versions_section():
    assert release_notes("v0.2.0", version="0.2.0", changelog=CHANGELOG) == "- new\n"


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v0.3.0", "0.2.0", "'v0.3.0' does not name version 0.2.0"),
        ("v0.3.0", "0.3.0", r"no heading '## 0\.3\.0 \(DATE\)'"),
    ],
)
def test_release_without_its_section_is_an_error(tag: str, version: str, message: str):
    with pytest.raises(ValueError, match=message):
        release_notes(tag, version=version, changelog=CHANGELOG)
