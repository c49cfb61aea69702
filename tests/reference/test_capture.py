"""Padded, captured and replayed steps produce the same tokens as plain steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe import EngineConfig, SamplingParams
from strobe.config import DEMO_MODELS, Limits
from strobe.counters import EngineStats
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.runner.buckets import Buckets
from strobe.runner.layout import Shape
from strobe.runner.step_ops.numpy_step_ops import NumpyStepOps
from strobe.sampling.sampling_state import FLOATS, INTS
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import TAIL, Span
from strobe.text.tokenizer import Tokenizer
from strobe.warmup.warmup_steps import warm_up
from tests.support.bookkeeping_checks import check_engine, check_pool
from tests.support.engine_runs import make_engine, put, run, watched
from tests.support.full_marks import full_where
from tests.support.scripted_drafting import RandomRows, Scripted, wavering
from tests.support.simulated_graphs import captured

COLD = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
WARM = COLD.clone(temperature=0.9, top_p=0.8, top_k=30, seed=4)
PROMPTS = [[7, 3, 9] * n + [n] for n in (1, 5, 2, 9, 4, 3, 7)]
SAMPLING = [
    COLD,
    COLD.clone(max_tokens=9),
    WARM,
    WARM.clone(top_p=1.0, top_k=0, speculation=False),
    COLD.clone(speculation={"num_drafts": 3}, max_tokens=31),
    COLD.clone(speculation={"method": "ngram"}),
    WARM.clone(presence_penalty=0.7, repetition_penalty=1.2, logprobs=2),
]


@pytest.fixture(autouse=True)
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy results when the step is launched, as a GPU does."""
    monkeypatch.setattr("strobe.runner.step_output.download", torch.clone)


def config(target: Any, drafter: Path | None = None, **options: Any) -> EngineConfig:
    fields = {"max_model_len": 96, "max_num_seqs": 5, "page_size": 4, **options}
    return EngineConfig(str(target.path), draft=drafter and str(drafter), **fields)


@full_where(lambda overlap, budget: (overlap == 1) is (budget is None))
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("budget", [None, 48])
def test_replayed_steps_match_eager_steps(
    overlap: int, budget: int | None, target: Any, draft: Callable[..., Path]
):
    plain = run(make_engine(config(target, method="none")), PROMPTS, without_speculation())
    resolved = resolve(config(target, draft(), overlap=overlap, max_num_batched_tokens=budget))
    parts = build(resolved)
    double = captured(parts, 5, resolved.limits.num_drafts)
    engine = watched(Engine(resolved, components=parts))
    assert run(engine, PROMPTS, SAMPLING) == plain
    assert double.captured == len(parts.graphs) > 3
    assert double.replayed > 3 * double.captured


def without_speculation() -> list[SamplingParams]:
    return [params.clone(speculation=None) for params in SAMPLING]


@pytest.mark.parametrize("overlap", [1, 2])
def test_replayed_and_plain_steps_choose_the_same_drafts(
    overlap: int, target: Any, draft: Callable[..., Path]
):
    plain = run(make_engine(config(target, method="none")), PROMPTS, without_speculation())
    resolved = resolve(config(target, draft(), overlap=overlap))
    reports: list[list[Any]] = []
    for graphs in (False, True):
        parts = build(resolved)
        double = captured(parts, 5, resolved.limits.num_drafts) if graphs else None
        put(parts, {"dflash": Scripted(parts.state, resolved.limits.num_drafts, wavering)})
        engine = watched(Engine(resolved, components=parts, draft_policy=RandomRows("5")))
        script: Any = engine.proposers["dflash"]
        requests: list[Any] = []
        for prompt, sampling, answer in zip(PROMPTS * 2, SAMPLING * 2, plain * 2, strict=True):
            requests.append(engine.add(prompt, sampling))
            script.answers[requests[-1]] = prompt + answer
        while engine.has_work:
            engine.step()
            check_engine(engine)
        assert [request.output_ids for request in requests] == plain * 2
        reports.append([request.draft_counts for request in requests])
    assert reports[0] == reports[1]
    assert sum(counts.num_accepted for counts in reports[0]) > 40
    assert double is not None
    assert double.replayed > double.captured


