"""Kernels run compiled on a GPU, and in Triton's interpreter without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
# Triton chooses the interpreter when a kernel is decorated: set it before importing any kernels.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

LANGUAGE = {"triton.language", "triton.language.core"}


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch, without_gpu: Callable[[], bool]) -> None:
    """Let these tests see the machine's GPU, which other tests hide."""
    monkeypatch.setattr("torch.cuda.is_available", without_gpu)


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    """Let Triton's interpreter patch its language once per kernel. It does so for each call of a
    device function, a third of its time, and computes the same NumPy dtypes over and over."""
    if HAS_GPU:
        yield
        return
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set[str]()
    numpy_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def patch(function: FunctionType) -> interpreter._LangPatchScope:
        values = function.__globals__.values()
        names = {value.__name__ for value in values if isinstance(value, ModuleType)} & LANGUAGE
        if names and names <= patched:
            return interpreter._LangPatchScope()  # nothing to restore
        scope = patch_language(function)
        patched.update(names)
        restore = scope.restore

        def restore_all() -> None:  # called after a kernel, never after a device function
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    def cached_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind)
        return dtypes[name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch)
        monkeypatch.setattr(interpreter, "_get_np_dtype", cached_dtype)
        yield


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loop bounds in Triton 3.6's interpreter, arrays [1], usable as integers in numpy 2.4."""
    if HAS_GPU:
        return
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: interpreter._LangPatchScope) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
