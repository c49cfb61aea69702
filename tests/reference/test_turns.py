"""Chats whose turns continue the answers before: what they compute, for targets of every kind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request, SchedulingOptions
from strobe.sampling_params import SamplingParams, Speculation
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import drain, make_engine, run
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target
from tests.support.transformers_parity import prompts

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (make_target, {}),
    "qwen3_5": (make_hybrid, {}),
    "gpt_oss": FAMILIES["gpt_oss"],
    "gemma4": FAMILIES["gemma4"],
}
NUM_TURNS = 20
SYSTEM, *USER = prompts([640, *[8] * NUM_TURNS])
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=50, ignore_eos=True, seed=5)
LONG, OTHER, NEXT = prompts([150, 90, 20])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> str:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            if name == "draft":
                make_draft(made[name])
            else:
                write, changes = TARGETS[name]
                write(made[name], max_position_embeddings=2048, **changes)
        return str(made[name])

    return checkpoint


def config(path: str, **options: Any) -> EngineConfig:
    return EngineConfig(path, **{"max_model_len": 500, "max_num_seqs": 4, **options})


def ask(engine: Engine, prompt: list[int], sampling: SamplingParams) -> Request:
    """Run one request to its end."""
    (request,) = engine.add_prompt(prompt, sampling)
    drain(engine, [request])
    return request


def num_prefilled(engine: Engine) -> int:
    return engine.stats.prefix_queries - engine.stats.prefix_hits


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "qwen3_5",
        pytest.param("gpt_oss", marks=pytest.mark.full),
        pytest.param("gemma4", marks=pytest.mark.full),
    ],
)
def test_chat_prefills_a_tenth_of_its_prompts(name: str, checkpoints: Any):
    engine = make_engine(config(checkpoints(name), max_model_len=1400))
    history = list(SYSTEM)
    for user in USER:
        history += user
        history += ask(engine, history, GREEDY).output_ids
    assert engine.stats.prefix_queries == sum(
        len(SYSTEM) + 8 * turn + 24 * (turn - 1) for turn in range(1, NUM_TURNS + 1)
    )
    assert num_prefilled(engine) <= 0.1 * engine.stats.prefix_queries


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "method", ["none", pytest.param("ngram", marks=pytest.mark.full), "dflash"]
)
def test_turn_that_continues_an_answer_equals_one_without_a_hit(
    method: str, overlap: int, checkpoints: Any
):
    """The state of a border within the answer is that of the accepted rows."""
    options: dict[str, Any] = {"method": method, "overlap": overlap}
    if method == "dflash":
        options |= {"draft": checkpoints("draft"), "num_drafts": 7, "adaptive": False}
    new = partial(config, checkpoints("qwen3_5"), **options)
    engine = make_engine(new())
    cold = make_engine(new(enable_prefix_caching=False))
    sampling = SAMPLED
    if method == "dflash":
        sampling = sampling.clone(speculation=Speculation(return_drafts=True))
    history = list(LONG)
    hits: list[int | None] = []
    for _ in range(3):
        warm = ask(engine, history, sampling)
        plain = ask(cold, history, sampling)
        assert warm.output_ids == plain.output_ids
        assert warm.draft_counts == plain.draft_counts
        hits.append(warm.num_cached)
        history += [*warm.output_ids, *NEXT]
    assert hits == [0, 192, 256]


def test_preempted_answer_resumes_from_its_own_state(checkpoints: Any):
    path = checkpoints("qwen3_5")
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 320}
    groups = resolve(config(path, **options)).kv_groups
    size = sum(group.bytes_per_page(16) for group in groups.values())
    engine = make_engine(config(path, kv_cache_memory=size * 29, **options))
    states = engine.components.states
    assert states is not None
    revived: list[int] = []
    copy = states.copy

    def watched(copies: Any) -> None:
        revived.extend(c.length for c in copies if not c.keeps)
        copy(copies)

    states.copy = watched
    sampling = SAMPLED.clone(max_tokens=85)
    other = [*OTHER, *LONG[:60]]
    texts = run(engine, [LONG[:150], other], sampling)
    assert engine.stats.preemptions
    assert max(revived) > 128, "it resumes from its prompt's state"
    cold = make_engine(config(path, enable_prefix_caching=False))
    assert texts == [ask(cold, prompt, sampling).output_ids for prompt in (LONG[:150], other)]


def test_answers_hold_at_most_half_of_the_rows(checkpoints: Any):
    path = checkpoints("qwen3_5")
    states = resolve(config(path))
    size = states.kept_state_bytes // states.num_kept_states
    engine = make_engine(config(path, state_cache_memory=4 * size))
    starts = [[*OTHER[i:], *OTHER[:i]] for i in range(3)]
    requests = [engine.add(prompt, SAMPLED) for prompt in starts]
    ledger = engine.scheduler.states
    assert ledger is not None
    held: set[int] = set()
    while engine.has_work:
        engine.step()
        check_engine(engine)
        held.add(len(ledger._answering))
    assert max(held) == 2
    assert len(ledger.kept._kept) == 4
    cold = make_engine(config(path, enable_prefix_caching=False))
    for prompt, request in zip(starts, requests, strict=True):
        plain = ask(cold, prompt, SAMPLED)
        assert request.output_ids == plain.output_ids


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "stage", ["copy", pytest.param("forward", marks=pytest.mark.full), "commit"]
)
def test_turns_are_right_when_steps_of_answers_fail(stage: str, overlap: int, checkpoints: Any):
    drafting = {"draft": checkpoints("draft"), "num_drafts": 7, "adaptive": False}
    engine = make_engine(config(checkpoints("qwen3_5"), overlap=overlap, **drafting))
    states = engine.components.states
    owner: Any = {"copy": states, "forward": engine.runner, "commit": engine.scheduler}[stage]
    name = {"copy": "copy", "forward": "forward", "commit": "_commit"}[stage]
    true, calls = getattr(owner, name), 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = true(*args, **named)
        if calls % 11 == 0:
            raise MemoryError("no memory")
        return result

    setattr(owner, name, failing)
    cold = make_engine(config(checkpoints("qwen3_5"), enable_prefix_caching=False, **drafting))
    starts = [LONG[:110], OTHER]
    requests = [engine.add(prompt, SAMPLED) for prompt in starts]
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except MemoryError:
            failures += 1
        check_engine(engine)
    setattr(owner, name, true)
    assert failures > 1
    for prompt, request in zip(starts, requests, strict=True):
        assert request.output_ids == ask(cold, prompt, SAMPLED).output_ids
        turn = [*prompt, *request.output_ids, *NEXT]
        again = ask(engine, turn, GREEDY)
        assert again.num_cached == 128
        assert again.output_ids == ask(cold, turn, GREEDY).output_ids


@pytest.mark.parametrize("name", TARGETS)
def test_tenants_share_no_pages_and_no_states(name: str, checkpoints: Any):
    engine = make_engine(config(checkpoints(name)))
    short = GREEDY.clone(max_tokens=2)

    def cached(salt: str) -> int | None:
        (request,) = engine.add_prompt(LONG, short, scheduling=SchedulingOptions(0, salt))
        drain(engine, [request])
        return request.num_cached

    hit = 128 if name == "qwen3_5" else 144
    assert [cached(salt) for salt in ("a", "b", "a", "", "b", "")] == [0, 0, hit, 0, hit, hit]
    if name == "qwen3_5":
        assert engine.stats.states_kept == 3
        assert engine.stats.state_hits == 3
    with pytest.raises(ValueError, match=r"cache_salt is 'a\\ud800', but must be a text of"):
        cached("a\ud800")
    assert not engine.has_work
