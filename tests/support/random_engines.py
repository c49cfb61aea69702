"""Compare random requests on random engines with the same requests on a plain engine, one at a
time.

    python -m tests.support.random_engines --minutes 10            # what `make fuzz` runs
    python -m tests.support.random_engines --seed 123 --rounds 1   # repeats one round

A seed fixes a round: an engine (family, method, drafts, pages, overlap, pool, rows, policy,
caching, drafter's sampling) and requests that use every feature. An answer that differs from plain
decoding is a fault unless rounding at a near tie explains it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.bookkeeping_checks import check_engine

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from llguidance import LLMatcher

from strobe.config import EngineConfig
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.request import Request, SchedulingOptions, TokenLogprob
from strobe.sampling.grammar_compiler import GrammarCompiler, grammar_source
from strobe.sampling.sampler import sample_rows
from strobe.sampling_params import OPTIONS, SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import StepCosts
from strobe.speculation.draft_policy import DraftPolicy
from tests.support import reference_processors, reference_sampling
from tests.support.draft_heads import HEADS
from tests.support.engine_runs import cache_bytes, put, watched
from tests.support.expert_ties import explained_by_experts
from tests.support.losslessness_matrix import Pair, make_pair
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.scripted_drafting import RandomRows, Scripted, wavering
from tests.support.simulated_graphs import captured
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import (
    EOS_IDS,
    VOCAB,
    make_target,
    make_tokenizer,
    windowed,
)

DFLASH = "dflash"
"""The head without weights of its own."""

LENGTH = 128
"""max_model_len of the engines here, but for targets with recurrent layers."""
RECURRENT_LENGTH = 320
"""The same for these, whose states are kept every 64 positions at most."""
SIZES = (1, 2, 5, 12, 17, 33, 50, 70)
RECURRENT_SIZES = (5, 33, 70, 70, 127, 128, 150, 200)
"""Tokens of their prompts."""

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (make_target, {}),
    **FAMILIES,
    "qwen3_5": (make_hybrid, {}),
}

RECURRENT = ("qwen3_5", "qwen3_next")
"""How the names of targets with recurrent layers begin."""

STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": r"[a-f]{3,6}( [0-9]+)?"},
    {"choice": ("yes", "no", "abba", "trueue")},
    {"grammar": 'start: "[" word ("," word)* "]"\nword: /[a-c]+/'},
    {"regex": "[a-f]{3,9}", "think_end": (13, 5)},
    {"regex": "[xyz]*", "prefix": "no "},
)
TOLERANCE = 0.02
"""Largest difference of log probabilities. Random weights can amplify rounding: at one position
of a Qwen3.5, transformers' own fp32 and fp64 differ by 0.008. A wrong row differs by tenths."""
TIE = 2e-3
"""Logits this close may swap places by rounding."""