@pytest.mark.parametrize("overlap", [1, 2])
def test_prompt_logprobs_are_right_when_fewer_drafts_are_verified(
    overlap: int, target: Any, draft: Callable[..., Path]
):
    scored = COLD.clone(prompt_logprobs=2, max_tokens=3)
    resolved = resolve(config(target, draft(), overlap=overlap, enable_prefix_caching=False))
    reports: list[Any] = []
    for drafting in (False, True):
        parts = build(resolved)
        captured(parts, 5, resolved.limits.num_drafts)
        engine = Engine(resolved, components=parts, draft_policy=RandomRows("1"))
        sampling = scored.clone(speculation=None if drafting else False)
        for prompt in PROMPTS[:3]:
            engine.add(prompt, COLD.clone(max_tokens=60, speculation=None if drafting else False))
        requests: list[Any] = []
        for _ in range(30):
            engine.step()
            if len(requests) < len(PROMPTS):
                requests.append(engine.add(PROMPTS[len(requests)], sampling))
        while engine.has_work:
            engine.step()
        reports.append([request.prompt_logprobs for request in requests])
    plain, drafted = reports
    for expected, scores in zip(plain, drafted, strict=True):
        for a, b in zip(expected[1:], scores[1:], strict=True):
            assert a.token == b.token
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_accepted_drafts_advance_replayed_steps(target: Any):
    """The drafter is often right: accepted lengths differ between requests and steps."""
    plain = run(make_engine(config(target)), PROMPTS, COLD)
    resolved = resolve(config(target, method="ngram", num_drafts=6))
    parts = build(resolved)
    script = Scripted(parts.state, 6, wavering)
    put(parts, {"ngram": script})
    double = captured(parts, 5, 6)
    engine = watched(Engine(resolved, components=parts))
    requests = [engine.add(prompt, COLD) for prompt in PROMPTS]
    for request, prompt, answer in zip(requests, PROMPTS, plain, strict=True):
        script.answers[request] = prompt + answer
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert [request.output_ids for request in requests] == plain
    assert double.replayed > double.captured
    assert sum(request.draft_counts.num_accepted for request in requests) > 50


def test_drafts_survive_the_forward_before_grammar_masks():
    """There the forward and the drafter are separate graphs that share memory."""
    settings = EngineConfig(
        str(DEMO_MODELS / "target"), draft=str(DEMO_MODELS / "draft"), max_model_len=256,
        max_num_seqs=2, draft_sample_method="probabilistic", enable_prefix_caching=False,
    )  # fmt: skip
    spelled = COLD.clone(structured_outputs={"regex": "[^~]{40,120}"}, ignore_eos=False)
    samplings = [spelled, spelled.clone(temperature=0.8, seed=1)]
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    prompt = Tokenizer(DEMO_MODELS / "target").render_chat(question)
    runs: list[list[tuple[list[int], int]]] = []
    for graphs in (False, True):
        resolved = resolve(settings)
        parts = build(resolved)
        if graphs:
            double = captured(parts, 2, resolved.limits.num_drafts)
        engine = Engine(resolved, components=parts)
        answers: list[tuple[list[int], int]] = []
        for sampling in samplings:
            request = engine.add(prompt, sampling)
            while engine.has_work:
                engine.step()
            answers.append((request.output_ids, request.draft_counts.num_accepted))
        runs.append(answers)
    assert runs[1] == runs[0]
    assert all(accepted for _, accepted in runs[0])
    assert double.replayed > double.captured


def decoding(count: int, drafts: int) -> list[Span]:
    method = "dflash" if drafts else None
    return [Span(i, 5, 5, (TAIL,), drafts, method, 1 + drafts) for i in range(count)]


def prompts_of(count: int, rows: int) -> list[Span]:
    """Return `count` prompts of `rows` rows in all, the first span the longest."""
    first = Span(0, 0, 0, (1,) * (rows - count + 1), num_logits=1)
    return [first, *[Span(i, 0, 0, (1,), num_logits=1) for i in range(1, count)]]


def test_buckets_have_a_span_for_padding_rows():
    buckets = Buckets(20, 7)
    assert buckets.shape_of(decoding(3, 7)) == Shape(4, 32, 8, 7, 8)
    assert buckets.shape_of(decoding(4, 7)) == Shape(4, 32, 8, 7, 8)
    assert buckets.shape_of(decoding(20, 7)) == Shape(20, 160, 8, 7, 8)
    assert buckets.shape_of(decoding(2, 0)) == Shape(2, 2, 1, 0, 1)
    assert buckets.shape_of(prompts_of(4, 32)) == Shape(4, 32, 32, 7, 8)
    assert buckets.shape_of(prompts_of(4, 11)) == Shape(16, 16, 8, 7, 8)
    assert buckets.shape_of(prompts_of(4, 31)) == Shape(16, 32, 32, 7, 8)
    assert buckets.shape_of(prompts_of(16, 90)) == Shape(21, 128, 128, 7, 8)
    for spans in range(1, 21):
        for rows in range(spans, 700, 3):
            shape = buckets.shape_of(prompts_of(spans, rows))
            assert shape.max_drafts == (7 if rows <= 512 else 0)
            assert shape.max_logits == shape.max_drafts + 1
            assert shape.spans >= spans
            assert shape.rows >= rows
            assert shape.max_rows >= rows - spans + 1
            assert shape.rows == rows or shape.spans > spans
            assert buckets.is_captured(shape) == (rows <= 512)


