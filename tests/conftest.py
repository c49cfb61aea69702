"""Shared fixtures: one tiny pair on disk per session, and one thread for torch."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.full_marks import mark_full_combinations

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported
# Descriptions of GGUF files and packaged models are cached outside the user's own cache.
if "STROBE_TEST_CACHE" not in os.environ:
    os.environ["STROBE_TEST_CACHE"] = tempfile.mkdtemp(prefix="strobe-tests-")
    atexit.register(shutil.rmtree, os.environ["STROBE_TEST_CACHE"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["STROBE_TEST_CACHE"]

import torch

gc.disable()  # until tests run: imports and collection create much and leave no garbage

# Triton chooses its interpreter when it is first imported, which transformers may do.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Scripts in the background start with Ctrl-C ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("strobe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("strobe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make test-all` runs."""
    mark_full_combinations(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage of the tests only, without a search through all modules and test items. What
    tests share grows, so that searches through all of it took a tenth of the time: make them rare.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Undo what a test and its fixtures change about the process's logging, such as the level.
    Begin each test with gradients, whatever the ones before it left."""
    names = (None, "strobe", "strobe.access", "uvicorn", "uvicorn.error", "uvicorn.access")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, logger.propagate, logger.handlers[:]) for logger in loggers]
    disabled = logging.root.manager.disable
    with torch.inference_mode(False):
        result = yield
    logging.disable(disabled)
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
    return result


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the options that repeat a random test order, which -q hides from the header."""
    if config.getoption("random_order_enabled", False):
        seed = config.getoption("random_order_seed").removeprefix("default:")
        terminalreporter.write_line(f"in random order: --random-order --random-order-seed={seed}")


@dataclass(frozen=True)
class Target:
    """A tiny target: transformers' model of it, and its directory."""

    hf: Any
    path: Path


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Return the tiny target that most tests share."""
    from tests.support.tiny_checkpoints import make_target

    path = tmp_path_factory.mktemp("target")
    return Target(make_target(path), path)


@pytest.fixture(scope="session", autouse=True)
def without_gpu() -> Iterator[Callable[[], bool]]:
    """Hide GPUs, so that tests run on the CPU; yield the real check for one."""
    import torch

    real = torch.cuda.is_available
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield real


@pytest.fixture(autouse=True)
def with_gpu_where_marked(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    without_gpu: Callable[[], bool],
) -> None:
    """Show the GPU to tests marked `gpu`."""
    if request.node.get_closest_marker("gpu") is not None:
        monkeypatch.setattr("torch.cuda.is_available", without_gpu)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Callable[..., Path]:
    """draft(**options of make_draft) -> the drafter's directory, written once."""
    from tests.support.tiny_checkpoints import make_draft

    directories: dict[str, Path] = {}

    def get(**options: Any) -> Path:
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        if key not in directories:
            directories[key] = make_draft(tmp_path_factory.mktemp("draft"), **options)
        return directories[key]

    return get