@dataclass(frozen=True)
class Setup:
    """A random engine.

    drafter: "dflash" (random weights, hardly ever right), "script" (often right), "ngram", or
    "mixed" (each request uses dflash, ngram, both or none). policy: "all" drafts, "random" drafts,
    or "adaptive". pool: the number of full contexts that fit its pages, None for plenty. padded: on
    a CPU, steps are padded and replayed as on a GPU. head: the drafter's. kept_states: of recurrent
    layers that the prefix cache has room for, None for plenty. host: full contexts that host memory
    has room for, None for no such tier. draft_window: positions that the drafter's layers see, None
    for all.
    """

    family: str
    drafter: str
    policy: str
    num_drafts: int
    page_size: int
    overlap: int
    pool: int | None
    spare_rows: int | None
    prefix_caching: bool
    sampled_drafts: bool
    max_num_seqs: int
    padded: bool
    head: str = DFLASH
    kept_states: int | None = None
    host: int | None = None
    draft_window: int | None = None

    @property
    def is_recurrent(self) -> bool:
        return self.family.startswith(RECURRENT)

    @property
    def length(self) -> int:
        return RECURRENT_LENGTH if self.is_recurrent else LENGTH

    @staticmethod
    def draw(rng: random.Random, family: str) -> Setup:
        drafter = rng.choice(("dflash", "script", "script", "ngram", "mixed"))
        policy = "all" if drafter == "ngram" else rng.choice(("all", "random", "adaptive"))
        if drafter == "script" and policy == "adaptive":
            policy = "random"  # an adaptive policy needs a drafter that has widths
        return Setup(
            family=family,
            drafter=drafter,
            policy=policy,
            num_drafts=rng.choice((1, 3, 7)),
            page_size=rng.choice((1, 4, 16, 64)),
            overlap=rng.choice((1, 2)),
            pool=rng.choice((None, None, 1, 2)),
            spare_rows=rng.choice((0, 9, None)),
            prefix_caching=rng.random() < 0.7,
            sampled_drafts=drafter in ("dflash", "mixed") and rng.random() < 0.5,
            max_num_seqs=rng.choice((1, 3, 8, 12)),
            padded=rng.random() < 0.5,
            head=rng.choice((DFLASH, *HEADS)),
            kept_states=rng.choice((None, 1, 2, 5)),
            host=rng.choice((None, 1, 20)),
            draft_window=rng.choice((None, 5, 20)),
        )


@dataclass
class RandomRequest:
    """A random request, the step at which it is added, and the output length at which it is
    aborted, if any."""

    prompt: list[int]
    sampling: SamplingParams
    scheduling: SchedulingOptions
    step: int
    abort_after: int | None


