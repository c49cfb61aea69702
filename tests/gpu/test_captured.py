"""Captured steps on a GPU: the same bits as eager ones, no synchronization, no growing memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from strobe import LLM, EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.runner.graphs import CUDACapturer
from strobe.tools.demo_comparison import choose_examples, prompts_of
from strobe.warmup.warmup_steps import warm_up
from tests.support.gpu_checks import (
    NEEDS_GPU,
    REGRET,
    check_captured,
    finish,
    keys_and_values,
    largest_regret,
    steady,
)

pytestmark = NEEDS_GPU

GREEDY = SamplingParams(temperature=0.0, max_tokens=80)
WARM = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=80)


def make_engine(**options: Any) -> Engine:
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 8, "kv_cache_memory": "1GiB"}
    return Engine(EngineConfig(**{**defaults, **options}))


def prompts(count: int) -> list[list[int]]:
    llm = LLM(device="cpu", kv_cache_memory="64MiB")
    return [list(prompt) for prompt in prompts_of(llm, choose_examples(count))]


def answers(engine: Engine, texts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return finish(engine, [engine.add(text, params) for text in texts])


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return prompts(8)


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_match_eager_ones_bit_by_bit(
    dtype: str, params: SamplingParams, texts: list[list[int]]
):
    """Compares the stored K/V as well as the tokens."""
    check_captured(
        lambda: make_engine(dtype=dtype, overlap=1),
        lambda engine: answers(engine, texts, params),
        keys_and_values,
    )


@pytest.mark.parametrize(
    "off",
    [{"cuda_graphs": False}, {"kernels": "torch"}, {"attention_backend": "reference"}],
    ids=str,
)
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_disabled_options_change_no_fp32_answer(
    params: SamplingParams, off: dict[str, Any], texts: list[list[int]]
):
    expected = answers(make_engine(dtype="float32"), texts, params)
    assert answers(make_engine(dtype="float32", **off), texts, params) == expected


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_overlap_matches_single_step(params: SamplingParams, texts: list[list[int]]):
    assert answers(make_engine(overlap=2), texts, params) == answers(
        make_engine(overlap=1), texts, params
    )


@pytest.mark.parametrize("reverse", [False, True])
def test_capture_order_changes_nothing(reverse: bool, texts: list[list[int]]):
    """One short request first and many long ones later, or the long ones first."""
    engine, long_texts = make_engine(), [text * 3 for text in texts]
    loads = [[texts[0][:5]], long_texts, texts[:3]]
    order = reversed(loads) if reverse else loads
    by_size = {len(load): answers(engine, load, GREEDY) for load in order}
    for load in loads:
        fresh = answers(make_engine(), load, GREEDY)
        assert by_size[len(load)] == fresh


def test_steady_steps_do_not_sync_or_allocate(texts: list[list[int]]):
    engine = make_engine(overlap=2, max_model_len=1024)
    params = WARM.clone(max_tokens=900, ignore_eos=True)
    requests = [engine.add(text, params) for text in texts]
    with steady(engine, requests, after=40):
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        captured = len(engine.components.graphs)
        for _ in range(20):
            engine.step()
        assert len(engine.components.graphs) == captured
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before


def test_fitting_mixed_step_is_replayed(texts: list[list[int]]):
    """Two prompts of equal length, one after the other, next to the same three requests."""
    engine = make_engine(overlap=1, enable_prefix_caching=False)
    requests = [
        engine.add(text, GREEDY.clone(max_tokens=300, ignore_eos=True)) for text in texts[:3]
    ]
    while not all(request.num_output > 16 for request in requests):
        engine.step()
    counts: list[int] = []
    for _ in range(2):
        counts.append(len(engine.graphs))
        new = engine.add(texts[4], GREEDY.clone(max_tokens=1))
        while new.finish_reason is None:
            engine.step()
    counts.append(len(engine.graphs))
    assert counts[0] < counts[1] == counts[2]
    for request in requests:
        engine.finish(request, "abort")
    finish(engine, requests)


@pytest.mark.parametrize("fp8", [{}, {"weight_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_tokens_in_bf16_are_nearly_the_best_in_fp32(fp8: dict[str, str], texts: list[list[int]]):
    """Scores each position of the answers with the target in fp32."""
    engine = make_engine(**fp8)
    outputs = answers(engine, texts, GREEDY)
    worst = largest_regret(texts, outputs)
    print(f"largest regret {fp8}: {worst:.4f}")
    assert worst <= REGRET


def test_memory_does_not_grow(texts: list[list[int]]):
    """Warms up every shape first; prefixes hit the cache only from the second round on."""
    engine = make_engine(overlap=2)
    for _ in range(4):
        answers(engine, texts, WARM)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(6):
        answers(engine, texts, WARM)
    assert torch.cuda.memory_reserved() == before


def test_no_step_is_captured_after_warm_up(texts: list[list[int]]):
    engine = make_engine(overlap=2)
    warm_up(engine)
    captured = len(engine.graphs)
    for params in (GREEDY, WARM):
        requests = [
            engine.add(text, params.clone(max_tokens=20 + 9 * i)) for i, text in enumerate(texts)
        ]
        while engine.has_work:
            engine.step()
        late = engine.add([*texts[0], 5, 6, 7], params)
        for _ in range(3):
            engine.step()
        requests += [late, engine.add(texts[1][:3], params)]
        finish(engine, requests)
    assert len(engine.graphs) == captured > 40


def test_capture_survives_garbage_collection_of_an_engine(texts: list[list[int]]):
    """An unreferenced engine may be freed at any allocation."""
    expected = answers(make_engine(overlap=1), texts, GREEDY)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        engine = make_engine(overlap=1)
        assert answers(engine, texts, GREEDY) == expected
    finally:
        gc.set_threshold(*before)
    assert len(engine.graphs) > 0
    assert None not in engine.graphs._graphs.values()  # type: ignore[union-attr]


def test_capture_works_after_a_failed_one():
    capturer = CUDACapturer()
    x = torch.ones(8, device="cuda")

    def failing() -> None:
        (x + 1).item()  # waits for the device, which is not allowed during capture

    with pytest.raises(RuntimeError):
        capturer.capture(failing)
    torch.cuda.empty_cache()  # which torch refuses while it believes that a capture goes on
    replay, result = capturer.capture(lambda: x * 2)
    x.fill_(3)
    replay()
    assert result.tolist() == [6.0] * 8
