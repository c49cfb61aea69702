"""From differences to findings: which divergence is a tie, and which row is a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strobe.text.tokenizer import Tokenizer
from strobe.tools.verify.check import Checker, Divergence, Outlier, RowChecks, compare_rows
from strobe.tools.verify.distribution import DistributionTest, SampledPair
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.rounding import Rounding
from strobe.tools.verify.runs import Answer, Run

REFERENCE_FACTOR = 8.0
"""A row differs from the reference if it is this many times as far off as 99 % of the rows."""
SHOWN = 3
"""Faults of one kind that are described; --json has all."""
CONTEXT = 12
"""Tokens before and after a divergence whose text is shown."""
MIN_LOSS = 0.85
MIN_ERRORS = 4.0
"""Acceptance is lost if it falls below this share, by this many standard errors."""


@dataclass
class Judge:
    """Adds findings to a verification. bound: of differences between runs; reference_bound: of
    differences from the reference, and of the distances of tokens from the reference's."""

    verification: Verification
    tokenizer: Tokenizer
    rounding: Rounding
    reference_bound: float

    def judge_rounding(self) -> None:
        """Report the measured rounding, and whether it can be rounding at all."""
        rounding = self.rounding
        shapes = ", ".join(f"{name} {value:.2g}" for name, value in rounding.by_shape.items())
        says = (
            f"{rounding.rows} rows computed in several shapes differ by up to "
            f"{rounding.largest:.2g} ({shapes}); bound {rounding.bound:.2g}, and "
            f"{self.reference_bound:.2g} against the reference."
        )
        if rounding.is_plausible:
            self.verification.add("ok", "rounding", says)
        else:
            limit = f"{rounding.limit:.2g}"
            self.verification.add(
                "fault",
                "rounding",
                f"{says} More than {limit} is no rounding of this dtype: the same row depends on "
                "what it is computed with.",
            )

    def judge_runs(self, checker: Checker, plain: Run, other: Run, name: str) -> None:
        """Label where the answers of two runs part, and compare their rows."""
        divergences: list[Divergence] = []
        rows: list[Outlier] = []
        greedy = sampled = 0
        for wave, answers in plain.answers.items():
            for one, two in zip(answers, other.answers[wave], strict=True):
                self._judge_errors(wave, one, two)
                if one.case.is_greedy:
                    greedy += len(two.tokens)
                else:
                    sampled += len(two.tokens)
                divergence = checker.divergence(wave, one, two)
                if divergence is not None:
                    divergences.append(divergence)
                rows += compare_rows(name, wave, one, two)
        for about, count, is_greedy in (
            (f"greedy, {name}", greedy, True),
            (f"sampled, {name}", sampled, False),
        ):
            self._judge_divergences(
                about, count, [d for d in divergences if d.greedy == is_greedy], name
            )
        self._judge_outliers(
            f"rows of {name}", rows, self.rounding.bound, "plain decoding", len(rows)
        )

    def _judge_errors(self, wave: str, plain: Answer, other: Answer) -> None:
        if plain.error != other.error:
            self.verification.add(
                "fault",
                "errors",
                f"{wave}, {plain.case.kind}: one of both answers failed: "
                f"{plain.error or other.error}",
            )
        elif plain.error is not None:
            self.verification.add(
                "undecided", "errors", f"{wave}, {plain.case.kind}: {plain.error}"
            )

    def _judge_divergences(
        self, about: str, count: int, divergences: Sequence[Divergence], name: str
    ) -> None:
        faults = 0
        for divergence in divergences:
            is_tie = divergence.distance <= self.reference_bound
            faults += not is_tie
            texts = [self._around(answer, divergence.index) for answer in divergence.answers]
            record = {
                "label": "tie" if is_tie else "fault",
                "run": name,
                "wave": divergence.wave,
                "case": divergence.case,
                "position": divergence.index,
                "tokens": list(divergence.tokens),
                "margin": divergence.distance,
                "margin_in_noise": None if divergence.greedy else divergence.in_noise,
                "bound": self.reference_bound,
                "texts": texts,
            }
            self.verification.divergences.append(record)
            if not is_tie and faults <= SHOWN:
                self.verification.add(
                    "fault",
                    about,
                    f"{divergence.wave}, {divergence.case}: the answers part at token "
                    f"{divergence.index}, where the tokens are {divergence.distance:.3g} from a "
                    f"tie (bound {self.reference_bound:.2g}): {texts[0]!r} and {texts[1]!r}.",
                )
        ties = len(divergences) - faults
        if faults:
            self.verification.add(
                "fault", about, f"{faults} faults and {ties} ties in {count} tokens."
            )
        elif count:
            farthest = max((d.distance for d in divergences), default=0.0)
            where = f"; the widest margin is {farthest:.2g}" if ties else ""
            self.verification.add(
                "ok",
                about,
                f"{count} tokens equal plain decoding's but for {ties} ties{where}."
                if ties
                else f"{count} tokens equal plain decoding's.",
            )

    def _around(self, tokens: Sequence[int], index: int) -> str:
        start = max(index - CONTEXT, 0)
        return self.tokenizer.decode(tokens[start : index + CONTEXT], skip_special_tokens=False)

    def _judge_outliers(
        self, about: str, outliers: Sequence[Outlier], bound: float, against: str, count: int
    ) -> None:
        wrong = [outlier for outlier in outliers if not outlier.value <= bound]
        for outlier in sorted(wrong, key=lambda o: -o.value)[:SHOWN]:
            expected = ""
            if outlier.expected is not None:
                want = self.tokenizer.token_text(outlier.expected)
                have = self.tokenizer.token_text(outlier.token)
                expected = f" ({have!r} in place of {want!r})"
            self.verification.add(
                "fault",
                about,
                f"{outlier.wave}, {outlier.case}, token {outlier.index}: {outlier.value:.3g} from "
                f"{against}{expected}, bound {bound:.2g}.",
            )
        largest = max((outlier.value for outlier in outliers), default=0.0)
        if wrong:
            self.verification.add(
                "fault", about, f"{len(wrong)} of {count} rows are beyond the bound."
            )
        else:
            self.verification.add(
                "ok", about, f"{count} rows agree with {against} to {largest:.2g}."
            )

    def judge_reference(self, checks: RowChecks, reference: str) -> None:
        """Report rows whose log probabilities or tokens are not the reference's."""
        self._judge_outliers(
            f"rows of {checks.run}",
            checks.differences,
            self.reference_bound,
            f"the reference ({reference})",
            checks.rows,
        )
        self._judge_outliers(
            f"tokens of {checks.run}",
            checks.distances,
            self.reference_bound,
            f"the reference's own tokens ({reference})",
            checks.rows,
        )

    def judge_first_tokens(self, pairs: Sequence[SampledPair]) -> None:
        """Report first tokens of the test of distributions that are not their noise's."""
        count = 0
        wrong: list[Outlier] = []
        for pair in pairs:
            compared, outliers = pair.check_first_tokens()
            count += compared
            wrong += outliers
        about = "the reference's own tokens"
        self._judge_outliers("first tokens", wrong, self.reference_bound, about, count)

    def judge_distributions(self, tests: Sequence[DistributionTest]) -> None:
        """Report distributions that differ."""
        for test in tests:
            if test.differs:
                self.verification.add(
                    "fault",
                    "distribution",
                    f"{test.about}: {test.samples} samples differ, p = {test.p_value:.2g}.",
                )
        if tests and not any(test.differs for test in tests):
            smallest = min(test.p_value for test in tests)
            self.verification.add(
                "ok",
                "distribution",
                f"{len(tests)} tests of {tests[0].samples} samples each find no difference; the "
                f"smallest p is {smallest:.2g}.",
            )

    def judge_acceptance(self, run: Run, pairs: Sequence[tuple[str, str]]) -> None:
        """Compare the acceptance of answers after a cache hit with the same answers' without.
        pairs: names of the waves."""
        lost: list[float] = []
        cold_steps: list[int] = []
        warm_steps: list[int] = []
        for warm, cold in pairs:
            for hit, first in zip(run.answers[warm], run.answers[cold], strict=True):
                if not hit.num_cached or not hit.steps_accepted or hit.tokens != first.tokens:
                    continue
                cold_steps += first.steps_accepted
                warm_steps += hit.steps_accepted
                lost.append(_mean(first.steps_accepted) - _mean(hit.steps_accepted))
        if len(lost) < 3:
            return
        cold = 1 + _mean(cold_steps)
        warm = 1 + _mean(warm_steps)
        error = float(np.std(lost, ddof=1)) / len(lost) ** 0.5
        says = f"{warm:.2f} tokens a step after a cache hit, {cold:.2f} without."
        if warm < MIN_LOSS * cold and float(np.mean(lost)) > MIN_ERRORS * error:
            self.verification.add(
                "fault", "acceptance", f"{says} The drafter's context is not the one it had."
            )
        else:
            self.verification.add("ok", "acceptance", says)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def reference_bound(rounding: Rounding, checks: RowChecks) -> float:
    """Return the bound of differences from the reference: above nearly all rows' own, but never
    more than rounding can explain."""
    return min(max(rounding.bound, REFERENCE_FACTOR * checks.quantile(0.99)), rounding.limit)


def detectable_rate(tokens: int) -> float:
    """Return the rate of wrong tokens at which one appears among so many with 95 % probability."""
    return 1 - 0.05 ** (1 / tokens) if tokens else 1.0
