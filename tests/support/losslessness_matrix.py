"""The losslessness matrix: its dimensions, combinations, and the comparison of one combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import cache_bytes, drain, make_engine, run
from tests.support.scripted_drafting import RandomRows, Scripted, adversary, oracle, wavering
from tests.support.tiny_checkpoints import LAYERS, VOCAB, make_draft, make_target

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
        """Whether the pool is so small that requests must preempt each other."""
        return self.pool == "tiny" and self.page_size <= 16 and self.seqs > 1


def pairs_of(combination: Combination) -> set[tuple[str, Any, str, Any]]:
    values = [(name, getattr(combination, name)) for name in DIMENSIONS]
    return {(*a, *b) for a, b in itertools.combinations(values, 2)}


def all_pairs(proposers: Sequence[str] = ()) -> set[tuple[str, Any, str, Any]]:
    """Return all pairs of values. proposers: those to include, all by default."""
    dimensions = DIMENSIONS | ({"proposer": tuple(proposers)} if proposers else {})
    return {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(dimensions.items(), 2)
        for x in xs
        for y in ys
    }


def covering(proposers: Sequence[str], *, tries: int, more: int) -> list[Combination]:
    """Return a small set of combinations with every pair of values, chosen greedily with a fixed
    seed from `tries` candidates at a time; then `more` per proposer in which requests must preempt
    each other."""
    dimensions = DIMENSIONS | {"proposer": tuple(proposers)}
    rng, missing, chosen = random.Random(5), all_pairs(proposers), list[Combination]()

    def drawn(**fixed: Any) -> Combination:
        return Combination(**{n: fixed.get(n, rng.choice(v)) for n, v in dimensions.items()})

    while missing:
        anchor = rng.choice(sorted(missing, key=repr))
        tried = [drawn(**dict([anchor[:2], anchor[2:]])) for _ in range(tries)]
        best = max(tried, key=lambda c: len(missing & pairs_of(c)))
        chosen.append(best)
        missing -= pairs_of(best)
    for proposer in tuple(proposers) * more:
        fixed = {"proposer": proposer, "pool": "tiny", "seqs": rng.choice([3, 8])}
        chosen.append(drawn(page_size=rng.choice([1, 16]), **fixed))
    return chosen


def relative_time(c: Combination) -> float:
    """Estimate a run's time: with fewer requests at once it takes more steps, and with caching it
    runs twice."""
    return {1: 3.0, 3: 1.7, 8: 1.5}[c.seqs] * (1 + c.caching)


def fast_covering(num_candidates: int, seed: int) -> list[Combination]:
    """Return a set with every pair of values that takes little time, chosen greedily from random
    candidates. For each proposer it begins with a combination in which requests must preempt each
    other."""
    rng, missing, chosen = random.Random(seed), all_pairs(), list[Combination]()
    values = [{n: rng.choice(v) for n, v in DIMENSIONS.items()} for _ in range(num_candidates)]
    pairs = {c: pairs_of(c) for c in itertools.starmap(Combination, map(dict.values, values))}

    def gain(c: Combination) -> float:
        return len(missing & pairs[c]) / (3 + relative_time(c))

    def choose(candidates: Iterable[Combination]) -> None:
        chosen.append(max(candidates, key=gain))
        missing.difference_update(pairs[chosen[-1]])

    for proposer in DIMENSIONS["proposer"]:
        choose([c for c in pairs if c.proposer == proposer and c.preempts])
    while missing:
        choose(pairs)
    return chosen


COMBINATIONS = fast_covering(500, seed=1)
SLOW_COMBINATIONS = covering(DIMENSIONS["proposer"], tries=40, more=2)
"""Another such set, for `make test-all`: half of it finds its prefixes cached in a second run."""

DRAFTERS = ("dflash", *SCRIPTS)
"""A random drafter, and scripts that are right, wrong, and sometimes wrong."""
FURTHER_FAMILIES = covering(DRAFTERS, tries=400, more=1)
"""The matrix of further target families, with the proposers whose blocks produce different
forwards."""


def few_cases(
    combinations: Sequence[Combination], count: int, more: int | None = None
) -> list[Any]:
    """Return the combinations as parameters: `make test` runs `count` of them, chosen greedily to
    cover many pairs in little time, and `make test-all` the next `more`, which are all others by
    default. The remaining ones run at night."""
    remaining, chosen, seen = list(combinations), list[Combination](), set[Any]()
    more = len(combinations) - count if more is None else more

    def gain(c: Combination) -> tuple[bool, float]:
        return c.preempts and not chosen, len(pairs_of(c) - seen) / (1 + relative_time(c))

    for _ in range(count + more):
        best = max(remaining, key=gain)
        remaining.remove(best)
        chosen.append(best)
        seen |= pairs_of(best)
    marks = {c: [] if i < count else [pytest.mark.full] for i, c in enumerate(chosen)}
    at_night = [pytest.mark.full, pytest.mark.nightly]
    return [pytest.param(c, id=str(c), marks=marks.get(c, at_night)) for c in combinations]


FAMILY_CASES = few_cases(FURTHER_FAMILIES, 3, more=7)
"""Three of FURTHER_FAMILIES are fast, since the first family's matrix covers scheduling."""
EXPERT_CASES = few_cases(FURTHER_FAMILIES, 1, more=6)
"""For a family's variant with experts: FAMILY_CASES test its other layers."""


