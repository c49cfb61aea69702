"""Random engines answer random requests, and every answer is compared with a lone plain run.

    python tests/random_engines.py --minutes 10            # what `make fuzz` runs
    python tests/random_engines.py --seed 123 --rounds 1   # repeats one round

A round is a function of its seed: an engine (family, method, drafts, pages, overlap, pool, rows,
policy, caching, drafter's sampling) and requests that use every feature. An answer that differs
from that of plain decoding must be explained by rounding at a near tie.
"""

from __future__ import annotations

import argparse
import contextlib
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import slow_processors
import torch
from captured import captured
from families import FAMILIES
from hybrid import make_hybrid
from llguidance import LLMatcher
from matrix import Pair, make_pair
from tiny import (
    EOS_IDS,
    VOCAB,
    RandomRows,
    Scripted,
    make_target,
    make_tokenizer,
    put,
    watched,
    wavering,
)

from strobe.config import EngineConfig
from strobe.engine.build import build, kv_groups, resolve
from strobe.engine.engine import Engine
from strobe.request import Request, SchedulingOptions, TokenLogprob
from strobe.sampling.grammar_compiler import GrammarCompiler, grammar_source
from strobe.sampling.noise import noise_key
from strobe.sampling.sampler import RowParams, sample_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import Costs

LENGTH = 128
"""max_model_len of every engine here."""

TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (make_target, {}),
    **FAMILIES,
    "qwen3_5": (make_hybrid, {}),
}

STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    {"json_object": True},
    {"regex": r"[a-f]{3,6}( [0-9]+)?"},
    {"choice": ("yes", "no", "abba", "trueue")},
    {"grammar": 'start: "[" word ("," word)* "]"\nword: /[a-c]+/'},
    {"regex": "[a-f]{3,9}", "after": (13, 5)},
    {"regex": "[xyz]*", "lead": "no "},
)
TOLERANCE = 0.02
"""What log probabilities may differ by. Random weights can amplify rounding: at one place those of
a Qwen3.5 differ by 0.008 between transformers' own fp32 and fp64. Those of a wrong row differ by
tenths."""
TIE = 2e-3
"""Logits that differ by no more than this may change places by rounding."""


@dataclass(frozen=True)
class Setup:
    """A random engine.

    drafter: "dflash" (random weights, hardly ever right), "script" (often right), "ngram", or
    "mixed" (requests choose among dflash, ngram, both and none). policy: "all" drafts, "random"
    drafts, or "adaptive". pool: contexts that its pages hold, None for plenty. padded: on a CPU,
    steps are padded and replayed as on a GPU.
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
        )


@dataclass
class Ask:
    """A random request: the plan step before which it is added, and, where it is aborted, after
    how many tokens."""

    prompt: list[int]
    sampling: SamplingParams
    place: SchedulingOptions
    step: int
    abort_after: int | None


@dataclass
class Answer:
    """What came of one sibling."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    finish_reason: str | None
    stop_reason: Any


