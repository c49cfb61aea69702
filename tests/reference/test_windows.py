"""Layers with windows give back pages: answers with hits and without, and what they save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from strobe.config import EngineConfig, resolve_limits
from strobe.engine.build import ResolvedConfig, resolve
from strobe.engine.engine import Engine
from strobe.models.architectures import load_target_config
from strobe.runner.memory import pages_within
from strobe.sampling_params import SamplingParams, Speculation
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import cache_bytes, make_engine
from tests.support.published_configs import ANSWERS, checkpoint_of, published
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target, windowed
from tests.support.transformers_parity import prompts

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (make_target, {}),
    "qwen3_5": (make_hybrid, {}),
    **{name: FAMILIES[name] for name in ("gpt_oss", "gemma4", "mistral")},
}
WINDOWS = {
    "qwen3": (None, 20),
    "qwen3_5": (None, 20),
    "gpt_oss": (None, 20, 6),
    "gemma4": (None, 20, 6),
    "mistral": (20, 9),
}
"""Of the page groups with a drafter whose layers see 20 positions."""
LONG, OTHER, *NEXT = prompts([150, 90, 20, 11])
SAMPLING = SamplingParams(
    temperature=0.7,
    seed=3,
    max_tokens=20,
    ignore_eos=True,
    logprobs=2,
    speculation=Speculation(return_drafts=True),
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[str, str]] = {}

    def pair(name: str) -> tuple[str, str]:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            write, changes = TARGETS[name]
            write(root / "target", max_position_embeddings=2048, **changes)
            made[name] = str(root / "target"), str(windowed(make_draft(root / "draft"), 20))
        return made[name]

    return pair


def config(pair: tuple[str, str], **options: Any) -> EngineConfig:
    target, draft = pair
    settings: dict[str, Any] = {
        "max_model_len": 320,
        "max_num_seqs": 4,
        "num_drafts": 3,
        "adaptive": False,
        "page_size": 4,
    }
    return EngineConfig(target, draft=draft, **(settings | options))


def fill_free_pages(engine: Engine) -> None:
    """Write NaN to all pages that nobody holds or has cached, so that a row that reads one
    shows."""
    size = engine.limits.page_size
    for group, pool in enumerate(engine.components.pool.groups):
        slots = torch.tensor(pool._free, dtype=torch.int64)[:, None] * size + torch.arange(size)
        for store in engine.components.stores.values():
            for layer, kv in enumerate(store.layers):
                if store.spec.group_of(layer) == group:
                    kv[slots.flatten()] = torch.nan


class Record(NamedTuple):
    """What one answer consists of. drafts: by the positions computed before them."""

    tokens: list[int]
    drafts: dict[int, tuple[int, ...]]
    logprobs: list[float]
    num_cached: int | None


def answers(
    engine: Engine, texts: Sequence[Sequence[int]], sampling: SamplingParams = SAMPLING
) -> list[Record]:
    """Run all prompts together; check the books and spoil the free pages after each step."""
    requests = [r for text in texts for r in engine.add_prompt(text, sampling)]
    drafts: dict[Any, dict[int, tuple[int, ...]]] = defaultdict(dict)
    logprobs: dict[Any, list[float]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            if event.num_proposed:
                at = event.num_computed_tokens
                drafts[event.key, event.sibling][at] = tuple(event.drafts)
            logprobs[event.key, event.sibling] += [entry.logprob for entry in event.logprobs]
        check_engine(engine)
        fill_free_pages(engine)
    for pool in engine.components.pool.groups:
        assert pool.available == pool.capacity
    return [
        Record(
            tokens=request.output_ids,
            drafts=drafts[request.key, request.sibling],
            logprobs=logprobs[request.key, request.sibling],
            num_cached=request.num_cached,
        )
        for request in requests
    ]


def same(actual: Sequence[Record], expected: Sequence[Record]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.tokens == theirs.tokens
        # After a preemption, steps may begin at other positions.
        common = set(ours.drafts) & set(theirs.drafts)
        assert common
        assert {at: ours.drafts[at] for at in common} == {at: theirs.drafts[at] for at in common}
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-3)


NAMES = [
    pytest.param(name, marks=pytest.mark.full) if name in ("qwen3", "gemma4") else name
    for name in TARGETS
]


@pytest.mark.parametrize("overlap", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", NAMES)
def test_answer_after_a_hit_equals_one_without(name: str, overlap: int, pairs: Any):
    """A chat of three turns, forks on borders and off them, and equal prompts."""
    warm = make_engine(config(pairs(name), overlap=overlap))
    assert warm.resolved.windows == WINDOWS[name]
    cold = make_engine(config(pairs(name), enable_prefix_caching=False, overlap=1))
    history = list(LONG)
    hits: list[int] = []
    for following in (*NEXT, []):
        (ours,) = answers(warm, [history])
        same([ours], answers(cold, [history]))
        hits.append(ours.num_cached or 0)
        history += [*ours.tokens, *following]
    assert hits[0] == 0
    step = 64 if name == "qwen3_5" else 4
    assert hits[1] > len(LONG) - step
    assert hits[2] > len(LONG) + 40 - 2 * step
    forks = [[*LONG[:n], *OTHER] for n in (128, 130, 77)]
    for fork in forks:  # the first of each parts where no state or window is expected to be needed
        same(answers(warm, [fork]), answers(cold, [fork]))
    again = answers(warm, [[*LONG[:n], *NEXT[0]] for n in (128, 130, 77)])
    same(again, answers(cold, [[*LONG[:n], *NEXT[0]] for n in (128, 130, 77)]))
    assert all(record.num_cached for record in again)
    twins = SAMPLING.clone(n=3)
    same(answers(warm, [OTHER], twins), answers(cold, [OTHER], twins))


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.full), 40])
@pytest.mark.parametrize("name", NAMES)
def test_answers_in_a_small_pool_equal_those_alone(name: str, rows: int | None, pairs: Any):
    """Prompts in chunks, requests that are preempted and resume, and pages that are evicted."""
    options: dict[str, Any] = {"max_num_batched_tokens": rows, "max_model_len": 200}
    resolved = resolve(config(pairs(name), **options))
    first = resolved.page_groups[0]
    size = cache_bytes(resolved, first.pages_of(resolved.limits) + 12)
    small = make_engine(config(pairs(name), kv_cache_memory=size, **options))
    cold = make_engine(config(pairs(name), enable_prefix_caching=False, max_model_len=200))
    texts = [LONG, [*LONG[:100], *OTHER[:30]], OTHER, [*OTHER, *NEXT[0]], LONG]
    expected = [record for text in texts for record in answers(cold, [text])]
    for _ in range(2):
        same(answers(small, texts), expected)
    assert small.stats.preemptions or rows is None or name == "mistral"


def test_sequences_hold_their_windows_only(pairs: Any):
    engine = make_engine(config(pairs("gpt_oss"), max_num_batched_tokens=40, overlap=1))
    most = [0, 0, 0]
    engine.add(LONG, SAMPLING)
    while engine.has_work:
        engine.step()
        pools = engine.components.pool.groups
        most = [max(n, p.capacity - p.available) for n, p in zip(most, pools, strict=True)]
        for record in engine.scheduler.running:
            if record.is_decoding and record.lease.length > record.prefill_end + 8:
                held = [sum(page > 0 for page in table) for table in record.lease.tables]
                for count, group in zip(held[1:], engine.resolved.page_groups[1:], strict=True):
                    assert count <= group.held
    assert most[0] >= (150 + 20) // 4
    assert max(most[1:]) <= -(-(20 + 40) // 4) + 2


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["openai__gpt-oss-20b", "google__gemma-4-26B-A4B"])
def test_tokens_per_byte_at_8000_positions(name: str, gpu: bool, tmp_path: Path):
    """At least 1.8 times as many sequences of 8,000 positions as if no layer had a window."""
    checkpoint = checkpoint_of(published("targets", name), tmp_path / "x", ANSWERS["targets"][name])
    settings = EngineConfig(target=str(checkpoint), max_model_len=32768)
    backends: Any = SimpleNamespace(kv_dtype=torch.bfloat16, overlap=2)
    nothing: Any = None
    resolved = ResolvedConfig(
        config=settings,
        target=load_target_config(checkpoint),
        draft=None,
        method="none",
        limits=resolve_limits(settings, model_max=32768, method="none", gpu=gpu),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        backends=backends,
        scratch=0,
        split=nothing,
    )
    groups = resolved.page_groups
    size = 16 * 10**9
    pages = pages_within(groups, resolved.limits, size)
    assert len(pages) == 2
    sequences = min(pages[0] // 500, (pages[1] - groups[1].in_flight) // groups[1].held)
    without = size // sum(group.page_bytes for group in groups) // 500
    assert sequences >= 1.8 * without


def test_bill_names_each_page_group(pairs: Any):
    engine = make_engine(config(pairs("gpt_oss"), kv_cache_memory="8MiB"))
    pages = [pool.num_pages for pool in engine.components.pool.groups]
    bill = engine.resolved.memory_bill(pages).parts
    parts = {part: size for part, size in bill.items() if part.startswith("keys")}
    assert list(parts) == [
        "keys and values of target, all positions",
        "keys and values of target, window of 6",
        "keys and values of draft, window of 20",
    ]
    stores = engine.components.stores
    assert sum(parts.values()) == sum(store.data.nbytes for store in stores.values())
    assert bill["page tables"] == 3 * 4 * 80 * 8


def test_windows_of_nearly_the_context_need_no_group(pairs: Any):
    resolved = resolve(config(pairs("gpt_oss"), max_model_len=32))
    assert resolved.windows == (None, 6)
    resolved = resolve(config(pairs("qwen3"), max_model_len=32))
    assert resolved.windows == (None,)
    assert resolved.kv_groups["target"].groups == ()
