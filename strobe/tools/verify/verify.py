"""`strobe verify`: run a suite with and without speculation, compare every row, and judge."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.hub.locate import locate_models
from strobe.ranks.leader import start_engine
from strobe.speculation.draft_policy import DraftPolicy
from strobe.text.tokenizer import Tokenizer
from strobe.tools import report
from strobe.tools.verify.against import (
    Peer,
    PeerUndecided,
    ServerPeer,
    TransformersPeer,
    run_peer,
    trimmed,
)
from strobe.tools.verify.cases import Suite, SuiteBuilder, read_prompts
from strobe.tools.verify.check import Checker
from strobe.tools.verify.distribution import compare_distributions, sample_pairs
from strobe.tools.verify.filter_edges import EdgeRow
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.judge import Judge, detectable_rate, reference_bound
from strobe.tools.verify.reference import Reference, TransformersReference, make_reference
from strobe.tools.verify.rounding import limit_of, measure_rounding, peer_rounding
from strobe.tools.verify.runs import Run, run_waves
from strobe.tools.verify.verify_report import markdown, show
from strobe.tools.verify.verify_settings import VerifySettings

MAX_WAVES = 10_000
FIRST_SEED = 10**6
"""Seeds of the test of distributions begin so far after the others."""
RUNS = ("plain", "speculation", "sampling")
"""Parts that generate tokens in both ways."""
OVERHEAD = ("reference", "check", "rounding", "testing")
"""The verification's own parts, loading the reference among them."""


def run_verify(config: EngineConfig, settings: VerifySettings, *, as_json: bool = False) -> int:
    """Verify the pair in `config`, print the verdict and return the exit status: 0 clean, 1 for a
    fault, 2 if nothing could be decided."""
    demo = not config.target
    config = locate_models(config)
    with report.progress(quiet=as_json) as say:
        say("loading")
        engine = make_engine(config)
        head = report.circumstances("strobe verify", engine.resolved)
        verifier = Verifier(engine=engine, settings=settings, demo=demo, say=say)
        verification = verifier.run()
    verification.figures["circumstances"] = head
    if settings.output:
        Path(settings.output).write_text(markdown(verification), encoding="utf-8")
    print(json.dumps(verification.as_dict())) if as_json else show(verification)
    return verification.exit_status


def make_engine(config: EngineConfig) -> Engine:
    """Make the engine that is verified. Without a drafter it drafts by prompt lookup."""
    if config.draft is None and config.method is None:
        config = replace(config, method="ngram")
    resolved = resolve(config)
    if resolved.split.size > 1:
        return start_engine(resolved, draft_policy=DraftPolicy())
    return Engine(resolved, draft_policy=DraftPolicy())


