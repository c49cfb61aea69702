"""Adaptive drafting in the engine reacts to the drafter's quality and changes no answer. Step costs
are fixed, so that every run chooses the same."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.runner.buckets import verified_rows
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan
from strobe.speculation.proposer import Drafts
from strobe.step import Span
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine, put, run, watched
from tests.support.full_marks import full_where
from tests.support.scripted_drafting import RandomRows, Scripted
from tests.support.tiny_checkpoints import VOCAB, pool_bytes

PROMPTS = [[7, 3, 9] * n + [n] for n in (1, 5, 2, 4)]
PHASES = 80, 280, 490  # output lengths at which the phases end
GREEDY = SamplingParams(temperature=0.0, max_tokens=PHASES[-1], ignore_eos=True)


class FixedCosts(StepCosts):
    """Costs that ignore measured times: a draft's row costs 4 % of a step."""

    def __init__(self) -> None:
        super().__init__({8: 1.0, 64: 1.5}, {1: 10.0, 101: 50.0})

    def observe(self, work: StepWork, ms: float, config: object) -> bool:
        return True


class PhasedDrafter(Scripted):
    """Right in the first and third phase of an answer, wrong in the second. The margins say little:
    3 to 6 for right drafts, 2 to 5 for wrong ones."""

    def propose(self, spans: Sequence[Span]) -> Drafts:
        drafts = super().propose(spans)
        assert drafts.tokens is not None
        base = [[3.0 - (phase_of(request) == 1)] for request in self.requests(spans)]
        return drafts._replace(margins=torch.tensor(base) + (drafts.tokens * 5 % 4))


def phase_of(request: Request) -> int:
    return bisect_right(PHASES, request.num_output)


def mangle(request: Request, start: int, drafts: list[int]) -> list[int]:
    return [(token + 1) % VOCAB for token in drafts] if phase_of(request) == 1 else drafts


class RecordingPolicy(AdaptiveDraftPolicy):
    """num_drafts: by phase, the drafts per request of each step whose requests are all in it; of
    the second phase only steps of all `count` requests, since a request that is left behind drafts
    by what the others' right drafts have taught."""

    num_drafts: dict[int, list[float]]
    count: int

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        plan = super().plan(candidates, load)
        phases = {phase_of(candidate.request) for candidate in candidates}
        if len(phases) == 1 and (phases != {1} or len(candidates) == self.count):
            self.num_drafts.setdefault(phases.pop(), []).append(
                sum(plan.max_drafts) / len(candidates)
            )
        return plan


def config(target: Any, drafter: Path | None, **options: Any) -> EngineConfig:
    fields = {"max_model_len": 512, "max_num_seqs": 4, "page_size": 4, **options}
    return EngineConfig(str(target.path), draft=drafter and str(drafter), **fields)


@pytest.fixture(scope="module")
def long_answers(target: Any) -> list[list[int]]:
    """Return plain decoding's answers to PROMPTS."""
    return run(make_engine(config(target, None, method="none")), PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def short_answers(target: Any) -> list[list[int]]:
    """Return plain decoding's answers to PROMPTS in a context of 48 tokens."""
    engine = make_engine(config(target, None, method="none", max_model_len=48))
    return run(engine, PROMPTS, GREEDY.clone(max_tokens=None))


@full_where(lambda count, overlap: count == overlap or (count, overlap) == (4, 2))
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("count", [1, 4])
def test_drafting_pauses_for_bad_drafts_and_resumes(
    count: int, overlap: int, target: Any, draft: Callable[..., Path], long_answers: Any
):
    prompts, plain = PROMPTS[:count], long_answers[:count]
    resolved = resolve(config(target, draft(), overlap=overlap))
    parts = build(resolved)
    script = PhasedDrafter(parts.state, resolved.limits.num_drafts, mangle)
    put(parts, {"dflash": script})
    policy = RecordingPolicy((3, 7), (4, 8), partial(verified_rows, None), 512, 4)
    policy.num_drafts = {}
    policy.count = count
    policy.costs = FixedCosts()
    engine = watched(Engine(resolved, components=parts, draft_policy=policy))
    requests = [engine.add(prompt, GREEDY) for prompt in prompts]
    for request, prompt, answer in zip(requests, prompts, plain, strict=True):
        script.answers[request] = prompt + answer
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert [request.output_ids for request in requests] == plain
    first, second, third = policy.num_drafts.values()
    full = resolved.limits.num_drafts
    assert set(first[2 * count + 1 :]) == {full}, "few draft until blocks were seen"
    pauses = [drafts == 0 for drafts in second[-50:]]
    assert 0.7 < sum(pauses) / len(pauses) < 1.0, "it pauses, except for probes"
    assert full in third
    assert sum(third[-5:]) >= 5 * full / 2
    for request in requests:
        assert 40 < request.draft_counts.skipped_steps < PHASES[2]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("pages", [20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_any_plan_respects_pages_and_context(
    seed: int,
    pages: int,
    overlap: int,
    target: Any,
    draft: Callable[..., Path],
    short_answers: Any,
):
    """Answers end at the context's end, in a pool that fits only a few of them."""
    sampling = GREEDY.clone(max_tokens=None)
    options = {"max_model_len": 48, "kv_cache_memory": pool_bytes(pages, 4, drafter_layers=2)}
    plain = short_answers
    assert [len(p) + len(answer) for p, answer in zip(PROMPTS, plain, strict=True)] == [48] * 4
    engine = make_engine(
        config(target, draft(), overlap=overlap, **options), draft_policy=RandomRows(f"{seed}")
    )
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert [request.output_ids for request in requests] == plain
    assert any(request.num_preemptions for request in requests) == (pages == 20)
