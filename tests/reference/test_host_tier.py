"""The prefix cache's tier in host memory: after a hit there, everything is as without one."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request, SchedulingOptions
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import drain, make_engine, run
from tests.support.full_marks import full_where
from tests.support.rank_threads import ranks
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.step_failures import fail_calls, run_with_failures
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target
from tests.support.transformers_parity import prompts

COLD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=5)
PROMPTS = prompts([200, 170, 140])
PAGE = 16
POOL = 16
"""Pages of the engines here: one context, so that each prompt evicts most of the one before."""


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_target(path)
    return path


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_hybrid(path)
    return path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft"))


def config(path: Path, **options: Any) -> EngineConfig:
    """Return settings with a pool for one context and host memory for all prompts."""
    defaults: dict[str, Any] = {"max_model_len": POOL * PAGE, "max_num_seqs": 2}
    settings = EngineConfig(str(path), **{**defaults, **options})
    if settings.kv_cache_memory is None:
        page_bytes = resolve(settings).page_bytes
        settings = settings.with_(kv_cache_memory=(POOL + 1) * page_bytes)
    if settings.kv_offload_memory is None and settings.enable_prefix_caching:
        settings = settings.with_(kv_offload_memory="16MiB")
    return settings


def make_tiered(settings: EngineConfig) -> Engine:
    """Make an engine that brings back all it can, whatever the machine's speed."""
    engine = make_engine(settings)
    tier = engine.components.host_tier
    assert tier is not None
    tier.prefill_ms = lambda start, end: math.inf
    return engine


def lone(path: Path, **options: Any) -> EngineConfig:
    return config(path, enable_prefix_caching=False, max_num_seqs=1, **options)


def drafting(drafter: Path) -> dict[str, Any]:
    return {"draft": str(drafter), "num_drafts": 7, "adaptive": False}


def ask(engine: Engine, prompt: list[int], sampling: SamplingParams, salt: str = "") -> Request:
    """Run one request to its end."""
    scheduling = SchedulingOptions(cache_salt=salt)
    (request,) = engine.add_prompt(prompt, sampling, scheduling=scheduling)
    drain(engine, [request])
    return request


