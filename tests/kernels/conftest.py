"""Kernels run compiled where there is a GPU and in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
# The interpreter is chosen when a kernel is decorated, so before any module of kernels is imported.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def with_gpu(monkeypatch: pytest.MonkeyPatch, without_gpu: Callable[[], bool]) -> None:
    """These tests see the machine as it is."""
    monkeypatch.setattr("torch.cuda.is_available", without_gpu)


@pytest.fixture(autouse=True)
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6's interpreter makes bounds of loops from arrays [1], which numpy 2.4 refuses."""
    if HAS_GPU:
        return
    from triton.runtime import interpreter

    before = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: interpreter._LangPatchScope) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
