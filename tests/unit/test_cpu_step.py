"""The operations of a decoding step on a CPU: few, and the same values as the separate ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from strobe.attention import reference
from strobe.attention.reference import ReferencePlan
from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.kv.kv_store import KVSpec, KVStore, SeenPages
from strobe.models.ops import torch_ops
from strobe.outputs import TokenLogprob
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import drain, make_engine, run
from tests.support.tiny_checkpoints import make_target

COLD = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 9, 11, 3], [4, 4, 8], [60, 1, 2, 33, 17, 9]]


def engine_of(target: Path) -> Engine:
    config = EngineConfig(str(target), device="cpu", method="none", max_model_len=64, page_size=4)
    return make_engine(config)


def calls_of_a_step(target: Path) -> Counter[str]:
    """Return one plain step's calls by operation, of one request."""
    engine = engine_of(target)
    request = engine.add([5, 9, 11], COLD)
    while len(request.output_ids) < 3:
        engine.step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step()
    return Counter(event.name for event in profiler.events())


@pytest.mark.parametrize("family", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_a_layer_takes_few_torch_calls(family: Any, tmp_path: Path):
    """Counted as the difference of models with four and two layers. Measured 96 and 102 a layer."""
    totals = list[Counter[str]]()
    for layers in (2, 4):
        path = tmp_path / str(layers)
        make_target(path, family, num_hidden_layers=layers)
        totals.append(calls_of_a_step(path))
    added = totals[1] - totals[0]
    assert added["aten::index_select"] == 0, "keys that follow one another are not gathered"
    assert added["aten::index_copy_"] == 2, "keys and values are written together"
    assert added.total() <= 2 * (104 if family is Qwen3ForCausalLM else 98), added


def logprobs_of(target: Path) -> list[list[TokenLogprob]]:
    """Return the log probabilities of the answers' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    engine = engine_of(target)
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    logprobs = drain(engine, requests)
    return [logprobs[request] for request in requests]


@pytest.mark.parametrize("family", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_joined_heads_give_the_values_of_separate_ones(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_target(tmp_path, family)
    joined = logprobs_of(tmp_path)
    monkeypatch.setattr(torch_ops, "JOINED_ROWS", 0)
    assert logprobs_of(tmp_path) == joined


def test_keys_in_place_give_the_tokens_of_gathered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_target(tmp_path)
    runs = list[bool]()
    run_of = ReferencePlan._run_of

    def counted(self: ReferencePlan, group: Any, table: Any) -> range | None:
        run = run_of(self, group, table)
        runs.append(run is not None)
        return run

    monkeypatch.setattr(ReferencePlan, "_run_of", counted)
    in_place = [run(engine_of(tmp_path), [prompt], COLD) for prompt in PROMPTS]
    assert all(runs)
    monkeypatch.setattr(ReferencePlan, "_run_of", lambda self, group, table: None)
    assert [run(engine_of(tmp_path), [prompt], COLD) for prompt in PROMPTS] == in_place


def test_scattered_pages_are_gathered(tmp_path: Path):
    """Two requests take pages by turns; when one has ended, the other's do not follow one
    another."""
    make_target(tmp_path)
    expected = [run(engine_of(tmp_path), [prompt], COLD) for prompt in PROMPTS[:2]]
    engine = engine_of(tmp_path)
    first = engine.add(PROMPTS[0], COLD)
    engine.add(PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert first.tokens[len(PROMPTS[0]) :] == expected[0][0]


@pytest.mark.parametrize("family", [LlamaForCausalLM, Qwen3ForCausalLM])
def test_keys_gathered_for_few_spans_at_once_give_the_same_tokens(
    family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Seven requests of different lengths, two spans a gather; a page of NaN that no request has
    been given stays unread."""
    make_target(tmp_path, family)
    prompts = [[7 + i] * (1 + 3 * i) for i in range(7)]
    expected = [run(engine_of(tmp_path), [prompt], COLD)[0] for prompt in prompts]
    engine = engine_of(tmp_path)
    for layer in engine.components.stores["target"].layers:
        layer.fill_(float("nan"))
    spans = list[int]()
    gather = KVStore.gather_pages

    def counted(self: KVStore, layer: int, seen: SeenPages, buffer: Tensor) -> Any:
        spans.append(len(seen.pages))
        return gather(self, layer, seen, buffer)

    monkeypatch.setattr(KVStore, "gather_pages", counted)
    monkeypatch.setattr(reference, "_spans_at_once", lambda batch, store: 2)
    assert run(engine, prompts, COLD) == expected
    assert set(spans) == {1, 2}


def test_spans_gathered_at_once_fit_into_the_caches():
    """One thread's budget is 2 MiB: 8 spans of 128 tokens of 2 KiB; at least one span."""
    store = KVStore(KVSpec(((4, 64),), torch.float32), [4], 16, torch.device("cpu"))
    assert store.slot_bytes == 2048
    threads = torch.get_num_threads()
    for bound, expected in ((128, 8), (129, 4), (1 << 20, 1)):
        batch = SimpleNamespace(ids=torch.zeros(1), bounds=[1, bound * threads])
        assert reference._spans_at_once(batch, store) == expected  # pyright: ignore