def test_sampling_rows_are_contiguous(target: Any):
    """The sampling kernel expects this layout."""
    engine = make_engine(config(target))
    engine.add([5, 6, 7], WARM)
    engine.add([5, 6], COLD)
    engine.step()
    state = engine.sampling
    temperature = state.floats[FLOATS.index("temperature"), :2]
    top_p = state.floats[FLOATS.index("top_p"), :2]
    assert sorted(temperature.tolist()) == pytest.approx([0.0, 0.9])
    assert sorted(top_p.tolist()) == pytest.approx([0.8, 1.0])
    assert sorted(state.ints[INTS.index("top_k"), :2].tolist()) == [0, 30]
    slots = torch.tensor([0, 1])
    for table in (state.floats, state.ints):
        assert all(column.stride() == (1,) for column in table.index_select(1, slots).unbind())


def test_uncapturable_step_runs_eagerly(target: Any):
    plain = run(make_engine(config(target)), PROMPTS, COLD)
    resolved = resolve(config(target))
    parts = build(resolved)
    double = captured(parts, 5, 0)
    attempts: list[Any] = []

    def refusing(body: Callable[[], Any]) -> Any:
        attempts.append(body)
        raise RuntimeError("out of memory")

    double.capture = refusing
    assert run(Engine(resolved, components=parts), PROMPTS, COLD) == plain
    assert len(parts.graphs) == 0
    assert 0 < len(attempts) < 12, "each shape is tried once"


def test_cpu_engine_keeps_books_in_numpy_and_shares_its_operations(target: Any):
    parts = build(resolve(config(target)))
    assert type(parts.state.ops) is NumpyStepOps
    assert parts.sampling.ops is parts.state.ops


def test_padding_rows_leave_the_last_page_untouched(target: Any):
    parts = build(resolve(config(target)))
    state = parts.state
    padded = type(state)(Limits(96, 5, 64, 0, 4), state.device, state.ops, spare_pages=[7])
    columns = torch.arange(padded.tables.shape[2])
    first = padded.tables[0] + 4 * columns  # each page's first K/V slot
    assert first[:-1].unique().tolist() == [0]
    assert first[-1].unique().tolist() == [28]


KERNELS = {"kernels": "triton"}, {"attention_backend": "triton"}, {"weight_dtype": "fp8"}


@pytest.mark.parametrize("options", [*KERNELS, {"draft_attention_backend": "triton"}], ids=str)
def test_gpu_only_options_on_cpu_are_rejected(
    options: dict[str, str], target: Any, draft: Callable[..., Path]
):
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=f"^{name} is '{value}', but the device is cpu.*; use "):
        resolve(config(target, draft(), device="cpu", **options))


def test_fp8_kv_cache_is_lossless(target: Any, draft: Callable[..., Path]):
    plain = run(make_engine(config(target, kv_cache_dtype="fp8")), PROMPTS, COLD)
    engine = make_engine(config(target, draft(), kv_cache_dtype="fp8"))
    assert run(engine, PROMPTS, COLD) == plain
    assert {store.data.dtype for store in engine.components.stores.values()} == {
        torch.float8_e4m3fn
    }


def warmed(target: Any, drafter: Path, **options: Any) -> Engine:
    resolved = resolve(config(target, drafter, **options))
    parts = build(resolved)
    captured(parts, resolved.limits.max_num_seqs, resolved.limits.num_drafts)
    engine = watched(Engine(resolved, components=parts))
    warm_up(engine)
    return engine