def answers(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    return [ask(engine, prompt, sampling).output_ids for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [pytest.param("none", marks=pytest.mark.full), "dflash"])
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_answers_and_drafts_after_a_host_hit_equal_those_without(
    family: str,
    method: str,
    sampling: SamplingParams,
    drafter: Path,
    request: pytest.FixtureRequest,
):
    path = request.getfixturevalue(family)
    options = drafting(drafter) if method == "dflash" else {}
    engine = make_tiered(config(path, **options))
    expected = answers(make_engine(lone(path, **options)), sampling)
    first = [ask(engine, prompt, sampling) for prompt in PROMPTS]
    again = [ask(engine, prompt, sampling) for prompt in PROMPTS]
    assert [r.output_ids for r in first] == [r.output_ids for r in again] == expected
    assert [r.draft_counts for r in first] == [r.draft_counts for r in again]
    covered = [192, 160, 128] if family == "qwen3" else [192, 128, 128]
    assert [r.num_cached for r in first] == [0, 0, 0]
    assert [r.num_cached for r in again] == covered
    assert [r.num_host_cached for r in again] == covered
    assert engine.stats.host_hits == sum(covered)
    assert engine.stats.prefix_hits == 0


def test_only_what_a_window_sees_is_brought_back(tmp_path: Path):
    write, changes = FAMILIES["gpt_oss"]
    write(tmp_path / "target", **changes)
    path = tmp_path / "target"
    page_bytes = resolve(EngineConfig(str(path), max_model_len=128)).page_bytes
    small = {"max_model_len": 128, "kv_cache_memory": 10 * page_bytes}
    engine = make_tiered(config(path, **small))
    assert [group.window for group in engine.components.pool.groups] == [None, 6]
    alone = make_engine(lone(path, max_model_len=128))
    for num_hits in (0, 96 // PAGE + 1):
        loads = engine.stats.host_loads
        request = ask(engine, PROMPTS[0][:100], COLD)
        assert request.output_ids == ask(alone, PROMPTS[0][:100], COLD).output_ids
        assert engine.stats.host_loads - loads == num_hits
        evict_all(engine)


def test_evicted_states_return_from_host_memory(hybrid: Path):
    spec = resolve(EngineConfig(str(hybrid))).target.states
    assert spec is not None
    size = spec.bytes_per_kept_state(torch.float32)
    options = {"kv_cache_memory": "8MiB", "state_cache_memory": size}
    engine = make_tiered(config(hybrid, **options))
    expected = answers(make_engine(lone(hybrid)), COLD)
    assert answers(engine, COLD) == expected
    assert answers(engine, COLD) == expected
    assert engine.stats.state_hits == len(PROMPTS)
    one_row = make_engine(config(hybrid, **options).with_(kv_offload_memory=None))
    assert answers(one_row, COLD) == answers(one_row, COLD) == expected
    assert one_row.stats.state_hits == 0


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_preempted_request_resumes_from_host_memory(
    family: str, overlap: int, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(family)
    engine = make_tiered(config(path, overlap=overlap, max_num_seqs=4))
    sampling = COLD.clone(max_tokens=120)
    short = [prompt[:70] for prompt in PROMPTS]
    texts = run(engine, short, sampling)
    assert engine.stats.preemptions
    assert engine.stats.host_loads
    alone = make_engine(lone(path))
    assert texts == [ask(alone, prompt, sampling).output_ids for prompt in short]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_busy_tier_and_preemptions_leave_every_answer_as_alone(
    family: str, drafter: Path, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(family)
    engine = make_tiered(config(path, max_num_seqs=4, overlap=2, **drafting(drafter)))
    noise = random.Random(7)
    sampling = WARM.clone(max_tokens=50)
    asked = [noise.choice(PROMPTS)[: noise.randint(40, 130)] for _ in range(16)]
    texts = run(engine, asked, sampling)
    assert engine.stats.preemptions > 3
    assert engine.stats.host_loads > 10
    alone = make_engine(lone(path))
    assert texts == [ask(alone, prompt, sampling).output_ids for prompt in asked]


def test_decoding_goes_on_while_a_prefix_is_brought_back(qwen3: Path):
    engine = make_tiered(config(qwen3, kv_cache_memory="1MiB", max_model_len=512))
    expected = ask(engine, PROMPTS[0], COLD).output_ids
    evict_all(engine)
    tier = engine.components.host_tier
    assert tier is not None
    tier.pages_per_step = 2
    decoding = engine.add(PROMPTS[1], COLD.clone(max_tokens=200))
    while decoding.num_output < 3:
        engine.step()
    waiting = engine.add(PROMPTS[0], COLD)
    count = decoding.num_output
    while not waiting.output_ids:
        engine.step()
    assert decoding.num_output - count >= 192 // PAGE // 2
    while engine.has_work:
        engine.step()
    assert waiting.output_ids == expected
    assert waiting.num_host_cached == 192


def evict_all(engine: Engine) -> None:
    """Let the device lose all cached pages, which host memory then has."""
    tier = engine.components.host_tier
    assert tier is not None
    for group in engine.components.pool.groups:
        group.drop(group.allocate(group.available))
    assert engine.components.host_store is not None
    engine.components.host_store.copy(tier.copies(has_step=False))


def test_equal_prompts_fetch_their_prefix_once(qwen3: Path):
    engine = make_tiered(config(qwen3, max_num_seqs=4))
    ask(engine, PROMPTS[0], COLD)
    evict_all(engine)
    texts = run(engine, [PROMPTS[0], PROMPTS[0]], [COLD.clone(n=2), COLD])
    assert engine.stats.host_loads == 192 // PAGE
    assert texts == [texts[0]] * 3


def test_salts_hold_in_host_memory(qwen3: Path):
    engine = make_tiered(config(qwen3))
    ask(engine, PROMPTS[0], COLD, salt="a")
    evict_all(engine)
    hits = [ask(engine, PROMPTS[0], COLD, salt=salt).num_host_cached for salt in ("b", "", "a")]
    assert hits == [0, 0, 192]


def test_prefix_is_recomputed_where_that_is_cheaper(qwen3: Path):
    engine = make_tiered(config(qwen3))
    expected = ask(engine, PROMPTS[0], COLD).output_ids
    evict_all(engine)
    tier = engine.components.host_tier
    assert tier is not None
    tier.bytes_per_ms = float(engine.resolved.page_bytes)  # 12 ms for this prefix
    asked: list[tuple[int, int]] = []

    def prefill_ms(start: int, end: int) -> float:
        asked.append((start, end))
        return 11.9 if len(asked) == 1 else 12.1

    tier.prefill_ms = prefill_ms
    for covered in (0, 192):
        request = ask(engine, PROMPTS[0], COLD)
        assert request.num_cached == request.num_host_cached == covered
        assert request.output_ids == expected
        evict_all(engine)
    assert asked == [(0, 192), (0, 192)]


@pytest.mark.parametrize("beside", [True, False])
def test_more_pages_are_saved_while_a_long_prompt_is_computed(qwen3: Path, beside: bool):
    engine = make_tiered(config(qwen3))
    tier = engine.components.host_tier
    assert tier is not None
    tier.runs_beside_steps = beside
    tier.pages_per_step = 1
    tier.bytes_per_ms = float(engine.resolved.page_bytes)
    tier.prefill_ms = lambda start, end: 2.0 * POOL
    first = ask(engine, PROMPTS[0], COLD.clone(max_tokens=1))
    ask(engine, PROMPTS[2], COLD.clone(max_tokens=1))
    keys = first.page_keys[: len(PROMPTS[0]) // PAGE]
    evicted = sum(tier.pool.lookup(key) is None for key in keys)
    saved = sum(key in tier.pages[0] for key in keys)
    assert 0 < evicted < len(keys)
    assert saved == (len(keys) if beside else evicted + 1)


def test_steps_of_prompts_take_their_own_time_with_two_in_flight(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = make_tiered(config(qwen3, overlap=2, max_num_batched_tokens=64))
    forward = engine.runner.forward
    clock = [0.0]

    def take_time(*args: Any, **options: Any) -> Any:
        clock[0] += 0.05
        return forward(*args, **options)

    monkeypatch.setattr(engine.runner, "forward", take_time)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    ask(engine, PROMPTS[0], COLD)
    rows_and_ms = [(rows, round(ms)) for rows, _, ms in engine.prefill_costs.steps]
    assert rows_and_ms == [(64, 50), (64, 50), (64, 50), (8, 50)]
    engine.reset()
    assert not engine.prefill_costs.steps


def test_prompt_logprobs_are_computed_and_not_brought_back(qwen3: Path):
    engine = make_tiered(config(qwen3))
    sampling = COLD.clone(prompt_logprobs=1)
    first = ask(engine, PROMPTS[0], sampling)
    evict_all(engine)
    again = ask(engine, PROMPTS[0], sampling)
    assert again.num_cached == 0
    scored = [[entry for entry in r.prompt_logprobs if entry is not None] for r in (first, again)]
    tokens = [[entry.token for entry in entries] for entries in scored]
    assert tokens[0] == tokens[1] == PROMPTS[0][1:]
    values = [[entry.logprob for entry in entries] for entries in scored]
    assert values[1] == pytest.approx(values[0], abs=1e-4)  # rounded by where the pages are


def test_reset_forgets_host_memory(qwen3: Path):
    engine = make_tiered(config(qwen3))
    ask(engine, PROMPTS[0], COLD)
    evict_all(engine)
    engine.reset()
    assert ask(engine, PROMPTS[0], COLD).num_cached == 0


def test_aborted_request_gives_up_its_fetch(qwen3: Path):
    engine = make_tiered(config(qwen3))
    ask(engine, PROMPTS[0], COLD)
    evict_all(engine)
    request = engine.add(PROMPTS[0], COLD)
    engine.step()
    tier = engine.components.host_tier
    assert tier is not None
    assert request in tier.fetches
    engine.finish(request, "abort")
    assert not tier.fetches
    assert ask(engine, PROMPTS[1], COLD).finish_reason == "length"


@full_where(lambda family, stage: (family == "qwen3") is (stage == "forward"))
@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("stage", ["copy", "forward", "commit"])
@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_answers_are_right_when_steps_with_host_copies_fail(
    family: str, stage: str, overlap: int, drafter: Path, request: pytest.FixtureRequest
):
    path = request.getfixturevalue(family)
    engine = make_tiered(config(path, overlap=overlap, **drafting(drafter)))
    owners: dict[str, tuple[Any, str]] = {
        "copy": (engine.components.host_store, "copy"),
        "forward": (engine.runner, "forward"),
        "commit": (engine.scheduler, "_commit"),
    }
    fail_calls(*owners[stage], lambda call: call % 5 == 0)
    short = [prompt[:110] for prompt in PROMPTS]
    prompts_twice = [*short, *short]
    requests = [engine.add(prompt, COLD) for prompt in prompts_twice]
    assert run_with_failures(engine) > 3
    alone = make_engine(lone(path))
    expected = [ask(alone, prompt, COLD).output_ids for prompt in prompts_twice]
    assert [r.output_ids for r in requests] == expected
    assert engine.stats.host_loads


def test_ranks_have_a_tier_each(qwen3: Path):
    def hits(engine: Engine) -> tuple[list[list[int]], int]:
        texts = [*answers(engine, COLD), *answers(engine, COLD)]
        return texts, engine.stats.host_hits

    expected = hits(make_tiered(config(qwen3)))
    settings = config(qwen3)
    budget = resolve(settings).page_bytes * (POOL + 1)
    halved = settings.with_(device="cpu", kv_cache_memory=budget // 2)  # as each rank's pages are
    with ranks(halved, 2) as engine:
        assert engine.components.host_tier is not None
        engine.components.host_tier.prefill_ms = lambda start, end: math.inf
        assert hits(engine) == expected


@pytest.mark.parametrize("family", ["qwen3", "hybrid"])
def test_budgets_that_cannot_be_are_one_sentence(family: str, request: pytest.FixtureRequest):
    path = request.getfixturevalue(family)
    resolved = resolve(config(path))
    needed = resolved.page_bytes
    if resolved.target.states is not None:
        needed = 2 * max(needed, resolved.target.states.bytes_per_kept_state(torch.float32))
    capacity = resolve(config(path, kv_offload_memory=needed)).host_capacity
    assert capacity.page_bytes >= resolved.page_bytes
    with pytest.raises(ValueError, match=rf"kv_offload_memory is .*; ask for at least {needed},"):
        resolve(config(path, kv_offload_memory=needed - 1))
    with pytest.raises(ValueError, match=r"^kv_offload_memory takes \d+ bytes, but cpu has \d+"):
        resolve(config(path, kv_offload_memory="900TiB"))
    with pytest.raises(ValueError, match="kv_offload_memory is 1MiB, but prefix caching is off"):
        EngineConfig(str(path), kv_offload_memory="1MiB", enable_prefix_caching=False)
    for wrong in ("many", 0, "-1GiB"):
        with pytest.raises(ValueError, match=rf"^kv_offload_memory is '?{wrong}'?, but must be"):
            EngineConfig(str(path), kv_offload_memory=wrong)
