"""Fixtures for tests of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from strobe.text.tokenizer import Tokenizer
    from tests.support.text_pair import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Return a random pair that reads text; tests must not change it."""
    from tests.support.text_pair import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    from strobe.config import DEMO_MODELS
    from strobe.text.tokenizer import Tokenizer

    return Tokenizer(DEMO_MODELS / "target")


@pytest.fixture(autouse=True)
def no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep standard error the same on slow machines."""
    from strobe.terminal import progress

    monkeypatch.setattr(progress, "INTERVAL", 1e6)


@pytest.fixture(autouse=True, scope="module")
def no_timed_steps() -> Iterator[None]:
    """Let engines that adapt start at once, without costs that depend on the machine: only one kind
    of step is timed, which tells too little."""
    from strobe.warmup import cost_measurement

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(cost_measurement.SECONDS, "cpu", 0.0)
        yield


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """main(*arguments) -> (exit status, standard output, standard error)."""

    from strobe.cli import main as cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            status = int(exit.code or 0)
        return status, *capsys.readouterr()

    return run
