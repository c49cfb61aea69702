"""Kernels run compiled on a GPU, and in Triton's interpreter without one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import prod
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
    """Make Triton's interpreter two to three times as fast: patch its language once per kernel, not
    for each call of a device function; compute NumPy dtypes and the attributes of shapes once; and
    skip checks for overflow, whose results it drops unless it debugs."""
    if HAS_GPU:
        yield
        return
    from triton._utils import validate_block_shape
    from triton.language import core
    from triton.runtime import interpreter

    patch_language, patched = interpreter._patch_lang, set[str]()
    numpy_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    @cache
    def imported(function: FunctionType) -> set[str]:
        values = function.__globals__.values()
        return {value.__name__ for value in values if isinstance(value, ModuleType)} & LANGUAGE

    def patch(function: FunctionType) -> interpreter._LangPatchScope:
        names = imported(function)
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

    @cache
    def attributes(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(prod(shape))

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = attributes(tuple(kind.shape) if kind.is_block() else ())

    @cache
    def checked(shape: tuple[Any, ...]) -> tuple[Any, int]:
        sizes = [getattr(size, "value", size) for size in shape]
        return core.tuple(sizes), validate_block_shape(sizes)

    def init_block(self: Any, element: Any, shape: Sequence[Any]) -> None:
        assert shape, "a block has a dimension or more"
        self.shape, self.numel = checked(tuple(shape))
        self.element_ty, self.name = element, f"<{self.shape}, {element}>"

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(core.tensor, "__init__", init_tensor)
        monkeypatch.setattr(core.block_type, "__init__", init_block)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
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
