"""Prefixes of a target with recurrent layers: after a hit, everything is as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams, Speculation
from tests.support.engine_runs import drain, make_engine, run
from tests.support.full_marks import full_where
from tests.support.recurrent_checkpoints import EXPERTS, make_hybrid
from tests.support.simulated_graphs import captured
from tests.support.step_failures import fail_calls, run_with_failures
from tests.support.tiny_checkpoints import make_draft
from tests.support.transformers_parity import prompts

COLD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WARM = SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True, seed=5)
LONG, OTHER, TAIL = prompts([200, 90, 40])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    make_hybrid(path)
    return path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse")
    make_hybrid(path, **EXPERTS)
    return path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft"))


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(path), **{"max_model_len": 400, "max_num_seqs": 4, **options})


def drafting(drafter: Path) -> dict[str, Any]:
    return {"draft": str(drafter), "num_drafts": 7, "adaptive": False}


def ask(engine: Engine, prompt: list[int], sampling: SamplingParams = COLD) -> Request:
    """Run one request to its end."""
    (request,) = engine.add_prompt(prompt, sampling)
    drain(engine, [request])
    return request


def cold_answer(path: Path, prompt: list[int], sampling: SamplingParams, **options: Any) -> Request:
    return ask(make_engine(config(path, enable_prefix_caching=False, **options)), prompt, sampling)


@full_where(lambda sampling, method: (sampling is COLD) is (method == "none"))
@pytest.mark.parametrize("sampling", [COLD, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "method", ["none", pytest.param("ngram", marks=pytest.mark.full), "dflash"]
)
@pytest.mark.parametrize("target", ["hybrid", pytest.param("sparse", marks=pytest.mark.full)])
def test_answers_and_drafts_after_a_hit_equal_those_without(
    method: str,
    target: str,
    sampling: SamplingParams,
    drafter: Path,
    request: pytest.FixtureRequest,
):
    path = request.getfixturevalue(target)
    options: dict[str, Any] = {"method": method}
    if method == "dflash":
        options |= drafting(drafter)
        sampling = sampling.clone(speculation=Speculation(return_drafts=True))
    engine = make_engine(config(path, **options))
    first = ask(engine, LONG, sampling)
    turn = [*LONG, *first.output_ids, *TAIL]
    fork = [*LONG[:150], *OTHER]
    for prompt, hit in ((LONG, 192), (turn, 192), (fork, 0), (fork, 192)):
        warm = ask(engine, prompt, sampling)
        cold = cold_answer(path, prompt, sampling, **options)
        assert warm.output_ids == cold.output_ids
        assert warm.draft_counts == cold.draft_counts
        assert warm.num_cached == hit


@pytest.mark.parametrize("budget", [None, 100])
def test_state_after_a_hit_has_the_same_bits(budget: int | None, hybrid: Path):
    """Compared after the prompt, whose last chunk begins at the border."""

    def after_prompt(engine: Engine) -> list[torch.Tensor]:
        states = engine.components.states
        assert states is not None
        (request,) = engine.add_prompt(LONG, COLD)
        while not request.output_ids:
            engine.step()
        (record,) = engine.scheduler.running
        parts = [part[:, record.slot].clone() for part in (states.state, states.window)]
        engine.finish(request, "abort")
        while engine.has_work:
            engine.step()
        return parts

    engine = make_engine(config(hybrid, max_num_batched_tokens=budget))
    cold = after_prompt(engine)
    hits = engine.stats.prefix_hits
    warm = after_prompt(engine)
    assert engine.stats.prefix_hits == hits + 192
    for left, right in zip(cold, warm, strict=True):
        assert torch.equal(left, right)


def test_siblings_and_equal_prompts_compute_one_prompt(hybrid: Path):
    engine = make_engine(config(hybrid))
    texts = run(engine, [LONG, LONG], [WARM.clone(n=2), COLD])
    assert engine.stats.prefix_hits == 2 * 192
    cold = make_engine(config(hybrid, enable_prefix_caching=False))
    assert texts == run(cold, [LONG, LONG], [WARM.clone(n=2), COLD])


def test_running_prompt_keeps_a_state_where_a_waiting_one_parts(hybrid: Path):
    engine = make_engine(config(hybrid, max_num_batched_tokens=100))
    fork = [*LONG[:150], *OTHER[:20]]
    texts = run(engine, [LONG, fork], COLD)
    assert engine.stats.prefix_hits == 128
    assert texts == [cold_answer(hybrid, prompt, COLD).output_ids for prompt in (LONG, fork)]


@pytest.mark.parametrize("overlap", [1, 2])
def test_borders_of_successive_steps_all_keep_their_states(
    overlap: int, hybrid: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.kv.kept_states.LONG_PROMPT", 64)
    engine = make_engine(config(hybrid, overlap=overlap))
    ask(engine, LONG, COLD.clone(max_tokens=1))
    assert engine.stats.states_kept == 3
    for length, hit in ((100, 64), (150, 128), (200, 192)):
        assert ask(engine, [*LONG[:length], *TAIL]).num_cached == hit


def test_forked_prompts_hit_where_they_part(hybrid: Path):
    engine = make_engine(config(hybrid))
    forks = [[*LONG[:150], *OTHER[i:]] for i in range(3)]
    assert [ask(engine, prompt).num_cached for prompt in (LONG, *forks)] == [0, 0, 128, 128]


def test_preempted_request_resumes_from_its_prompts_state(hybrid: Path):
    pages = (2 * (200 + 60) // 16 + 2) * 16
    small = make_engine(config(hybrid, max_num_seqs=2, max_model_len=300))
    per_page = sum(s.bytes_per_page(16) for s in small.resolved.kv_groups.values())
    del small
    options = {"max_num_seqs": 2, "max_model_len": 300, "kv_cache_memory": per_page * pages // 16}
    sampling = COLD.clone(max_tokens=80)
    engine = make_engine(config(hybrid, **options))
    other = [*OTHER, *LONG[:110]]
    texts = run(engine, [LONG, other], sampling)
    assert engine.stats.preemptions
    assert texts == [cold_answer(hybrid, prompt, sampling).output_ids for prompt in (LONG, other)]


def test_one_row_is_shared_by_all_prompts(hybrid: Path):
    states = resolve(config(hybrid)).target.states
    assert states is not None
    size = states.bytes_per_kept_state(torch.float32)
    engine = make_engine(config(hybrid, state_cache_memory=size))
    assert [ask(engine, prompt).num_cached for prompt in (LONG, LONG, OTHER, OTHER, LONG)] == [
        0, 192, 0, 64, 0,
    ]  # fmt: skip
    with pytest.raises(ValueError, match=rf"but one state .* takes {size} bytes; raise it"):
        resolve(config(hybrid, state_cache_memory=size - 1))


def test_reset_forgets_states(hybrid: Path):
    engine = make_engine(config(hybrid))
    ask(engine, LONG)
    engine.reset()
    assert ask(engine, LONG).num_cached == 0


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
def test_replayed_steps_after_hits(
    overlap: int, hybrid: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.runner.step_output.download", torch.clone)
    engine = make_engine(config(hybrid, overlap=overlap, **drafting(drafter)))
    double = captured(engine.components, 4, 7)
    turns = [[*LONG, *TAIL[:i]] for i in range(6)]
    texts = [ask(engine, prompt).output_ids for prompt in turns]
    assert engine.stats.prefix_hits == 5 * 192
    assert double.replayed
    assert texts == [cold_answer(hybrid, prompt, COLD).output_ids for prompt in turns]


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "stage", ["copy", pytest.param("forward", marks=pytest.mark.full), "commit"]
)
def test_answers_are_right_when_steps_with_copies_fail(
    stage: str, overlap: int, hybrid: Path, drafter: Path
):
    engine = make_engine(config(hybrid, overlap=overlap, **drafting(drafter)))
    states = engine.components.states
    owner: Any = {"copy": states, "forward": engine.runner, "commit": engine.scheduler}[stage]
    name = {"copy": "copy", "forward": "forward", "commit": "_commit"}[stage]
    fail_calls(owner, name, lambda call: call % 3 == 0)
    prompts = [LONG, [*LONG, *TAIL], OTHER, LONG, [*LONG[:150], *OTHER]]
    requests = [engine.add(prompt, COLD) for prompt in prompts]
    assert run_with_failures(engine) > 3
    expected = [cold_answer(hybrid, prompt, COLD).output_ids for prompt in prompts]
    assert [request.output_ids for request in requests] == expected