@dataclass
class Answer:
    """The output of one sibling."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    finish_reason: str | None
    stop_reason: Any


@dataclass
class Findings:
    """Counts by family, and a description of each difference."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])

    def add(self, family: str, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[family, name] += count


def draw_sampling(rng: random.Random) -> SamplingParams:
    """Return parameters that use each feature independently of the others."""

    def chance(share: float) -> bool:
        return rng.random() < share

    fields: dict[str, Any] = {
        "max_tokens": rng.choice((0, 1, 2, 9, 20, 20, 40, 40, 60)),
        "temperature": 0.0 if chance(0.5) else rng.choice((0.3, 0.8, 1.0, 2.0)),
        "seed": rng.randrange(-(2**40), 2**40),
        "ignore_eos": chance(0.6),
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
    }
    if chance(0.2):
        fields["top_k"] = rng.choice((1, 3, 8, 40))
    if chance(0.2):
        fields["top_p"] = rng.choice((0.3, 0.8, 0.95))
    if chance(0.15):
        fields["min_p"] = rng.choice((0.02, 0.2))
    if chance(0.3):
        fields["stop_token_ids"] = rng.sample(range(VOCAB), rng.choice((1, 3, 12)))
    if chance(0.2):
        fields["min_tokens"] = rng.randint(0, fields["max_tokens"])
    if chance(0.2):
        fields["presence_penalty"] = rng.uniform(-2, 2)
    if chance(0.2):
        fields["frequency_penalty"] = rng.uniform(-2, 2)
    if chance(0.2):
        fields["repetition_penalty"] = rng.uniform(0.7, 1.8)
    if chance(0.2):
        biased = rng.sample(range(VOCAB), rng.choice((1, 5, 20)))
        fields["logit_bias"] = {token: rng.uniform(-8, 8) for token in biased}
    if chance(0.1):
        fields["allowed_token_ids"] = sorted(rng.sample(range(VOCAB), rng.choice((1, 10, 40))))
    if chance(0.3):
        fields["logprobs"] = rng.choice((0, 1, 3, 7, VOCAB))
    if fields.get("logprobs") == 7:
        fields["logprob_token_ids"] = [VOCAB - 1, 3, 3, 0]
    if chance(0.3):
        fields["prompt_logprobs"] = rng.choice((0, 1, 3, VOCAB))
    if chance(0.2):
        fields["structured_outputs"] = rng.choice(STRUCTURES)
        fields["ignore_eos"] = False
    return SamplingParams(**fields)


def draw_speculation(rng: random.Random, setup: Setup) -> Any:
    speculation: dict[str, Any] = {}
    if setup.drafter == "mixed":
        method = rng.choice((None, "ngram", "dflash", "dflash+ngram", "none"))
        if method is not None:
            speculation["method"] = method
    if rng.random() < 0.3:
        speculation["num_drafts"] = rng.randint(0, setup.num_drafts)
    return False if speculation.get("method") == "none" else speculation or None


def draw_requests(
    rng: random.Random, count: int, sizes: Sequence[int] = SIZES
) -> list[RandomRequest]:
    """Return prompts of these numbers of tokens, some of which share a prefix."""
    specs: list[RandomRequest] = []
    for _ in range(count):
        size = rng.choice(sizes)
        prompt = [rng.randrange(VOCAB) for _ in range(size)]
        if rng.random() < 0.2:
            prompt = (rng.sample(range(VOCAB), 3) * size)[:size]  # for prompt lookup
        if specs and rng.random() < 0.4:
            earlier = rng.choice(specs).prompt
            prompt = (earlier[: rng.randint(1, len(earlier))] + prompt)[: max(sizes)]
        scheduling = SchedulingOptions(
            rng.choice((0, 0, 0, -1, 3)), rng.choice(("", "", "", "a", "b"))
        )
        abort = rng.randint(0, 30) if rng.random() < 0.1 else None
        specs.append(
            RandomRequest(
                prompt, draw_sampling(rng), scheduling, rng.choice((0, 0, 3, 11, 25)), abort
            )
        )
    return specs


class EngineFactory:
    """Checkpoints of every family on disk, engines over them, and a plain engine for each."""

    def __init__(self, root: Path, device: str):
        self.root, self.device = root, device

    @cache  # noqa: B019
    def pair(self, family: str) -> Pair:
        write, changes = TARGETS[family]
        width = 64 if self.device == "cuda" else 16
        root = self.root / family.replace(" ", "_")
        pair = make_pair(root, write, device=self.device, width=width, **changes)
        make_tokenizer(pair.target)
        return pair

    @cache  # noqa: B019
    def draft(self, family: str, head: str, window: int | None) -> Path:
        draft = self.pair(family).draft
        if head != DFLASH:
            draft = HEADS[head](draft, draft.with_name(head.replace(" ", "_")))
        return draft if window is None else windowed(draft, window)

    @cache  # noqa: B019
    def plain(self, family: str) -> Engine:
        config = EngineConfig(
            target=str(self.pair(family).target),
            device=self.device,
            max_model_len=RECURRENT_LENGTH if family.startswith(RECURRENT) else LENGTH,
            max_num_seqs=1,
            enable_prefix_caching=False,
            dtype="float32",
            kv_cache_memory="32MiB",
        )
        return Engine(config)

    def alone(self, family: str, spec: RandomRequest) -> list[Answer]:
        """Return the answers of plain decoding, one sibling after another."""
        engine, sampling = self.plain(family), spec.sampling.clone(speculation=None)
        answers: list[Answer] = []
        for sibling in range(sampling.n):
            request = engine.add(spec.prompt, sampling, sibling=sibling, seed=sampling.seed)
            answers += Run(engine).finish([request])
        return answers

    def config(self, setup: Setup) -> EngineConfig:
        pair = self.pair(setup.family)
        drafts, loads = setup.num_drafts, setup.drafter in ("dflash", "mixed")
        needed = setup.max_num_seqs * (drafts + 1)
        rows = None if setup.spare_rows is None else needed + setup.spare_rows
        config = EngineConfig(
            target=str(pair.target),
            draft=str(self.draft(setup.family, setup.head, setup.draft_window)) if loads else None,
            device=pair.device,
            method=None if loads else "ngram",
            num_drafts=drafts,
            max_model_len=setup.length,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=rows,
            page_size=setup.page_size,
            overlap=setup.overlap,
            enable_prefix_caching=setup.prefix_caching,
            draft_sample_method="greedy" if loads and not setup.sampled_drafts else "probabilistic",
            adaptive=setup.policy == "adaptive",
            dtype="float32",
            kv_cache_memory="64MiB",
        )
        if setup.is_recurrent and setup.kept_states is not None and setup.prefix_caching:
            resolved = resolve(config)
            size = resolved.kept_state_bytes // resolved.num_kept_states
            config = config.with_(state_cache_memory=setup.kept_states * size)
        context = -(-setup.length // setup.page_size)
        if setup.host is not None and setup.prefix_caching:
            config = config.with_(kv_offload_memory=f"{setup.host * 4}MiB")
        if setup.pool is None:
            return config
        pages = context * setup.pool + 3
        return config.with_(kv_cache_memory=cache_bytes(resolve(config), pages))

    def engine(self, setup: Setup, answers: Sequence[list[Answer]]) -> Engine:
        resolved = resolve(self.config(setup))
        parts, drafts = build(resolved), setup.num_drafts
        if setup.padded and self.device == "cpu" and setup.family != "gpt_oss":
            captured(parts, setup.max_num_seqs, resolved.limits.num_drafts)
        if setup.drafter == "script":
            put(parts, {"ngram": Scripted(parts.state, drafts, wavering)})
        return prepared(watched(Engine(resolved, components=parts, draft_policy=policy(setup))))


def policy(setup: Setup) -> DraftPolicy | None:
    """Return the engine's draft policy if it is not its own."""
    return RandomRows(repr(setup)) if setup.policy == "random" else None


def prepared(engine: Engine) -> Engine:
    """Give an adaptive policy and a tier in host memory fixed costs."""
    if engine.components.host_tier is not None:
        engine.components.host_tier.prefill_ms = lambda start, end: math.inf
    budget = engine.scheduler.draft_policy
    if isinstance(budget, AdaptiveDraftPolicy):
        budget.costs = StepCosts({8: 1.0, 64: 1.5}, {1: 10.0, 101: 50.0})
    return engine


class Run:
    """Steps an engine and checks it after each step."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.logprobs: dict[tuple[Any, int], list[TokenLogprob]] = {}
        self.steps = 0

    def step(self) -> None:
        for event in self.engine.step():
            self.logprobs.setdefault((event.key, event.sibling), []).extend(event.logprobs)
        check_engine(self.engine)
        self.steps += 1
        assert self.steps < 20000, "the engine never becomes idle"

    def finish(self, requests: Sequence[Request]) -> list[Answer]:
        """Step until the engine is idle; return the answers."""
        while self.engine.has_work:
            self.step()
        pool = self.engine.components.pool
        assert pool.available == pool.capacity, "an idle engine holds pages"
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Answer:
        logprobs = self.logprobs.get((request.key, request.sibling), [])
        return Answer(
            request.output_ids,
            logprobs,
            request.prompt_logprobs,
            request.finish_reason,
            request.stop_reason,
        )

    def play(
        self,
        specs: Sequence[RandomRequest],
        speculation: Sequence[Any],
        alone: Sequence[list[Answer]],
    ) -> list[Request]:
        """Add each request at its step, abort those due, and run until idle. alone: the answers of
        plain decoding, for the scripted drafter."""
        script: Any = self.engine.proposers.by_name.get("ngram")
        answers = script.answers if isinstance(script, Scripted) else {}
        requests: list[list[Request]] = [[] for _ in specs]
        while self.engine.has_work or not all(requests):
            for i, spec in enumerate(specs):
                if not requests[i] and (self.steps >= spec.step or not self.engine.has_work):
                    sampling = spec.sampling.clone(speculation=speculation[i])
                    requests[i] = self.engine.add_prompt(
                        spec.prompt, sampling, scheduling=spec.scheduling
                    )
                    for request, answer in zip(requests[i], alone[i], strict=True):
                        answers[request] = spec.prompt + answer.tokens
                for request in requests[i]:
                    if spec.abort_after is not None and request.num_output >= spec.abort_after:
                        self.engine.finish(request, "abort")
            self.step()
        return [request for siblings in requests for request in siblings]


def play_round(
    factory: EngineFactory, seed: int, findings: Findings, families: Sequence[str]
) -> None:
    """Run two waves of requests on one engine; the second finds the first one's prefixes cached."""
    # Replayed steps on a CPU reuse the memory of their results; on a GPU results are copied first.
    on_cpu = mock.patch("strobe.runner.step_output.download", torch.clone)
    with on_cpu if factory.device == "cpu" else contextlib.nullcontext():
        _play_round(factory, seed, findings, families)


def _play_round(
    factory: EngineFactory, seed: int, findings: Findings, families: Sequence[str]
) -> None:
    rng = random.Random(seed)
    setup = Setup.draw(rng, families[seed % len(families)])
    sizes = RECURRENT_SIZES if setup.is_recurrent else SIZES
    specs = draw_requests(rng, rng.randint(4, 14), sizes)
    alone = [factory.alone(setup.family, spec) for spec in specs]
    engine = factory.engine(setup, alone)
    drafted = accepted = 0
    for wave in range(2):
        speculation = [draw_speculation(rng, setup) for _ in specs]

        run = Run(engine)
        requests = run.play(specs, speculation, alone)
        answers = run.finish(requests)
        expected = [
            (spec, i, answer)
            for spec, siblings in zip(specs, alone, strict=True)
            for i, answer in enumerate(siblings)
        ]
        for request, actual, (spec, sibling, plain) in zip(
            requests, answers, expected, strict=True
        ):
            compare(factory, seed, setup, wave, spec, sibling, actual, plain, findings)
            drafted += request.draft_counts.num_verified
            accepted += request.draft_counts.num_accepted
        findings.add(setup.family, answers=len(answers), tokens=sum(len(a.tokens) for a in answers))
        rng.shuffle(order := list(range(len(specs))))
        specs = [specs[i] for i in order]
        alone = [alone[i] for i in order]
    stats = engine.stats
    findings.add(
        setup.family, engines=1, steps=stats.steps, preemptions=stats.preemptions,
        cached=stats.prefix_hits, state_hits=stats.state_hits, states_kept=stats.states_kept,
        host_hits=stats.host_hits, host_saves=stats.host_saves,
        drafted=drafted, accepted=accepted,
    )  # fmt: skip


def compare(
    factory: EngineFactory,
    seed: int,
    setup: Setup,
    wave: int,
    spec: RandomRequest,
    sibling: int,
    actual: Answer,
    plain: Answer,
    findings: Findings,
) -> None:
    """Record a difference as a tie if rounding explains it, else as a fault."""

    def note(kind: str, problem: str) -> None:
        getattr(findings, kind).append(
            f"seed {seed}, wave {wave}, {setup.family}: {problem}\n  {asdict(setup)}\n  {spec}, "
            f"sibling {sibling}\n  plain {plain.tokens} {plain.finish_reason}\n"
            f"  actual {actual.tokens} {actual.finish_reason}"
        )

    expected, aborted = plain.tokens, actual.finish_reason == "abort"
    if aborted:
        if spec.abort_after is None:
            return note("faults", "finished as aborted, but was not aborted")
        expected = expected[: len(actual.tokens)]
    if actual.tokens != expected:
        pairs = zip(actual.tokens, expected, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
        if at < 0:
            return note("faults", "one answer is longer than the other")
        gap = tie(
            factory, setup.family, spec, sibling, expected[:at], actual.tokens[at], expected[at]
        )
        if gap <= TIE:
            return note("ties", f"token {at} differs at a near tie ({gap:.1e})")
        return note("faults", f"token {at} differs, and logits would have to change by {gap:.3g}")
    if not aborted:
        ends = [(answer.finish_reason, answer.stop_reason) for answer in (actual, plain)]
        if ends[0] != ends[1]:
            return note("faults", f"finished with {ends[0]}, plain decoding with {ends[1]}")
    scores = compare_scores(actual.logprobs, plain.logprobs[: len(actual.logprobs)])
    if scores is not None and has_tied_experts(factory, setup.family, spec, actual, plain):
        return note("ties", f"{scores}, and both are right: routers tie")
    if scores is None and not (aborted and not actual.tokens):
        scores = compare_scores(actual.prompt_logprobs, plain.prompt_logprobs)
        scores = scores and f"prompt: {scores}"
    if scores is not None:
        note("faults", scores)
    return None


def has_tied_experts(
    factory: EngineFactory, family: str, spec: RandomRequest, actual: Answer, plain: Answer
) -> bool:
    """Whether experts that nearly tie explain the first log probability that differs."""
    pairs = zip(actual.logprobs, plain.logprobs, strict=False)
    differing = [i for i, (a, b) in enumerate(pairs) if abs(a.logprob - b.logprob) > TOLERANCE]
    if not differing or len(actual.logprobs) != len(actual.tokens):
        return False
    tokens = [*spec.prompt, *actual.tokens]
    logprobs = actual.logprobs[differing[0]].logprob, plain.logprobs[differing[0]].logprob
    at = len(spec.prompt) + differing[0]
    return explained_by_experts(factory.pair(family).target, tokens, at, logprobs)


def compare_scores(
    scores: Sequence[TokenLogprob | None], expected: Sequence[TokenLogprob | None]
) -> str | None:
    """Describe the first difference of two lists of log probabilities that exceeds rounding; None
    if there is none. Tokens of nearly equal probability may swap places."""
    if len(scores) != len(expected):
        return f"{len(scores)} log probabilities, plain decoding has {len(expected)}"
    for i, (a, b) in enumerate(zip(scores, expected, strict=True)):
        if a is None or b is None:
            if a is not b:
                return f"log probability {i} is {a}, plain decoding has {b}"
            continue
        values = [
            (a.logprob, b.logprob),
            *zip(*([v for _, v in x.top] for x in (a, b)), strict=False),
        ]
        if a.token != b.token or len(a.top) != len(b.top):
            return f"log probability {i} is {a}, plain decoding has {b}"
        if any(not abs(x - y) <= TOLERANCE for x, y in values):
            return f"log probability {i} is {a}, plain decoding has {b}"
    return None


def tie(
    factory: EngineFactory,
    family: str,
    spec: RandomRequest,
    sibling: int,
    output: list[int],
    token: int,
    plain: int,
) -> float:
    """Return the smallest of a few logit perturbations for which a sampler picks `token` after
    `output`; infinity if none does."""
    engine = factory.plain(family)
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    request = engine.add([*spec.prompt, *output], scored)
    answer = Run(engine).finish([request])[0]
    row = [0.0] * VOCAB
    for i, value in answer.logprobs[0].top:
        row[i] = value
    sampling = spec.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS_IDS)}
    allowed = set(range(VOCAB))
    if sampling.structured_outputs is not None:
        allowed = allowed_by(factory.pair(family).target, sampling.structured_outputs, output)
    noise = np.random.default_rng(7)
    for size in (1e-6, 1e-5, 1e-4, 1e-3, TIE, 0.01, 0.1, 1.0):
        rows = []
        for change in noise.uniform(-size, size, (256, VOCAB)) / 2:
            changed = [x + d for x, d in zip(row, change.tolist(), strict=True)]
            changed = reference_processors.processed(changed, sampling, spec.prompt, output, ends)
            rows.append(reference_processors.within(changed, allowed))
        count = len(rows)
        position = len(spec.prompt) + len(output)
        columns = {
            option.name: getattr(sampling, option.name)
            for option in OPTIONS
            if option.facts.column is not None
        }
        params = reference_sampling.params(
            count,
            seeds=[sampling.seed or 0] * count,
            siblings=sibling,
            positions=position,
            **columns,
        )
        if token in sample_rows(torch.tensor(rows), params, filtered=sampling.filters).tolist():
            return size
    return float("inf")


def allowed_by(target: Path, structured: Any, output: Sequence[int]) -> set[int]:
    """Return the token ids that a fresh matcher of the grammar allows after `output`."""
    compiler = GrammarCompiler(target / "tokenizer.json", VOCAB, EOS_IDS)
    matcher = LLMatcher(compiler.tokenizer, grammar_source(structured), log_level=0)
    think_end = list(structured.think_end)
    if think_end:
        ends = [
            i
            for i in range(len(think_end), len(output) + 1)
            if list(output[i - len(think_end) : i]) == think_end
        ]
        if not ends:
            return set(range(VOCAB))
        output = output[ends[0] :]
    for token in output:
        matcher.consume_token(token)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist())