@dataclass
class Findings:
    """Counts of a run, by family, and differences in words."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ties: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])

    def add(self, family: str, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[family, name] += count


def draw_sampling(rng: random.Random) -> SamplingParams:
    """Parameters in which each feature occurs with a chance of its own."""

    def some(share: float) -> bool:
        return rng.random() < share

    given: dict[str, Any] = {
        "max_tokens": rng.choice((0, 1, 2, 9, 20, 20, 40, 40, 60)),
        "temperature": 0.0 if some(0.5) else rng.choice((0.3, 0.8, 1.0, 2.0)),
        "seed": rng.randrange(-(2**40), 2**40),
        "ignore_eos": some(0.6),
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
    }
    if some(0.2):
        given["top_k"] = rng.choice((1, 3, 8, 40))
    if some(0.2):
        given["top_p"] = rng.choice((0.3, 0.8, 0.95))
    if some(0.15):
        given["min_p"] = rng.choice((0.02, 0.2))
    if some(0.3):
        given["stop_token_ids"] = rng.sample(range(VOCAB), rng.choice((1, 3, 12)))
    if some(0.2):
        given["min_tokens"] = rng.randint(0, given["max_tokens"])
    if some(0.2):
        given["presence_penalty"] = rng.uniform(-2, 2)
    if some(0.2):
        given["frequency_penalty"] = rng.uniform(-2, 2)
    if some(0.2):
        given["repetition_penalty"] = rng.uniform(0.7, 1.8)
    if some(0.2):
        biased = rng.sample(range(VOCAB), rng.choice((1, 5, 20)))
        given["logit_bias"] = {token: rng.uniform(-8, 8) for token in biased}
    if some(0.1):
        given["allowed_token_ids"] = sorted(rng.sample(range(VOCAB), rng.choice((1, 10, 40))))
    if some(0.3):
        given["logprobs"] = rng.choice((0, 1, 3, 7, VOCAB))
    if some(0.3):
        given["prompt_logprobs"] = rng.choice((0, 1, 3, VOCAB))
    if some(0.2):
        given["structured_outputs"] = rng.choice(STRUCTURES)
        given["ignore_eos"] = False
    return SamplingParams(**given)


def draw_speculation(rng: random.Random, setup: Setup) -> Any:
    asked: dict[str, Any] = {}
    if setup.drafter == "mixed":
        method = rng.choice((None, "ngram", "dflash", "dflash+ngram", "none"))
        if method is not None:
            asked["method"] = method
    if rng.random() < 0.3:
        asked["num_drafts"] = rng.randint(0, setup.num_drafts)
    return False if asked.get("method") == "none" else asked or None


def draw_requests(rng: random.Random, count: int) -> list[Ask]:
    """Prompts of 1 to 70 tokens, some of which begin as an earlier one does."""
    asks: list[Ask] = []
    for _ in range(count):
        size = rng.choice((1, 2, 5, 12, 17, 33, 50, 70))
        prompt = [rng.randrange(VOCAB) for _ in range(size)]
        if rng.random() < 0.2:
            prompt = (rng.sample(range(VOCAB), 3) * size)[:size]  # for prompt lookup
        if asks and rng.random() < 0.4:
            other = rng.choice(asks).prompt
            prompt = (other[: rng.randint(1, len(other))] + prompt)[:70]
        place = SchedulingOptions(rng.choice((0, 0, 0, -1, 3)), rng.choice(("", "", "", "a", "b")))
        abort = rng.randint(0, 30) if rng.random() < 0.1 else None
        asks.append(Ask(prompt, draw_sampling(rng), place, rng.choice((0, 0, 3, 11, 25)), abort))
    return asks


class World:
    """The pairs of one device on disk, and a lone plain engine for each."""

    def __init__(self, root: Path, device: str):
        self.root, self.device = root, device

    @cache  # noqa: B019
    def pair(self, family: str) -> Pair:
        write, changes = TARGETS[family]
        width = 64 if self.device == "cuda" else 16
        root = self.root / family.replace(" ", "_")
        made = make_pair(root, write, device=self.device, width=width, **changes)
        make_tokenizer(made.target)
        return made

    @cache  # noqa: B019
    def plain(self, family: str) -> Engine:
        config = EngineConfig(
            target=str(self.pair(family).target),
            device=self.device,
            max_model_len=LENGTH,
            max_num_seqs=1,
            enable_prefix_caching=False,
            dtype="float32",
            kv_cache_memory="32MiB",
        )
        return Engine(config)

    def alone(self, family: str, ask: Ask) -> list[Answer]:
        """What plain decoding answers, one sibling after another."""
        engine, sampling = self.plain(family), ask.sampling.clone(speculation=None)
        answers: list[Answer] = []
        for sibling in range(sampling.n):
            request = engine.add(ask.prompt, sampling, sibling=sibling, seed=sampling.seed)
            answers += Run(engine).finish([request])
        return answers

    def engine(self, setup: Setup, answers: Sequence[list[Answer]]) -> Engine:
        pair = self.pair(setup.family)
        drafts, loads = setup.num_drafts, setup.drafter in ("dflash", "mixed")
        needed = setup.max_num_seqs * (drafts + 1)
        rows = None if setup.spare_rows is None else needed + setup.spare_rows
        config = EngineConfig(
            target=str(pair.target),
            draft=str(pair.draft) if loads else None,
            device=pair.device,
            method=None if loads else "ngram",
            num_drafts=drafts,
            max_model_len=LENGTH,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=rows,
            page_size=setup.page_size,
            overlap=setup.overlap,
            enable_prefix_caching=setup.prefix_caching,
            draft_sample_method="probabilistic" if setup.sampled_drafts else "greedy",
            adaptive=setup.policy == "adaptive",
            dtype="float32",
            kv_cache_memory="64MiB",
        )
        if setup.pool is not None:
            pages = -(-LENGTH // setup.page_size) * setup.pool + 2
            resolved = resolve(config)
            groups = kv_groups(resolved.target, resolved.drafts, resolved.backends.kv_dtype)
            size = sum(group.bytes_per_page(setup.page_size) for group in groups.values())
            config = config.with_(kv_cache_memory=(pages + 1) * size)
        resolved = resolve(config)
        parts = build(resolved)
        if setup.padded and self.device == "cpu" and setup.family != "gpt_oss":
            captured(parts, setup.max_num_seqs, resolved.limits.num_drafts)
        if setup.drafter == "script":
            put(parts, {"ngram": Scripted(parts.state, drafts, wavering)})
        policy = RandomRows(repr(setup)) if setup.policy == "random" else None
        engine = watched(Engine(resolved, components=parts, draft_policy=policy))
        budget = engine.scheduler.draft_policy
        if isinstance(budget, AdaptiveDraftPolicy):
            budget.costs = Costs({8: 1.0, 64: 1.5}, {1: 10.0, 101: 50.0})
        return engine


class Run:
    """Steps of one engine, each of which is checked."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.logprobs: dict[tuple[Any, int], list[TokenLogprob]] = {}
        self.steps = 0

    def step(self) -> None:
        for event in self.engine.step():
            self.logprobs.setdefault((event.key, event.sibling), []).extend(event.logprobs)
        self.engine.check()
        self.steps += 1
        assert self.steps < 20000, "the engine does not come to an end"

    def finish(self, requests: Sequence[Request]) -> list[Answer]:
        """Step until the engine is idle."""
        while self.engine.has_work:
            self.step()
        pool = self.engine.components.pool
        assert pool.available == pool.capacity, "an idle engine holds pages"
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Answer:
        found = self.logprobs.get((request.key, request.sibling), [])
        return Answer(
            request.output_ids,
            found,
            request.prompt_logprobs,
            request.finish_reason,
            request.stop_reason,
        )

    def play(
        self, asks: Sequence[Ask], speculation: Sequence[Any], alone: Sequence[list[Answer]]
    ) -> list[Request]:
        """Add each request at its step, abort those that are to be, and go on to the end. alone:
        what plain decoding answers, for a drafter that knows the answers."""
        script: Any = self.engine.proposers.by_name.get("ngram")
        answers = script.answers if isinstance(script, Scripted) else {}
        requests: list[list[Request]] = [[] for _ in asks]
        while self.engine.has_work or not all(requests):
            for i, ask in enumerate(asks):
                if not requests[i] and (self.steps >= ask.step or not self.engine.has_work):
                    asked = ask.sampling.clone(speculation=speculation[i])
                    requests[i] = self.engine.add_prompt(ask.prompt, asked, scheduling=ask.place)
                    for request, answer in zip(requests[i], alone[i], strict=True):
                        answers[request] = ask.prompt + answer.tokens
                for request in requests[i]:
                    if ask.abort_after is not None and request.num_output >= ask.abort_after:
                        self.engine.finish(request, "abort")
            self.step()
        return [request for of_one in requests for request in of_one]