def prompts() -> list[list[int]]:
    """Return eight prompts, some of which share a prefix."""
    noise = torch.Generator().manual_seed(9)
    texts = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (5, 35, 12, 1, 22)]
    texts += [[*texts[1][:32], 3, 1], [*texts[1][:17], 8], [4, 9, 2] * 6]
    return texts


def workload(name: str) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts with their sampling parameters; sampled ones have seeds."""
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


@dataclass(frozen=True)
class Pair:
    """A tiny pair on disk, the size of its heads (`width`), and its device."""

    target: Path
    draft: Path
    device: str = "cpu"
    width: int = 16


def make_pair(
    root: Path,
    write: Callable[..., Any] = make_target,
    *,
    device: str = "cpu",
    width: int = 16,
    layers: int = LAYERS,
    **changes: Any,
) -> Pair:
    """Write a random pair. write: writes the target, as `make_target` does, with so many layers and
    `changes` of its config."""
    write(root / "target", head_dim=width, num_hidden_layers=layers, **changes)
    captured = [i for i in (0, 1, 3) if i < layers]
    draft = make_draft(root / "draft", width=width, layer_ids=captured, target_layers=layers)
    return Pair(root / "target", draft, device, width)


class PlainAnswers:
    """plain(workload) -> `plain_answers`, computed once."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self._answers: dict[str, list[list[int]]] = {}

    def __call__(self, name: str) -> list[list[int]]:
        if name not in self._answers:
            self._answers[name] = plain_answers(self.pair, name)
        return self._answers[name]


def plain_answers(pair: Pair, name: str) -> list[list[int]]:
    """Return all answers of a workload by plain decoding, one request at a time."""
    config = EngineConfig(
        target=str(pair.target),
        device=pair.device,
        max_model_len=LENGTH,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )
    texts, params = zip(*workload(name), strict=True)
    return run(make_engine(config), texts, params)


def speculation(combination: Combination, index: int) -> Any:
    """Return the speculation options of request `index`."""
    if combination.proposer == "none":
        return None
    options: dict[str, Any] = {}
    if combination.proposer == "per request":
        method = (None, "ngram", "none", "dflash", "dflash+ngram")[index % 5]
        if method == "none":
            return False
        options["method"] = method
    if combination.lengths == "by request":
        options["num_drafts"] = index % (combination.drafts + 1)
    return options


def policy(combination: Combination) -> dict[str, Any]:
    if combination.lengths != "random":
        return {}
    return {"draft_policy": RandomRows(repr(combination))}


def engine_for(c: Combination, pair: Pair) -> Engine:
    speculates = c.proposer != "none"
    drafts = c.drafts if speculates else 0
    needed = c.seqs * (drafts + 1)
    loads = c.proposer in ("dflash", "per request")
    config = EngineConfig(
        target=str(pair.target),
        draft=str(pair.draft) if loads else None,
        device=pair.device,
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
        config = config.with_(kv_cache_memory=cache_bytes(resolve(config), pages + 1))
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
    """The oracle's drafts are all accepted up to the answer's end, the adversary's never."""
    for request in requests:
        counts = request.draft_counts
        assert 0 <= counts.num_accepted <= counts.num_verified
        if c.proposer == "adversary":
            assert counts.num_accepted == 0
        if c.proposer == "oracle":
            assert counts.num_verified - counts.num_accepted <= c.drafts
            if c.lengths != "random" and not request.num_preemptions and request.num_drafts:
                assert counts.steps == -(-(request.num_output - 1) // (request.num_drafts + 1))


def compare(c: Combination, pair: Pair, expected: list[list[int]]) -> Engine:
    """Run the combination's workload and, if prefixes are cached, run it again; each run must give
    plain decoding's answers. Return the engine."""
    engine = engine_for(c, pair)
    jobs = workload(c.workload)
    for again in (False, True) if c.caching else (False,):
        requests: list[Request] = []
        for index, (prompt, sampling) in enumerate(jobs):
            params = sampling.clone(speculation=speculation(c, index))
            requests += engine.add_prompt(prompt, params)
        if c.proposer in SCRIPTS:
            script: Any = engine.proposers["ngram"]
            for request, answer in zip(requests, expected, strict=True):
                script.answers[request] = request.tokens + answer
        if again:
            engine.scheduler.waiting.reverse()
        drain(engine, requests)
        assert [r.output_ids for r in requests] == expected
        check_counts(c, requests)
    # A sequence that holds only its window's pages leaves room for short ones beside it.
    keeps_all_pages = engine.components.pool.window is None
    assert (engine.stats.preemptions > 0) >= (c.preempts and keeps_all_pages)
    if c.proposer not in ("none", "per request") and c.lengths == "full":
        assert engine.stats.draft_counts.num_verified > 0
    if c.proposer == "wavering" and c.lengths == "full":
        assert 0 < engine.stats.draft_counts.num_accepted < engine.stats.draft_counts.num_verified
    return engine
