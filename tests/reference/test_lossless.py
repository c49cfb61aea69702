"""Speculation changes no token: every way to draft, sample, schedule and store, pair by pair.

The measure is plain decoding, one request at a time; plain greedy decoding is measured against
transformers. Each pair of values below meets in at least one of the runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    EOS_IDS,
    VOCAB,
    Scripted,
    adversary,
    drain,
    greedy,
    make_engine,
    oracle,
    pool_bytes,
    run,
    wavering,
)

from strobe.config import EngineConfig
from strobe.request import Request, SamplingParams

LENGTH = 96
"""max_model_len of every engine here."""

SCRIPTS = {"oracle": oracle, "adversary": adversary, "wavering": wavering}

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "proposer": ("none", "dflash", "ngram", "per request", "oracle", "adversary", "wavering"),
    "drafts": (1, 3, 7),
    "workload": ("greedy", "stops", "sampled", "filtered", "mixed"),
    "rows": ("tight", "spare", "ample"),
    "page_size": (1, 16, 64, 256),
    "overlap": (1, 2),
    "pool": ("ample", "tiny"),
    "caching": (True, False),
    "lengths": ("full", "random", "by request"),
    "seqs": (1, 3, 8),
}


@dataclass(frozen=True)
class Combination:
    """One run: a value of each dimension."""

    proposer: str
    drafts: int
    workload: str
    rows: str
    page_size: int
    overlap: int
    pool: str
    caching: bool
    lengths: str
    seqs: int

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).replace(" ", "_") for name in DIMENSIONS)

    @property
    def preempts(self) -> bool:
        """Whether the pool is so small that requests must make room for each other."""
        return self.pool == "tiny" and self.page_size <= 16 and self.seqs > 1


def pairs_of(combination: Combination) -> set[tuple[str, Any, str, Any]]:
    values = [(name, getattr(combination, name)) for name in DIMENSIONS]
    return {(*a, *b) for a, b in itertools.combinations(values, 2)}


def all_pairs() -> set[tuple[str, Any, str, Any]]:
    return {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(DIMENSIONS.items(), 2)
        for x in xs
        for y in ys
    }


def covering() -> list[Combination]:
    """Few combinations in which every pair of values occurs: greedily, from a fixed seed. Then
    some more in which requests must make room for each other."""
    rng, missing, chosen = random.Random(5), all_pairs(), list[Combination]()

    def drawn(**fixed: Any) -> Combination:
        return Combination(**{n: fixed.get(n, rng.choice(v)) for n, v in DIMENSIONS.items()})

    while missing:
        anchor = rng.choice(sorted(missing, key=repr))
        tried = [drawn(**dict([anchor[:2], anchor[2:]])) for _ in range(40)]
        best = max(tried, key=lambda c: len(missing & pairs_of(c)))
        chosen.append(best)
        missing -= pairs_of(best)
    for proposer in DIMENSIONS["proposer"] * 2:
        fixed = {"proposer": proposer, "pool": "tiny", "seqs": rng.choice([3, 8])}
        chosen.append(drawn(page_size=rng.choice([1, 16]), **fixed))
    return chosen


COMBINATIONS = covering()


def test_every_pair_of_values_occurs():
    assert set().union(*map(pairs_of, COMBINATIONS)) == all_pairs()
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) <= 80
    assert {c.proposer for c in COMBINATIONS if c.preempts} == set(DIMENSIONS["proposer"])


def prompts() -> list[list[int]]:
    """Eight, some of which begin alike."""
    noise = torch.Generator().manual_seed(9)
    made = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (5, 35, 12, 1, 22)]
    made += [[*made[1][:32], 3, 1], [*made[1][:17], 8], [4, 9, 2] * 6]
    return made


def workload(name: str) -> list[tuple[list[int], SamplingParams]]:
    """Prompts with what is asked of them; sampled ones bring seeds."""
    texts = prompts()
    cold = SamplingParams(temperature=0, max_tokens=28, ignore_eos=True)
    stops = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[12, 33])
    warm = SamplingParams(temperature=1.0, max_tokens=26, seed=7)
    kinds: dict[str, list[SamplingParams]] = {
        "greedy": [
            cold,
            cold.clone(max_tokens=None),
            cold.clone(max_tokens=1),
            cold.clone(ignore_eos=False, max_tokens=45),
            cold.clone(max_tokens=2),
            cold,
            cold.clone(max_tokens=9),
            cold.clone(max_tokens=33),
        ],
        "stops": [
            stops,
            stops.clone(min_tokens=9),
            stops.clone(ignore_eos=True, min_tokens=40),
            stops.clone(min_tokens=1),
            stops.clone(temperature=0.9, seed=3, min_tokens=6),
            stops.clone(stop_token_ids=[], min_tokens=30),
            stops.clone(temperature=1.5, seed=-5, stop_token_ids=[1, 2, 3, 4], min_tokens=12),
            stops.clone(stop_token_ids=list(range(30))),
        ],
        "sampled": [
            warm,
            warm.clone(n=3),
            warm.clone(temperature=0.5, seed=2**62),
            warm.clone(temperature=2.0, max_tokens=None, ignore_eos=True),
            warm.clone(seed=-1),
            warm.clone(ignore_eos=True),
        ],
        "filtered": [
            warm.clone(top_k=3),
            warm.clone(top_p=0.7, n=3),
            warm.clone(min_p=0.2, ignore_eos=True),
            warm.clone(top_k=8, top_p=0.9, min_p=0.02, temperature=1.4),
            warm.clone(top_k=1),
            warm.clone(top_p=0.3, temperature=3.0, max_tokens=40),
        ],
    }
    kinds["mixed"] = [
        cold.clone(max_tokens=None),
        warm.clone(n=3, ignore_eos=True),
        stops.clone(min_tokens=9),
        warm.clone(top_k=5, top_p=0.8, max_tokens=40),
        stops,
        warm.clone(temperature=0.7, min_p=0.1, stop_token_ids=[12, 33], min_tokens=20),
        cold,
        warm.clone(max_tokens=3),
    ]
    return list(zip(texts, kinds[name], strict=False))


@pytest.fixture(scope="module")
def plain(target: Any) -> Callable[[str], list[list[int]]]:
    """plain(workload) -> every answer by plain decoding, one request at a time."""
    made: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in made:
            config = EngineConfig(
                target=str(target.path),
                max_model_len=LENGTH,
                max_num_seqs=1,
                enable_prefix_caching=False,
            )
            engine = make_engine(config)
            texts, params = zip(*workload(name), strict=True)
            made[name] = run(engine, texts, params)
        return made[name]

    return get


def speculation(combination: Combination, index: int) -> Any:
    """What the index-th request asks for."""
    if combination.proposer == "none":
        return None
    asked: dict[str, Any] = {}
    if combination.proposer == "per request":
        method = (None, "ngram", "none", "dflash")[index % 4]
        if method == "none":
            return False
        asked["method"] = method
    if combination.lengths == "by request":
        asked["num_drafts"] = index % (combination.drafts + 1)
    return asked


def policy(combination: Combination) -> dict[str, Any]:
    if combination.lengths != "random":
        return {}
    rng = random.Random(repr(combination))
    return {"draft_length": lambda request, allowed: rng.randint(0, allowed)}


def engine_for(c: Combination, target: Any, drafter: Path) -> Any:
    speculates = c.proposer != "none"
    drafts = c.drafts if speculates else 0
    needed = c.seqs * (drafts + 1)
    loads = c.proposer in ("dflash", "per request")
    config = EngineConfig(
        target=str(target.path),
        draft=str(drafter) if loads else None,
        method=None if loads or not speculates else "ngram",
        num_drafts=drafts or None,
        max_model_len=LENGTH,
        max_num_seqs=c.seqs,
        max_num_batched_tokens={"tight": needed, "spare": needed + 9, "ample": None}[c.rows],
        page_size=c.page_size,
        overlap=c.overlap,
        enable_prefix_caching=c.caching,
    )
    if c.pool == "tiny":
        pages = -(-LENGTH // c.page_size)
        layers = 2 if loads else 0
        config = config.with_(kv_cache_memory=pool_bytes(pages, c.page_size, drafter_layers=layers))
    if c.proposer in SCRIPTS:
        script = SCRIPTS[c.proposer]
        return make_engine(
            config,
            lambda parts, _: Scripted(parts.state, drafts, script),
            names=["ngram"],
            **policy(c),
        )
    return make_engine(config, **policy(c))


def check_counts(c: Combination, requests: list[Request]) -> None:
    """The oracle's drafts are all kept up to the answer's end, the adversary's never."""
    for request in requests:
        counts = request.speculation
        assert 0 <= counts.accepted <= counts.drafted
        if c.proposer == "adversary":
            assert counts.accepted == 0
        if c.proposer == "oracle":
            assert counts.drafted - counts.accepted <= c.drafts
            if c.lengths != "random" and not request.num_preemptions and request.num_drafts:
                assert counts.steps == -(-(request.num_output - 1) // (request.num_drafts + 1))


@pytest.mark.parametrize("c", COMBINATIONS, ids=str)
def test_outputs_equal_plain_decoding(
    c: Combination, target: Any, draft: Callable[..., Path], plain: Any
):
    wanted = plain(c.workload)
    engine = engine_for(c, target, draft())
    jobs = workload(c.workload)
    for again in (False, True):
        requests: list[Request] = []
        for index, (prompt, sampling) in enumerate(jobs):
            asked = sampling.clone(speculation=speculation(c, index))
            requests += [engine.add(prompt, asked, sibling=i) for i in range(sampling.n)]
        if c.proposer in SCRIPTS:
            script: Any = engine.proposers.proposers["ngram"]
            for request, answer in zip(requests, wanted, strict=True):
                script.answers[request] = request.tokens + answer
        if again and c.caching:
            engine.scheduler.waiting.reverse()
        drain(engine, requests)
        assert [r.output_ids for r in requests] == wanted
        check_counts(c, requests)
    assert (engine.stats.preemptions > 0) >= c.preempts
    if c.proposer not in ("none", "per request") and c.lengths == "full":
        assert engine.stats.num_draft_tokens > 0
    if c.proposer == "wavering" and c.lengths == "full":
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens


def test_plain_greedy_decoding_equals_transformers(target: Any, plain: Any):
    for name in ("greedy", "stops"):
        for (prompt, asked), found in zip(workload(name), plain(name), strict=True):
            if asked.temperature or asked.min_tokens:
                continue
            ends = ([] if asked.ignore_eos else EOS_IDS) + list(asked.stop_token_ids)
            count = asked.max_tokens or LENGTH - len(prompt)
            assert found == greedy(target.hf, prompt, count, eos_token_id=ends or None)


def test_the_workloads_end_in_every_way_and_vary(plain: Any):
    """Or the comparisons above would prove little."""
    answers = {name: plain(name) for name in DIMENSIONS["workload"]}
    everything = [answer for made in answers.values() for answer in made]
    assert len({tuple(answer[:4]) for answer in everything}) > 25
    assert len({len(answer) for answer in everything}) > 10
    assert any(answer[-1] in (12, 33) for answer in answers["stops"])
    assert any(answer[-1] in EOS_IDS for answer in answers["sampled"])
    siblings = answers["sampled"][1:4]
    assert len(set(map(tuple, siblings))) == 3
    for (prompt, asked), answer in zip(workload("greedy"), answers["greedy"], strict=True):
        if asked.max_tokens is None:
            assert len(prompt) + len(answer) == LENGTH


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_the_oracle_divides_the_steps_by_its_block(target: Any, drafts: int, overlap: int):
    prompt = prompts()[0]
    answer = greedy(target.hf, prompt, 41, eos_token_id=None)
    config = EngineConfig(
        target=str(target.path),
        method="ngram",
        num_drafts=drafts,
        overlap=overlap,
        max_model_len=LENGTH,
    )
    engine = make_engine(
        config, lambda parts, _: Scripted(parts.state, drafts, oracle), names=["ngram"]
    )
    script: Any = engine.proposers.proposers["ngram"]
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=41, ignore_eos=True))
    script.answers[request] = prompt + answer
    drain(engine, [request])
    assert request.output_ids == answer
    blocks = -(-40 // (drafts + 1))
    assert request.speculation.steps == blocks
    assert engine.stats.steps == 1 + blocks + (overlap - 1)
    assert request.speculation.drafted == blocks * drafts
    short = blocks * (drafts + 1) - 40
    assert request.speculation.accepted >= blocks * drafts - short


@pytest.mark.parametrize("overlap", [1, 2])
def test_the_end_of_the_context_cuts_a_draft_and_not_the_answer(overlap: int, target: Any):
    """For every distance of the last block from the end, where drafts beyond it are true too."""
    for length in range(20, 29):
        prompt = prompts()[2]
        answer = greedy(target.hf, prompt, 30, eos_token_id=None)
        config = EngineConfig(
            target=str(target.path),
            method="ngram",
            num_drafts=6,
            max_model_len=length,
            page_size=4,
            overlap=overlap,
        )
        engine = make_engine(
            config, lambda parts, _: Scripted(parts.state, 6, oracle), names=["ngram"]
        )
        script: Any = engine.proposers.proposers["ngram"]
        sampling = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        request = engine.add(prompt, sampling)
        script.answers[request] = prompt + answer
        drain(engine, [request])
        assert request.output_ids == answer[: length - len(prompt)]
        assert request.finish_reason == "length"
        assert request.speculation.accepted == request.speculation.drafted