def play_round(world: World, seed: int, findings: Findings, families: Sequence[str]) -> None:
    """One engine, two waves of requests over it, the second over what the first left cached."""
    # Steps that are replayed on a CPU reuse the memory of results, which a GPU's are copied from.
    on_cpu = mock.patch("strobe.runner.pending.download", torch.clone)
    with on_cpu if world.device == "cpu" else contextlib.nullcontext():
        _play_round(world, seed, findings, families)


def _play_round(world: World, seed: int, findings: Findings, families: Sequence[str]) -> None:
    rng = random.Random(seed)
    setup = Setup.draw(rng, families[seed % len(families)])
    asks = draw_requests(rng, rng.randint(4, 14))
    alone = [world.alone(setup.family, ask) for ask in asks]
    engine = world.engine(setup, alone)
    drafted = accepted = 0
    for wave in range(2):
        speculation = [draw_speculation(rng, setup) for _ in asks]

        run = Run(engine)
        requests = run.play(asks, speculation, alone)
        answers = run.finish(requests)
        wanted = [
            (ask, i, one) for ask, of in zip(asks, alone, strict=True) for i, one in enumerate(of)
        ]
        for request, found, (ask, sibling, plain) in zip(requests, answers, wanted, strict=True):
            compare(world, seed, setup, wave, ask, sibling, found, plain, findings)
            drafted += request.draft_counts.num_verified
            accepted += request.draft_counts.num_accepted
        findings.add(setup.family, answers=len(answers), tokens=sum(len(a.tokens) for a in answers))
        rng.shuffle(asks_order := list(range(len(asks))))
        asks = [asks[i] for i in asks_order]
        alone = [alone[i] for i in asks_order]
    stats = engine.stats
    findings.add(
        setup.family, engines=1, steps=stats.steps, preemptions=stats.preemptions,
        cached=stats.prefix_hits, drafted=drafted, accepted=accepted,
    )  # fmt: skip


