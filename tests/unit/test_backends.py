"""The choice of what runs on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.backend_choice import BackendChoice, choose_backends
from strobe.models.architectures import load_target_config
from tests.support.tiny_checkpoints import make_target


def chosen(path: Path, **options: str) -> BackendChoice:
    target, device = load_target_config(path), torch.device("cuda")
    return choose_backends(EngineConfig(**options), target, [], device, torch.bfloat16)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], ids=str)
def test_gpus_run_what_their_compute_capability_allows(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Kernels from 8.0 on, keys and values in FP8 from 8.9 on, by plain torch everywhere."""
    make_target(tmp_path, head_dim=64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice = chosen(tmp_path)
    assert choice.kernels == choice.graphs == (capability >= (8, 0))
    reference = chosen(tmp_path, kv_cache_dtype="fp8", attention_backend="reference")
    assert reference.kv_dtype == torch.float8_e4m3fn
    if (8, 0) <= capability < (8, 9):
        with pytest.raises(ValueError, match=r"kv_cache_dtype is 'fp8', but this GPU has no FP8"):
            chosen(tmp_path, kv_cache_dtype="fp8")
    else:
        assert chosen(tmp_path, kv_cache_dtype="fp8").kv_dtype == torch.float8_e4m3fn


def test_compile_is_refused_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_target(tmp_path, head_dim=64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    target = load_target_config(tmp_path)
    device = torch.device("cuda")
    with pytest.raises(ValueError, match=r"compile is set, but the device is cuda.*leave compile"):
        choose_backends(EngineConfig(compile=True), target, [], device, torch.bfloat16)
