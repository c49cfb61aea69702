"""Kernels run compiled on a GPU, and in Triton's interpreter without one."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
# Triton chooses the interpreter when a kernel is decorated: set it before importing any kernels.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch, without_gpu: Callable[[], bool]) -> None:
    """Let these tests see the machine's GPU, which other tests hide."""
    monkeypatch.setattr("torch.cuda.is_available", without_gpu)


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