@full_where(lambda seqs, overlap: (seqs, overlap) != (5, 2))
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("seqs", [5, 8])
def test_warm_up_captures_everything(
    overlap: int, seqs: int, target: Any, draft: Callable[..., Path]
):
    engine = warmed(target, draft(), overlap=overlap, max_num_seqs=seqs)
    before = len(engine.graphs)
    unseeded = COLD.clone(temperature=1.0, top_p=0.9)  # on a CPU, mixtures are one more kind
    outputs = [run(engine, PROMPTS, sampling) for sampling in (unseeded, COLD, SAMPLING[1])]
    outputs.append(run(engine, [prompt * 2 for prompt in PROMPTS], unseeded))
    assert len(engine.graphs) == before > 20
    cold = make_engine(config(target, draft(), overlap=overlap, max_num_seqs=seqs))
    again = [run(cold, PROMPTS, sampling) for sampling in (unseeded, COLD, SAMPLING[1])]
    assert again == outputs[:3], "requests without a seed draw by their number"


class RandomPlans(DraftPolicy):
    """Plans a random width, random requests and a random number of drafts that has a step."""

    def __init__(self, budget: AdaptiveDraftPolicy):
        self.budget, self.rng = budget, random.Random(1)

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        rng, count = self.rng, len(candidates)
        num_drafting, width = rng.randint(0, count), rng.choice(self.budget.widths)
        if not num_drafting:
            return DraftPlan([0] * count)
        drafts, _ = rng.choice(self.budget.rows(count, num_drafting, width))
        chosen = set(rng.sample(range(count), num_drafting))
        limits = [min(c.max_drafts, width) * (i in chosen) for i, c in enumerate(candidates)]
        return DraftPlan(limits, drafts if drafts < sum(limits) else None)


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
def test_warm_up_captures_every_adaptive_choice(
    overlap: int, target: Any, draft: Callable[..., Path]
):
    engine = warmed(target, draft(), overlap=overlap)
    budget, before = engine.scheduler.draft_policy, set(engine.graphs._graphs)
    assert isinstance(budget, AdaptiveDraftPolicy)
    engine.scheduler.draft_policy = RandomPlans(budget)
    drawn = COLD.clone(temperature=1.0, top_p=0.9)
    outputs = [run(engine, PROMPTS, sampling) for sampling in (drawn, COLD)]
    assert {0, 3, 7} == {key[-1].max_drafts for key in before if key[0] != "draft"}
    assert set(engine.graphs._graphs) == before
    cold = make_engine(config(target, draft(), overlap=overlap, adaptive=False))
    assert [run(cold, PROMPTS, sampling) for sampling in (drawn, COLD)] == outputs


def test_warm_up_leaves_no_state(target: Any, draft: Callable[..., Path]):
    engine = warmed(target, draft())
    pool = engine.components.pool
    check_pool(pool)
    assert not engine.has_work
    assert engine.stats == EngineStats()
    assert pool.available == pool.capacity
    assert pool.lookup(pool.key(b"", [0] * 4)) is None
    assert engine.add([1], COLD).id == "request-0"
    policy = engine.scheduler.draft_policy
    assert isinstance(policy, AdaptiveDraftPolicy)
    assert policy.forecast.step == 0
    assert not policy.chances.counts.any()


@pytest.mark.parametrize("options", [{}, {"max_model_len": 2}, {"max_num_seqs": 1}], ids=str)
def test_small_engines_warm_up_too(
    options: dict[str, int], target: Any, draft: Callable[..., Path]
):
    """With and without capture, also without room for a block or with a single request."""
    engine = warmed(target, draft(), **options)
    assert not engine.has_work
    plain = make_engine(config(target, draft(), **options))
    warm_up(plain)
    assert run(engine, [[5]], COLD) == run(plain, [[5]], COLD)


def test_warm_up_stops_at_its_time_limit(target: Any, draft: Callable[..., Path]):
    engine = make_engine(config(target, draft()))
    warm_up(engine, seconds=0.0)
    assert not engine.has_work
    assert engine.stats == EngineStats()
    assert run(engine, [[5]], COLD)


@pytest.mark.parametrize("overlap", [1, pytest.param(2, marks=pytest.mark.full)])
def test_warm_up_captures_the_same_shapes_with_and_without_overlap(
    overlap: int, target: Any, draft: Callable[..., Path]
):
    """Batches that fill more than half of the slots also arrive in one step."""
    engine = warmed(target, draft(), overlap=overlap, max_num_seqs=8, max_model_len=200)
    shapes = {(key[0].sampled, key[1]) for key in engine.graphs._graphs if key[0] != "draft"}
    for sampled in (False, True):
        for rows in (16, 32, 64, 128):
            assert (sampled, Shape(9, rows, rows, 7, 8)) in shapes
        for count in (1, 2, 4, 8):
            assert (sampled, Shape(count, 8 * count, 8, 7, 8)) in shapes