def compare(
    world: World,
    seed: int,
    setup: Setup,
    wave: int,
    ask: Ask,
    sibling: int,
    found: Answer,
    plain: Answer,
    findings: Findings,
) -> None:
    """Note a difference as a tie, where rounding explains it, or as a fault."""

    def note(kind: str, what: str) -> None:
        getattr(findings, kind).append(
            f"seed {seed}, wave {wave}, {setup.family}: {what}\n  {asdict(setup)}\n  {ask}, "
            f"sibling {sibling}\n  plain {plain.tokens} {plain.finish_reason}\n"
            f"  found {found.tokens} {found.finish_reason}"
        )

    wanted, aborted = plain.tokens, found.finish_reason == "abort"
    if aborted:
        if ask.abort_after is None:
            return note("faults", "it ended as aborted though nobody aborted it")
        wanted = wanted[: len(found.tokens)]
    if found.tokens != wanted:
        pairs = zip(found.tokens, wanted, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
        if at < 0:
            return note("faults", "one answer is longer than the other")
        gap = tie(world, setup.family, ask, sibling, wanted[:at], found.tokens[at], wanted[at])
        if gap <= TIE:
            return note("ties", f"token {at} differs at a near tie ({gap:.1e})")
        return note("faults", f"token {at} differs, and logits would have to change by {gap:.3g}")
    if not aborted:
        ends = [(one.finish_reason, one.stop_reason) for one in (found, plain)]
        if ends[0] != ends[1]:
            return note("faults", f"it ended as {ends[0]}, plain decoding as {ends[1]}")
    scores = compare_scores(found.logprobs, plain.logprobs[: len(found.logprobs)])
    if scores is None and not (aborted and not found.tokens):
        scores = compare_scores(found.prompt_logprobs, plain.prompt_logprobs)
        scores = scores and f"prompt: {scores}"
    if scores is not None:
        note("faults", scores)
    return None


def compare_scores(
    found: Sequence[TokenLogprob | None], plain: Sequence[TokenLogprob | None]
) -> str | None:
    """How two lists of log probabilities differ by more than rounding, if they do. Tokens of nearly
    equal probability may change places."""
    if len(found) != len(plain):
        return f"{len(found)} log probabilities, plain decoding has {len(plain)}"
    for i, (a, b) in enumerate(zip(found, plain, strict=True)):
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
    world: World, family: str, ask: Ask, sibling: int, made: list[int], token: int, plain: int
) -> float:
    """The least change of logits, of a few sizes, by which a lone sampler would take `token` in
    place of `plain` behind `made`; infinite where none does."""
    engine = world.plain(family)
    scored = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    request = engine.add([*ask.prompt, *made], scored)
    answer = Run(engine).finish([request])[0]
    row = [0.0] * VOCAB
    for i, value in answer.logprobs[0].top:
        row[i] = value
    sampling = ask.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS_IDS)}
    allowed = set(range(VOCAB))
    if sampling.structured_outputs is not None:
        allowed = allowed_by(world.pair(family).target, sampling.structured_outputs, made)
    noise = np.random.default_rng(7)
    for size in (1e-6, 1e-5, 1e-4, 1e-3, TIE, 0.01, 0.1, 1.0):
        rows = []
        for change in noise.uniform(-size, size, (256, VOCAB)) / 2:
            changed = [x + d for x, d in zip(row, change.tolist(), strict=True)]
            changed = slow_processors.processed(changed, sampling, ask.prompt, made, ends)
            rows.append(slow_processors.within(changed, allowed))
        count = len(rows)
        key = noise_key(sampling.seed or 0, sibling)
        place = len(ask.prompt) + len(made)
        params = RowParams(
            torch.full((count,), sampling.temperature),
            torch.full((count,), sampling.top_p),
            torch.full((count,), sampling.min_p),
            torch.full((count,), max(sampling.top_k, 0)),
            torch.full((count,), key),
            torch.full((count,), place),
        )
        if token in sample_rows(torch.tensor(rows), params, filtered=sampling.filters).tolist():
            return size
    return float("inf")