@dataclass
class Verifier:
    """Verifies one engine. demo: its target is the demo models'. say: shows progress."""

    engine: Engine
    settings: VerifySettings
    demo: bool = False
    say: Callable[[str], None] = lambda text: None
    reference: Reference | None = None
    verification: Verification = field(init=False)

    def __post_init__(self) -> None:
        config = self.engine.config
        self.verification = Verification(target=config.target, draft=config.draft)
        self.tokenizer = Tokenizer(Path(config.target))
        self.builder = SuiteBuilder(
            tokenizer=self.tokenizer,
            max_tokens=self.settings.max_tokens,
            max_model_len=self.engine.limits.max_model_len,
            seed=config.seed,
            page_size=config.page_size,
            demo=self.demo,
            grammars=(Path(config.target) / "tokenizer.json").exists(),
            texts=read_prompts(Path(self.settings.prompts)) if self.settings.prompts else (),
        )

    def run(self) -> Verification:
        """Run both ways, measure rounding, compare, and judge."""
        suite = self.builder.suite()
        plain, speculated = self._run_both(suite)
        with self._timed("reference", "loading the reference"):
            reference = self._reference()
        checker = Checker(reference, self.engine)
        with self._timed("check", "computing every row again"):
            checks = checker.check_runs({"plain decoding": plain, "speculation": speculated})
        with self._timed("rounding", "measuring rounding"):
            spread = float(np.median(checker.spreads)) if checker.spreads else 1.0
            rounding = measure_rounding(self.engine, plain, spread)
        bound = reference_bound(rounding, checks["plain decoding"])
        judge = Judge(
            verification=self.verification,
            tokenizer=self.tokenizer,
            rounding=rounding,
            reference_bound=bound,
        )
        judge.judge_rounding()
        judge.judge_runs(checker, plain, speculated, "speculation")
        for check in checks.values():
            judge.judge_reference(check, reference.name)
        if self.settings.seeds and checker.edges:
            self._judge_distributions(checker.edges, reference, judge)
        pairs = [(wave.name, wave.cold) for wave in suite.waves if wave.cold is not None]
        judge.judge_acceptance(speculated, pairs)
        self._count(plain, speculated, judge)
        if self.settings.against is not None:
            with self._timed("against", f"comparing with {self.settings.against}"):
                self._compare_with_peer(self.settings.against, checker, plain, judge)
        for reason in suite.left_out:
            self.verification.add("note", "left out", f"{reason}.")
        return self.verification

    def _run_both(self, suite: Suite) -> tuple[Run, Run]:
        """Run the suite, with more sampled waves until enough tokens were generated."""
        waves = list(suite.waves)
        with self._timed("plain", "running without speculation"):
            plain = run_waves(self.engine, waves, speculate=False)
            per_wave = sum(len(a.tokens) for a in plain.answers[waves[-1].name])
            missing = self.settings.tokens - plain.num_tokens
            if missing > 0 and per_wave:
                size = min(self.engine.limits.max_num_seqs, 32)
                tokens = per_wave * size / len(waves[-1].cases)
                more = min(-(-missing // max(int(tokens), 1)), MAX_WAVES)
                extra = [self.builder.sampled_wave(suite.chats, 1 + i, size) for i in range(more)]
                plain = plain.joined(run_waves(self.engine, extra, speculate=False))
                waves += extra
        with self._timed("speculation", "running with speculation"):
            speculated = run_waves(self.engine, waves, speculate=True)
        return plain, speculated

    def _reference(self) -> Reference:
        if self.reference is None:
            self.reference, reason = make_reference(self.settings.reference, self.engine)
            if reason is not None:
                self.verification.add(
                    "note",
                    "reference",
                    f"The reference is Strobe's plain torch, since {reason}. A fault that it "
                    "shares with the engine cannot show.",
                )
        return self.reference

    def _judge_distributions(
        self, rows: Sequence[EdgeRow], reference: Reference, judge: Judge
    ) -> None:
        """Sample with many seeds in both ways, and test whether the distributions agree."""
        seed = self.engine.config.seed
        with self._timed("sampling", "sampling with many seeds"):
            pairs = sample_pairs(
                self.engine,
                rows,
                reference,
                seeds=self.settings.seeds,
                first_seed=seed + FIRST_SEED,
                bound=judge.reference_bound,
            )
        with self._timed("testing", "testing distributions"):
            tests = compare_distributions(pairs, seed)
            judge.judge_first_tokens(pairs)
        self.verification.figures["distribution"] = [vars(test) for test in tests]
        judge.judge_distributions(tests)

    def _compare_with_peer(self, against: str, checker: Checker, plain: Run, judge: Judge) -> None:
        """Compare another engine's answers to the chats with plain decoding and the reference."""
        stop_ids = self.engine.resolved.target.eos_ids
        resolved = self.engine.resolved
        try:
            peer, dtype = self._peer(against)
            run = run_peer(peer, [answer.case for answer in plain.answers["batch"]], stop_ids)
        except (PeerUndecided, ValueError) as error:
            text = str(error).rstrip(".")
            self.verification.add("undecided", "against", f"{text}.")
            return
        ours = trimmed(plain, stop_ids)
        checks = checker.check_runs({peer.name: run})[peer.name]
        spread = float(np.median(checker.spreads))
        limit = limit_of(resolved, spread, dtype)
        rounding = peer_rounding(run, judge.rounding, limit)
        bound = reference_bound(rounding, checks)
        rounding = replace(rounding, bound=max(rounding.bound, bound))
        own = replace(judge, rounding=rounding, reference_bound=bound)
        self.verification.add(
            "note",
            "against",
            f"{peer.name}: {checks.rows} rows, compared with bound {bound:.2g}.",
        )
        for wave in run.answers:
            batch = Run({wave: ours.answers["batch"]}, ours.seconds)
            own.judge_runs(checker, batch, Run({wave: run.answers[wave]}, 0.0), peer.name)
        own.judge_reference(checks, self._reference().name)
        if "batch" in run.answers:
            tokens = sum(len(answer.tokens) for answer in run.answers["batch"])
            self.verification.figures["against_tokens_per_s"] = tokens / run.seconds

    def _peer(self, against: str) -> tuple[Peer, torch.dtype]:
        """Return the other engine and its dtype. Raises ValueError."""
        if against != "transformers":
            dtype: torch.dtype = getattr(torch, self.settings.against_dtype)
            return ServerPeer(against, self.tokenizer), dtype
        reference = self._reference()
        if not isinstance(reference, TransformersReference):
            reference = TransformersReference(self.engine.resolved)
        stop_ids = self.engine.resolved.target.eos_ids
        return TransformersPeer(reference, stop_ids), self.engine.resolved.dtype

    def _count(self, plain: Run, speculated: Run, judge: Judge) -> None:
        """Report throughput, acceptance, and the fault rate that would have shown."""
        counts = speculated.counts
        if not counts.num_accepted:
            self.verification.add(
                "undecided",
                "speculation",
                f"{counts.num_verified} drafts were verified and none accepted, so accepted drafts "
                "were not tested; use the drafter that belongs to the target, or more --tokens.",
            )
        rate = detectable_rate(speculated.num_tokens)
        self.verification.figures |= {
            "reference": self._reference().name,
            "rounding": vars(judge.rounding) | {"reference_bound": judge.reference_bound},
            "tokens": speculated.num_tokens,
            "accepted": counts.num_accepted,
            "detectable_rate": rate,
            "plain_tokens_per_s": plain.num_tokens / plain.seconds,
            "speculation_tokens_per_s": speculated.num_tokens / speculated.seconds,
            "acceptance_length": counts.acceptance_length if counts.steps else None,
        }
        seconds = self.verification.seconds
        runs = sum(seconds.get(part, 0.0) for part in RUNS)
        overhead = sum(seconds.get(part, 0.0) for part in OVERHEAD)
        self.verification.figures["overhead"] = overhead / runs

    @contextmanager
    def _timed(self, part: str, text: str) -> Generator[None]:
        self.say(text)
        began = time.perf_counter()
        yield
        self.verification.seconds[part] = time.perf_counter() - began