def run_rounds(
    factory: EngineFactory,
    seeds: Iterator[int],
    until: float,
    families: Sequence[str],
    findings: Findings,
) -> None:
    """Play rounds until the deadline or the last seed. An exception is a fault with its seed."""
    for seed in seeds:
        if time.monotonic() > until:
            return
        print(f"round {seed}", flush=True)
        try:
            play_round(factory, seed, findings, families)
        except Exception as error:
            findings.faults.append(f"seed {seed}: {type(error).__name__}: {error}")
            print(findings.faults[-1], flush=True)
            if factory.device == "cuda":
                raise  # a GPU's context may be lost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--stride", type=int, default=1, help="between a worker's seeds")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the device")
    parser.add_argument("--family", action="append", choices=list(TARGETS))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)
    if args.workers > 1:
        return run_workers(args)
    families = args.family or list(TARGETS)
    findings, began = Findings(), time.monotonic()
    seeds = iter(range(args.seed, args.seed + args.rounds * args.stride, args.stride))
    with tempfile.TemporaryDirectory() as root:
        factory = EngineFactory(Path(root), device)
        try:
            run_rounds(factory, seeds, began + args.minutes * 60, families, findings)
        finally:
            report(findings, device, time.monotonic() - began)
    return bool(findings.faults)