def allowed_by(target: Path, structured: Any, made: Sequence[int]) -> set[int]:
    """What a grammar allows behind an answer's tokens so far, by a matcher of its own."""
    compiler = GrammarCompiler(target / "tokenizer.json", VOCAB, EOS_IDS)
    matcher = LLMatcher(compiler.tokenizer, grammar_source(structured), log_level=0)
    after = list(structured.after)
    if after:
        ends = [
            i for i in range(len(after), len(made) + 1) if list(made[i - len(after) : i]) == after
        ]
        if not ends:
            return set(range(VOCAB))
        made = made[ends[0] :]
    for token in made:
        matcher.consume_token(token)
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist())


def run_rounds(
    world: World, seeds: Iterator[int], until: float, families: Sequence[str], findings: Findings
) -> None:
    """Rounds until the time is up or the seeds are. An exception is a fault with its seed."""
    for seed in seeds:
        if time.monotonic() > until:
            return
        print(f"round {seed}", flush=True)
        try:
            play_round(world, seed, findings, families)
        except Exception as error:
            findings.faults.append(f"seed {seed}: {type(error).__name__}: {error}")
            print(findings.faults[-1], flush=True)
            if world.device == "cuda":
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
        world = World(Path(root), device)
        try:
            run_rounds(world, seeds, began + args.minutes * 60, families, findings)
        finally:
            report(findings, device, time.monotonic() - began)
    return bool(findings.faults)


def run_workers(args: argparse.Namespace) -> int:
    """As many processes, each with every so-many-th seed; one that dies is told with its output."""
    root = Path(tempfile.mkdtemp())
    running = []
    for i in range(args.workers):
        given = ["--minutes", args.minutes, "--seed", args.seed + i, "--stride", args.workers]
        given += [word for name in args.family or () for word in ("--family", name)]
        log = (root / f"{i}.log").open("w")
        command = [sys.executable, __file__, *map(str, given)]
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
        kept = [line for line in text.splitlines() if not line.startswith("round ")]
        last = [line for line in text.splitlines() if line.startswith("round ")][-1:]
        print(f"--- worker {i}: exit {code}, {last}", *kept[-60 if code else -20 :], sep="\n")
    return int(failed > 0)


def report(findings: Findings, device: str, seconds: float) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{seconds:.0f} s on {name}, torch {torch.__version__}")
    for family in sorted({family for family, _ in findings.counts}):
        counts = {name: n for (of, name), n in findings.counts.items() if of == family}
        print(f"  {family}: " + ", ".join(f"{name} {n:,}" for name, n in counts.items()))
    for text in findings.ties:
        print(f"near tie: {text}")
    for text in findings.faults:
        print(f"FAULT: {text}")
    print(f"{len(findings.faults)} faults, {len(findings.ties)} near ties")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
