"""Whether two runs draw their tokens from the same distribution, and from the reference's: tests by
permutation, with a bound of the false discoveries among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from strobe.engine.engine import Engine
from strobe.sampling.noise import gumbel, noise_key
from strobe.sampling_params import SamplingParams
from strobe.tools.verify.cases import Case
from strobe.tools.verify.check import Outlier
from strobe.tools.verify.filter_edges import FILTERS, POSITIONS, EdgeRow
from strobe.tools.verify.oracle import OracleRow, passes_filters
from strobe.tools.verify.reference import Reference
from strobe.tools.verify.runs import Answer, run_cases

FALSE_DISCOVERIES = 1e-3
"""Maximum probability that a difference is reported although no distribution differs."""
PERMUTATIONS = (2_000, 40_000)
"""Of a test; the second number only if the first gives a probability below SURE."""
SURE = 0.02
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
MIN_ENTROPY = 1.5
"""Without a filter, the temperature is the lowest at which the first token has this entropy, in
nats."""


@dataclass(frozen=True)
class DistributionTest:
    """One test: what was compared, the numbers of samples, its probability under equality, and
    whether it is a discovery."""

    about: str
    samples: int
    p_value: float
    differs: bool = False


@dataclass(frozen=True)
class SampledPair:
    """Short sampled answers to one prompt, plain and with speculation, each with seeds of its own;
    and the reference's logits and probabilities of the first token."""

    about: str
    plain: list[Answer]
    speculated: list[Answer]
    logits: NDArray[np.float64]
    first: NDArray[np.float64]

    def check_first_tokens(self) -> tuple[int, list[Outlier]]:
        """Compare each answer's first token with the one that its seed's noise gives; return the
        number of comparisons and the tokens that differ."""
        wrong: list[Outlier] = []
        for run, answers in (("plain decoding", self.plain), ("speculation", self.speculated)):
            for answer in answers:
                sampling = answer.case.sampling
                key = torch.tensor([noise_key(sampling.seed or 0, 0)])
                position = torch.tensor([len(answer.case.prompt)])
                noise = gumbel(key, position, len(self.logits))[0].numpy()
                row = OracleRow(self.logits, sampling, noise)
                expected = row.winner
                token = answer.tokens[0] if answer.tokens else None
                if token is not None and token != expected:
                    wrong.append(
                        Outlier(
                            run=run,
                            wave=f"seed {sampling.seed}",
                            case=self.about,
                            index=0,
                            value=row.distance(token),
                            token=token,
                            expected=expected,
                        )
                    )
        return len(self.plain) + len(self.speculated), wrong


def sample_pairs(
    engine: Engine,
    rows: Sequence[EdgeRow],
    reference: Reference,
    *,
    seeds: int,
    first_seed: int,
    bound: float,
) -> list[SampledPair]:
    """Sample each of FILTERS with so many seeds in each way, at the row of `rows` where a fault in
    it shows best. bound: of the reference's rounding."""
    pairs: list[SampledPair] = []
    for filtered in FILTERS:
        row, temperature = filtered.choose(rows, bound)
        logits = reference.logits([*row.prompt, 0], len(row.prompt))[0].astype(np.float64)
        temperature = temperature or choose_temperature(logits)
        ordered = np.sort(_probabilities(logits, temperature))[::-1]
        params = SamplingParams(
            **filtered.fields(ordered),
            temperature=temperature,
            max_tokens=POSITIONS,
            ignore_eos=True,
        )
        answers = [
            run_cases(
                engine,
                [
                    Case(filtered.name, row.prompt, params.clone(seed=seed))
                    for seed in range(start, start + seeds)
                ],
                speculate=speculate,
                logprobs=None,
            )
            for speculate, start in ((False, first_seed), (True, first_seed + seeds))
        ]
        kept = passes_filters((logits - logits.max()) / temperature, params)
        first = np.where(kept, _probabilities(logits, temperature), 0.0)
        pairs.append(
            SampledPair(
                about=f"{filtered.name}, temperature {temperature:.3g}, {row.kind}",
                plain=answers[0],
                speculated=answers[1],
                logits=logits,
                first=first / first.sum(),
            )
        )
    return pairs


