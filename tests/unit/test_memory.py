"""The memory of the KV cache: all that a GPU has left, on a CPU what the model's context needs."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import DEMO_MODELS, EngineConfig, Limits
from strobe.kv.kv_store import KVSpec, KVStore
from strobe.models.architectures import load_target_config
from strobe.runner import memory
from strobe.runner.buckets import Buckets
from strobe.runner.memory import plan_pages, scratch_bytes


def test_grammar_buffers_fit_narrow_steps():
    """A captured feature takes the rows of two steps and of the persistent buffer."""
    decoder = load_target_config(Path(DEMO_MODELS) / "target").decoder
    limits = Limits(4096, 256, 2048, 3, 16, drafter_block_size=16)
    sizes = [scratch_bytes(limits, decoder, features, torch.bfloat16) for features in (0, 1)]
    rows = 2048 + 256 * 4 + Buckets(256, 3, 16).max_rows
    assert sizes[1] - sizes[0] == rows * decoder.hidden_size * 2


def pages(per_token: int, *, context: int, max_num_seqs: int = 32, **options: Any) -> int:
    """Return the number of pages on a CPU, for a model with these bytes of K/V per token."""
    limits = Limits(context, max_num_seqs, 2048, 0, 16)
    spec = KVSpec(((1, per_token // 8),), torch.float32)
    return plan_pages(EngineConfig(device="cpu", **options), limits, [spec], torch.device("cpu"))


def test_cpu_cache_fits_the_context_of_a_small_model(monkeypatch: pytest.MonkeyPatch):
    """SmolLM2's target and drafter: one context of 8,192 tokens, not 1 GiB."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 << 30)
    assert pages(50_000, context=8192) * 16 == 8192 + 16
    assert pages(50_000, context=2048) * 16 == 32 * 256 + 16, "room for many short requests"
    assert pages(50_000, context=2048, max_num_seqs=4) * 16 == 2048 + 16
    assert pages(50_000, context=8192, kv_cache_memory="1GiB") == (1 << 30) // 800_000


def test_cpu_cache_of_a_large_model(monkeypatch: pytest.MonkeyPatch):
    """At least one full context; for short requests at most 1 GiB; at most half of the memory."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 20 << 30)
    assert pages(400_000, context=2048) == (1 << 30) // 6_400_000
    assert pages(400_000, context=16_384) * 16 == 16_384 + 16
    with pytest.raises(ValueError, match="max_model_len is 32768"):
        pages(400_000, context=32_768)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_cache_is_resident_from_the_start():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    store = KVStore(KVSpec(((2, 64),), torch.float32), 4096, 16, torch.device("cpu"))
    assert resident() - before > 0.9 * store.data.nbytes