def run_workers(args: argparse.Namespace) -> int:
    """Run several processes, each with every Nth seed; print the output of those that fail."""
    root = Path(tempfile.mkdtemp())
    running = []
    for i in range(args.workers):
        options = ["--minutes", args.minutes, "--seed", args.seed + i, "--stride", args.workers]
        options += [word for name in args.family or () for word in ("--family", name)]
        log = (root / f"{i}.log").open("w")
        command = [sys.executable, "-m", "tests.support.random_engines", *map(str, options)]
        running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    limit = time.monotonic() + args.minutes * 60 + 120
    failed = 0
    for i, process in enumerate(running):
        try:
            code = process.wait(max(limit - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            code = -9
        failed += code != 0
        text = (root / f"{i}.log").read_text()
        lines = [line for line in text.splitlines() if not line.startswith("round ")]
        last = [line for line in text.splitlines() if line.startswith("round ")][-1:]
        print(f"--- worker {i}: exit {code}, {last}", *lines[-60 if code else -20 :], sep="\n")
    return int(failed > 0)


def report(findings: Findings, device: str, seconds: float) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{seconds:.0f} s on {name}, torch {torch.__version__}")
    for family in sorted({family for family, _ in findings.counts}):
        counts = {name: n for (owner, name), n in findings.counts.items() if owner == family}
        print(f"  {family}: " + ", ".join(f"{name} {n:,}" for name, n in counts.items()))
    for text in findings.ties:
        print(f"near tie: {text}")
    for text in findings.faults:
        print(f"FAULT: {text}")
    print(f"{len(findings.faults)} faults, {len(findings.ties)} near ties")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