def _probabilities(logits: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def choose_temperature(logits: NDArray[np.float64]) -> float:
    """Return the lowest temperature at which a row is far from certain."""
    for temperature in TEMPERATURES:
        probabilities = _probabilities(logits, temperature)
        entropy = -(probabilities * np.log(np.maximum(probabilities, 1e-300))).sum()
        if entropy >= MIN_ENTROPY:
            return temperature
    return TEMPERATURES[-1]


def compare_distributions(pairs: Sequence[SampledPair], seed: int) -> list[DistributionTest]:
    """Test by setting and position whether both ways agree, and the first token of both against the
    reference's exact probabilities."""
    rng = np.random.default_rng(seed)
    tests: list[DistributionTest] = []
    for pair in pairs:
        for position in range(POSITIONS):
            first = _tokens(pair.plain, position)
            second = _tokens(pair.speculated, position)
            tests.append(
                DistributionTest(
                    about=f"{pair.about}, token {position + 1}",
                    samples=len(first) + len(second),
                    p_value=permutation_p(first, second, rng),
                )
            )
        drawn = [*_tokens(pair.plain, 0), *_tokens(pair.speculated, 0)]
        tests.append(
            DistributionTest(
                about=f"{pair.about}, token 1 against the reference",
                samples=len(drawn),
                p_value=exact_p(drawn, pair.first, rng),
            )
        )
    return benjamini_hochberg(tests)


def _tokens(answers: Sequence[Answer], position: int) -> list[int]:
    return [answer.tokens[position] for answer in answers if len(answer.tokens) > position]


def permutation_p(first: Sequence[int], second: Sequence[int], rng: np.random.Generator) -> float:
    """Return the probability of a chi-square distance of the counts that is as large or larger,
    over random assignments of the samples to both groups."""
    tokens, index = np.unique([*first, *second], return_inverse=True)
    if len(tokens) < 2 or not first or not second:
        return 1.0
    totals = np.bincount(index)
    counts = np.bincount(index[: len(first)], minlength=len(totals))
    expected = totals * len(first) / totals.sum()
    distance = float(((counts - expected) ** 2 / totals).sum())

    def draw(count: int) -> NDArray[np.float64]:
        drawn = rng.multivariate_hypergeometric(totals, len(first), size=count, method="marginals")
        return ((drawn - expected) ** 2 / totals).sum(1)

    return _p_value(distance, draw)


def exact_p(
    tokens: Sequence[int], probabilities: NDArray[np.float64], rng: np.random.Generator
) -> float:
    """Return the probability of counts that are as far from `probabilities` or farther, over
    samples drawn from these. Tokens of low probability count as one."""
    count = len(tokens)
    common = np.flatnonzero(probabilities * count >= 1.0)
    cells = np.append(probabilities[common], max(1.0 - probabilities[common].sum(), 0.0))
    cells /= cells.sum()
    place = {int(token): i for i, token in enumerate(common)}
    counts = np.bincount([place.get(t, len(common)) for t in tokens], minlength=len(cells))
    expected = np.maximum(cells * count, 1e-9)
    distance = float(((counts - expected) ** 2 / expected).sum())

    def draw(size: int) -> NDArray[np.float64]:
        drawn = rng.multinomial(count, cells, size=size)
        return ((drawn - expected) ** 2 / expected).sum(1)

    return _p_value(distance, draw)


def _p_value(distance: float, draw: Callable[[int], NDArray[np.float64]]) -> float:
    """Return the share of random distances >= `distance`, estimated from few if it is not small.
    draw: returns so many of them."""
    share = 1.0
    for count in PERMUTATIONS:
        distances = draw(count)
        share = float((1 + (distances >= distance - 1e-9).sum()) / (1 + count))
        if share > SURE:
            break
    return share


def benjamini_hochberg(
    tests: Sequence[DistributionTest], rate: float = FALSE_DISCOVERIES
) -> list[DistributionTest]:
    """Mark the tests that differ; the expected share of false ones among them does not exceed
    `rate` (Benjamini and Hochberg, 1995)."""
    ordered = sorted(test.p_value for test in tests)
    passed = [p for i, p in enumerate(ordered, start=1) if p <= rate * i / len(tests)]
    threshold = max(passed, default=-1.0)
    return [replace(test, differs=test.p_value <= threshold) for test in tests]
