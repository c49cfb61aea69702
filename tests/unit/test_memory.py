"""The memory of the KV cache: all that a GPU has left, on a CPU what the model's context needs."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import DEMO_MODELS, EngineConfig, Limits
from strobe.engine.build import build, resolve
from strobe.kv.kv_store import KVSpec, KVStore
from strobe.models.architectures import load_target_config
from strobe.runner import memory
from strobe.runner.buckets import Buckets
from strobe.runner.memory import PageGroup, PartBytes, plan_pages, scratch_bytes
from tests.support.recurrent_checkpoints import make_hybrid


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
    groups = [PageGroup(16 * per_token)]
    config = EngineConfig(device="cpu", **options)
    return plan_pages(config, limits, groups, torch.device("cpu"), parts=PartBytes())[0]


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


def test_bill_counts_each_part_that_takes_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_hybrid(tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", max_model_len=96, max_num_seqs=2)
    resolved = resolve(config)
    with caplog.at_level("INFO", "strobe.engine.build"):
        parts = build(resolved)
    bill = resolved.memory_bill([parts.pool.num_pages])
    states = parts.states
    assert states is not None
    model: Any = parts.runner.model
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if resolved.backends.weights.packed == "float32":
        weights += model.output.weight.nbytes  # the embedding's weight, packed as a head
    assert bill == {
        "weights of target": weights,
        "keys and values of target": parts.stores["target"].data.nbytes,
        "states of requests": states.length.nbytes + sum(t.nbytes for t in states.tensors),
        "kept states": states.kept_state.nbytes + states.kept_window.nbytes,
        "sampling tables": parts.sampling.num_bytes(2, resolved.target.decoder.vocab_size),
        "page tables": 2 * 6 * 8,
    }
    (line,) = [message for message in caplog.messages if message.startswith("Memory of cpu")]
    assert f"; together {sum(bill.values()):,}. The KV cache holds " in line


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_cache_is_resident_from_the_start():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    store = KVStore(KVSpec(((2, 64),), torch.float32), [4096], 16, torch.device("cpu"))
    assert resident() - before > 0.9 * store.data.nbytes
