"""The memory of the KV cache: all that a GPU has left, on a CPU what the model's context needs."""

from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import DEMO_MODELS, EngineConfig, Limits
from strobe.engine.build import build, resolve
from strobe.kv.kv_store import KVSpec, KVStore
from strobe.models.architectures import load_target_config
from strobe.parallel.split import Split
from strobe.runner import memory
from strobe.runner.buckets import Buckets
from strobe.runner.memory import MemoryBill, PageGroup, PartBytes, Scratch, plan_pages, plan_scratch
from strobe.tools.checkpoint_info import describe
from strobe.tools.doctor.pair_checks import memory_facts
from tests.support.rank_threads import ranks
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import make_draft, make_target


def test_grammar_buffers_fit_narrow_steps():
    """A captured feature takes the rows of two steps and of the persistent buffer."""
    decoder = load_target_config(Path(DEMO_MODELS) / "target").decoder
    limits = Limits(4096, 256, 2048, 3, 16, drafter_block_size=16)
    sizes = [plan_scratch(limits, decoder, features, torch.bfloat16).total for features in (0, 1)]
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
    assert bill.parts == {
        "weights of target": weights,
        "keys and values of target": parts.stores["target"].data.nbytes,
        "states of requests": states.length.nbytes + sum(t.nbytes for t in states.tensors),
        "kept states": states.kept_state.nbytes + states.kept_window.nbytes,
        "sampling tables": parts.sampling.num_bytes(2, resolved.target.decoder.vocab_size),
        "page tables": 2 * 6 * 8,
    }
    (table,) = [message for message in caplog.messages if message.startswith("Memory in bytes:")]
    rows = [line.strip().rsplit("  ", 1) for line in table.splitlines()[1:]]
    shown = {name.strip(): value.strip() for name, value in rows}
    assert shown == {
        "device": "cpu",
        **{part: f"{size:,}" for part, size in bill.parts.items()},
        "together": f"{sum(bill.parts.values()):,}",
        "tokens in the KV cache": f"{(parts.pool.num_pages - 1) * 16:,}",
    }


def test_bill_of_a_gpu_counts_steps_graphs_and_pinned_memory(tmp_path: Path):
    make_hybrid(tmp_path)
    config = EngineConfig(str(tmp_path), device="cpu", max_model_len=96, kv_offload_memory="16MiB")
    resolved = resolve(config)
    on_gpu = replace(
        resolved,
        device=torch.device("cuda"),
        backends=resolved.backends._replace(graphs=True),
        scratch=Scratch(rows=1, logits=20, captured=300, sampling=4000, copies=50000),
    )
    bill = on_gpu.memory_bill([10])
    steps = list(bill.parts.items())[-6:-1]
    assert steps == [
        ("tensors of a step", 1),
        ("logits", 20),
        ("captured steps (CUDA graphs)", 300),
        ("copies of pages and states", 50000),
        ("sampling tables", 4000),
    ]
    assert list(bill.host) == ["pages in pinned host memory", "states in pinned host memory"]
    assert sum(bill.host.values()) == on_gpu.host_bytes > 15 << 20
    without = replace(on_gpu, backends=resolved.backends).memory_bill([10]).parts
    assert without["tensors of a step"] == 301
    assert sum(without.values()) == sum(bill.parts.values())


def test_info_log_and_doctor_show_the_same_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    make_target(tmp_path / "target")
    draft = make_draft(tmp_path / "draft")
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    config = EngineConfig(str(tmp_path / "target"), draft=str(draft))
    resolved = resolve(config)
    with caplog.at_level("INFO", "strobe.engine.build"):
        parts = build(resolved)
    bill = resolved.memory_bill([parts.pool.num_pages])
    assert "\n".join(bill.lines()) in caplog.messages
    assert describe(tmp_path / "target", draft)["memory"] == bill.facts()
    assert bill.facts().items() <= memory_facts(resolved).items()
    assert list(bill.parts)[:4] == [
        "weights of target",
        "weights of draft",
        "keys and values of target",
        "keys and values of draft",
    ]


def test_bill_of_ranks_is_the_first_ones_which_none_exceeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    make_target(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    config = EngineConfig(str(tmp_path), device="cpu", tensor_parallel_size=2)
    with caplog.at_level("INFO", "strobe.engine.build"), ranks(config, 2):
        pass
    bills: list[MemoryBill] = []
    for rank in range(2):
        resolved = resolve(config, rank)
        num_pages = resolved.num_pages(sum(resolved.weights.values()))
        bills.append(resolved.memory_bill(num_pages))
    first, other = bills
    assert first.facts()["rank"] == "0 of 2; none holds more"
    assert "\n".join(first.lines()) in caplog.messages
    assert all(size <= first.parts[part] for part, size in other.parts.items())
    assert describe(tmp_path, split=Split.of(config, 0))["memory"] == first.facts()
    (whole,) = resolve(config.with_(tensor_parallel_size=1)).weights.values()
    assert whole / 2 <= first.parts["weights of target"] < 0.7 * whole


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_cache_is_resident_from_the_start():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    gc.collect()  # else it may return memory of earlier tests meanwhile
    before = resident()
    store = KVStore(KVSpec(((2, 64),), torch.float32), [4096], 16, torch.device("cpu"))
    assert resident() - before > 0.9 * store.data.nbytes
