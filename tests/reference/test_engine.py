"""The engine as a whole: admission, slot reuse, aborts, failures, memory, half precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Status
from strobe.sampling.noise import noise_key
from strobe.sampling_params import SamplingParams, Speculation
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine, run
from tests.support.reference_sampling import race
from tests.support.tiny_checkpoints import EOS_IDS, VOCAB, pool_bytes
from tests.support.transformers_parity import greedy

COLD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def config(target: Any, **options: Any) -> EngineConfig:
    return EngineConfig(target=str(target.path), max_model_len=64, page_size=4).with_(**options)


def alone(target: Any, prompt: list[int], sampling: SamplingParams, **options: Any) -> list[int]:
    return run(make_engine(config(target, **options)), [prompt], sampling)[0]


def prompts(*lengths: int) -> list[list[int]]:
    noise = torch.Generator().manual_seed(31)
    return [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in lengths]


@pytest.fixture(scope="module")
def plain_engine(target: Any) -> Engine:
    return make_engine(config(target))


def marked(**fields: Any) -> dict[str, Any]:
    return {"ignore_eos": False, "structured_outputs": {"regex": "a", **fields}}


@pytest.mark.parametrize(
    ("prompt", "changes", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1] * 64, {}, "has 64 tokens.*shorten it to 63"),
        ([1, VOCAB], {}, f"token id {VOCAB}.*ids 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ([1], {"stop_token_ids": [3, VOCAB + 5]}, f"stop_token_ids holds token id {VOCAB + 5}"),
        ([1], {"allowed_token_ids": [VOCAB]}, f"allowed_token_ids holds token id {VOCAB}"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds token id {VOCAB}"),
        ([1], {"logprobs": VOCAB + 1}, f"logprobs is {VOCAB + 1}, but the vocabulary has {VOCAB}"),
        ([1], {"prompt_logprobs": VOCAB + 1}, f"prompt_logprobs is {VOCAB + 1}, but"),
        ([1], marked(think_end=[VOCAB]), f"structured_outputs.think_end holds token id {VOCAB}"),
        (
            [1],
            marked(think_end=[1], think_start=VOCAB),
            "structured_outputs.think_start holds token id",
        ),
        ([1], marked(), "structured_outputs needs .*tokenizer.json, which does not exist; save"),
        ([1], {"speculation": {"method": "dflash"}}, "cannot draft so; start the engine with"),
        ([1], {"speculation": {"method": "ngram"}}, "cannot draft so; give num_drafts"),
        ([1], {"speculation": {"num_drafts": 1}}, "at most 0 drafts"),
    ],
)
def test_unrunnable_request_is_rejected_at_admission(
    plain_engine: Engine, prompt: list[int], changes: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        plain_engine.add(prompt, COLD.clone(**changes))
    assert not plain_engine.has_work


def test_longest_prompt_leaves_one_token(plain_engine: Engine, target: Any):
    (prompt,) = prompts(63)
    assert run(plain_engine, [prompt], COLD) == [greedy(target.hf, prompt, 1)]


def test_request_method_num_drafts_and_off_reason(target: Any, draft: Callable[..., Path]):
    engine = make_engine(config(target, draft=str(draft())))
    cases: list[tuple[Any, tuple[str, int]]] = [
        (None, ("dflash", 7)),
        (True, ("dflash", 7)),
        ({"num_drafts": 3}, ("dflash", 3)),
        ({"method": "ngram"}, ("ngram", 7)),
        ({"method": "ngram", "num_drafts": 2}, ("ngram", 2)),
        (False, ("none", 0)),
        ({"num_drafts": 0}, ("none", 0)),
        (Speculation(method="none", num_drafts=3), ("none", 0)),
    ]
    for speculation, expected in cases:
        request = engine.add([1], COLD.clone(speculation=speculation))
        assert (request.method, request.num_drafts) == expected, speculation
        assert (request.off_reason is None) == (expected[1] > 0)
    with pytest.raises(ValueError, match=r"num_drafts is 8.*at most 7"):
        engine.add([1], COLD.clone(speculation={"num_drafts": 8}))
    without = make_engine(config(target)).add([1], COLD)
    assert (without.method, without.off_reason) == ("none", "no drafter is loaded")
    off = make_engine(config(target, draft=str(draft()), method="none")).add([1], COLD)
    assert (off.method, off.off_reason) == ("none", "the engine's method is none")


@pytest.mark.parametrize("with_dflash", [False, True])
def test_prompt_lookup_without_match_verifies_nothing(
    with_dflash: bool, target: Any, draft: Callable[..., Path]
):
    engine = make_engine(config(target, draft=str(draft())))
    lookup = COLD.clone(speculation={"method": "ngram"}, max_tokens=4)
    none = engine.add([1, 2, 3, 4, 5, 6], lookup)
    rows: list[int] = []
    launch = engine.launch

    def launching(plan: Any) -> Any:
        slots = [r.slot for r in engine.scheduler.running if r.request is none]
        rows.extend(span.num_rows for span in plan.spans if span.slot in slots)
        return launch(plan)

    engine.launch = launching
    if with_dflash:
        engine.add([9, 8, 7], COLD.clone(max_tokens=4))
    while engine.has_work:
        engine.step()
    pairs = list(itertools.pairwise(none.tokens[:-1]))
    assert len(set(pairs)) == len(pairs), "otherwise prompt lookup would match"
    assert none.draft_counts.num_verified == 0
    assert rows == [6, 1, 1, 1]


def test_default_seeds_differ_per_request_and_repeat_per_engine(target: Any):
    warm = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    (prompt,) = prompts(5)
    first, second, other = (
        run(make_engine(config(target, seed=seed)), [prompt, prompt, prompt], warm)
        for seed in (0, 0, 100)
    )
    assert first == second
    assert len({tuple(out) for out in first + other}) == 6


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.4, "seed": -3},
    {"temperature": 2.5, "ignore_eos": True},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.3},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "n": 2},
    {"temperature": 2.0, "min_tokens": 25},
    {"temperature": 1.0, "top_k": -1, "stop_token_ids": [3, 4, 5]},
]


def test_sampled_text_matches_noise_over_transformers_logits(
    target: Any, draft: Callable[..., Path]
):
    """Token by token, with filters, noise and race in plain Python."""
    base = SamplingParams(seed=17, max_tokens=30)
    params = [base.clone(**changes) for changes in SAMPLED]
    texts = prompts(*range(2, 2 + len(params)))
    engine = make_engine(config(target, draft=str(draft()), max_num_seqs=3))
    outputs = iter(run(engine, texts, params))
    unsure = total = 0
    for prompt, sampling in zip(texts, params, strict=True):
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS_IDS)}
        for sibling in range(sampling.n):
            output = next(outputs)
            key = noise_key(sampling.seed or 0, sibling) % 2**64
            with torch.no_grad():
                logits = target.hf(torch.tensor([prompt + output])).logits[0]
            for i, token in enumerate(output):
                row = logits[len(prompt) + i - 1].tolist()
                if i < sampling.min_tokens:
                    row = [-math.inf if t in ends else x for t, x in enumerate(row)]
                race_params = (sampling.top_k, sampling.top_p, sampling.min_p)
                expected, margin = race(
                    row, sampling.temperature, key, len(prompt) + i, *race_params
                )
                total += 1
                if margin < 1e-3:
                    unsure += 1
                else:
                    assert token == expected, (sampling, i)
                assert (token in ends and i >= sampling.min_tokens) <= (i == len(output) - 1)
            assert output[-1] in ends or len(output) == 30
    assert unsure < total / 20
    assert total > 100


def test_siblings_with_one_seed_differ_and_repeat(target: Any):
    warm = SamplingParams(temperature=1.5, max_tokens=12, seed=4, n=4, ignore_eos=True)
    (prompt,) = prompts(5)
    first = run(make_engine(config(target)), [prompt], warm)
    assert len({tuple(out) for out in first}) == 4
    assert first == run(make_engine(config(target, max_num_seqs=1)), [prompt], warm)


def test_reused_slot_forgets_min_tokens(target: Any):
    """A request without min_tokens reuses the slot of one with it, next to another with it."""
    stops = SamplingParams(
        temperature=0, max_tokens=30, stop_token_ids=list(range(0, VOCAB, 2)), ignore_eos=True
    )
    texts = prompts(5, 9, 7)
    params = [stops.clone(max_tokens=2, min_tokens=2), stops.clone(min_tokens=30), stops]
    expected = [alone(target, p, s) for p, s in zip(texts, params, strict=True)]
    assert len(expected[2]) < 10, "it must stop while the second may not"
    engine = make_engine(config(target, max_num_seqs=2))
    assert run(engine, texts, params) == expected


def test_slot_reuse_resets_sampling_parameters(target: Any):
    warm = SamplingParams(temperature=1.2, seed=3, max_tokens=9, ignore_eos=True)
    texts = prompts(5, 9, 7, 3, 8)
    params = [warm.clone(top_k=2), COLD, warm, warm.clone(min_p=0.3), warm.clone(top_p=0.5)]
    expected = [alone(target, p, s) for p, s in zip(texts, params, strict=True)]
    assert run(make_engine(config(target, max_num_seqs=1)), texts, params) == expected
    assert run(make_engine(config(target, max_num_seqs=2)), texts, params) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fully_banned_request_does_not_stop_others(target: Any, temperature: float):
    """All tokens are stop tokens, and none may come before min_tokens."""
    engine = make_engine(config(target))
    hopeless = COLD.clone(
        stop_token_ids=list(range(VOCAB)), min_tokens=5, temperature=temperature, seed=1
    )
    texts = prompts(6, 8)
    banned, other = run(engine, texts, [hopeless, COLD])
    assert len(banned) == 6
    assert other == alone(target, texts[1], COLD)


@pytest.mark.parametrize("overlap", [1, 2])
def test_abort_frees_pages_and_keeps_others_running(
    overlap: int, target: Any, draft: Callable[..., Path]
):
    engine = make_engine(
        config(target, draft=str(draft()), overlap=overlap, max_num_seqs=2, num_drafts=2)
    )
    texts = prompts(9, 20, 5, 14)
    requests = [engine.add(prompt, COLD) for prompt in texts]
    for _ in range(3):
        engine.step()
        check_engine(engine)
    assert requests[3].status is Status.WAITING
    for request in (requests[0], requests[3]):
        engine.finish(request, "abort")
        check_engine(engine)
    output = list(requests[0].output_ids)
    for _ in range(100):
        for event in engine.step():
            assert event.key not in (requests[0].key, requests[3].key)
        check_engine(engine)
    assert not engine.has_work
    assert requests[0].output_ids == output
    assert requests[3].output_ids == []
    for i in (1, 2):
        assert requests[i].output_ids == alone(target, texts[i], COLD)
    assert engine.components.pool.available == engine.components.pool.capacity


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("method", ["propose", "forward", "observe"])
def test_engine_recovers_after_failed_step(
    method: str, overlap: int, target: Any, draft: Callable[..., Path]
):
    """Running out of memory, or Ctrl-C, loses the step but no request."""
    engine = make_engine(config(target, draft=str(draft()), overlap=overlap, max_num_seqs=2))
    owner: Any = {"forward": engine.runner}.get(method, engine.proposers)
    true = getattr(owner, method)
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise MemoryError("no memory")
        return true(*args, **options)

    setattr(owner, method, failing)
    texts = prompts(9, 20, 5)
    requests = [engine.add(prompt, COLD) for prompt in texts]
    failures = 0
    for _ in range(200):
        try:
            engine.step()
        except MemoryError:
            failures += 1
        check_engine(engine)
    assert not engine.has_work
    assert failures > 3
    assert [r.output_ids for r in requests] == [alone(target, p, COLD) for p in texts]
    assert engine.components.pool.available == engine.components.pool.capacity


def test_check_detects_host_and_device_disagreement(target: Any):
    engine = make_engine(config(target))
    engine.add([1, 2, 3], COLD)
    engine.step()
    check_engine(engine)
    engine.state.cursor[engine.scheduler.running[0].slot, 0] += 1
    with pytest.raises(AssertionError):
        check_engine(engine)


def test_check_detects_a_lost_page(target: Any):
    engine = make_engine(config(target))
    engine.add([1, 2, 3], COLD)
    engine.step()
    engine.scheduler.running[0].lease.tables[0].pop()
    for _ in range(20):
        engine.step()
    assert not engine.has_work
    with pytest.raises(AssertionError):
        check_engine(engine)


def test_pool_uses_requested_memory(target: Any, draft: Callable[..., Path]):
    options = config(target, max_num_seqs=50, kv_cache_memory=pool_bytes(40, 4))
    assert make_engine(options).components.pool.capacity == 40
    options = config(
        target,
        draft=str(draft()),
        max_num_seqs=50,
        kv_cache_memory=pool_bytes(40, 4, drafter_layers=2) + 17,
    )
    engine = make_engine(options)
    assert engine.components.pool.capacity == 40
    slots = {name: store.data.shape[1] for name, store in engine.components.stores.items()}
    assert slots == {"target": 41 * 4, "draft": 41 * 4}


def test_too_little_memory_is_rejected_with_required_size(target: Any):
    with pytest.raises(ValueError, match=f"raise kv_cache_memory to {pool_bytes(16, 4)} bytes"):
        make_engine(config(target, kv_cache_memory=pool_bytes(15, 4)))
    engine = make_engine(config(target, kv_cache_memory=pool_bytes(16, 4)))
    (prompt,) = prompts(63)
    assert run(engine, [prompt], COLD) == [greedy(target.hf, prompt, 1)]


def test_eos_finishes_answer_unless_ignored(target: Any):
    texts = prompts(4, 6, 9, 13, 21, 30)
    sampling = SamplingParams(temperature=1.0, seed=8, max_tokens=None)
    engine = make_engine(config(target))
    for prompt, output in zip(texts, run(engine, texts, sampling), strict=True):
        ends = [i for i, token in enumerate(output) if token in EOS_IDS]
        assert ends in ([], [len(output) - 1])
        longer = run(engine, [prompt], sampling.clone(ignore_eos=True))[0]
        assert longer[: len(output)] == output
        assert len(prompt) + len(longer) == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_cpu_picks_near_best_tokens(
    dtype: str, target: Any, draft: Callable[..., Path]
):
    engine = make_engine(config(target, draft=str(draft()), dtype=dtype))
    assert {store.data.dtype for store in engine.components.stores.values()} == {
        getattr(torch, dtype)
    }
    texts = prompts(5, 17)
    for prompt, output in zip(texts, run(engine, texts, COLD), strict=True):
        with torch.no_grad():
            logits = target.hf(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        regret = logits.amax(-1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert regret.max() < 0.5  # measured: 0 with both
