"""Milliseconds of a step: fitted to the steps that warm-up ran, corrected by every later step.
Imports no torch.

    ms = pace * (draft(drafter's rows) + verify(rows) + request * requests + context)

where context is plain * positions of all requests' contexts, and for the drafts of a request with a
mean context (block * drafting requests + draft_row * drafter's rows + verify_row * drafts) * its
positions. What drafts add to the step without them is multiplied by a factor, too (`StepFactors`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from strobe.speculation.acceptance import Floats, Ints
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import Plan, StepResult

Curve: TypeAlias = tuple[Ints, Floats]
"""Numbers of rows, ascending, and their milliseconds."""

_MANY_ROWS = 2**24  # a curve's last line goes on up to there
_DISTINCT = 512  # positions by which contexts must differ to say what drafts cost over context
_PROMPT_STEPS = 64  # steps with prompts that measure the cost of their rows
_MIN_SHARE = 1 / 8  # of the usual time of a step's rows; a shorter step was timed wrongly


class StepWork(NamedTuple):
    """Rows of the drafter's blocks, rows of the target, number of decoding requests, positions of
    all their contexts together, requests for which the drafter runs, and drafts verified. Numbers
    may be arrays, and means."""

    draft_rows: int | Ints | Floats
    rows: int | Ints | Floats
    requests: int | Floats = 1
    context: int | Floats = 0
    drafting: int | Ints | Floats = 0
    drafts: int | Ints | Floats = 0

    @classmethod
    def of(cls, plan: Plan, result: StepResult, block_rows: int) -> StepWork | None:
        """Return the work of a step in which all requests decode, else None. block_rows: rows of
        the drafter's block."""
        spans = plan.spans
        if not all(span.num_logits and span.num_context_rows == 1 for span in spans):
            return None
        drafting = sum([span.method is not None for span in spans])
        return cls(
            draft_rows=block_rows * drafting,
            rows=result.rows,
            requests=len(spans),
            context=sum([span.start for span in spans]),
            drafting=drafting,
            drafts=sum(result.num_verified or [span.num_drafts for span in spans]),
        )


class Rates(NamedTuple):
    """Milliseconds of each request; and of each position of context: of every request for its first
    row, of a request for the drafter's block, for each row of the block and for each draft that is
    verified."""

    request: float = 0.0
    context: float = 0.0
    block_context: float = 0.0
    draft_row_context: float = 0.0
    verify_row_context: float = 0.0

    @classmethod
    def amounts(cls, work: StepWork) -> tuple[Any, ...]:
        """Return the numbers that the rates are multiplied by; arrays where the work has them."""
        mean = work.context / work.requests
        return (
            work.requests,
            work.context,
            work.drafting * mean,
            work.draft_rows * mean,
            work.drafts * mean,
        )


class StepFactors:
    """Factors by which steps take longer than at the start: the *pace* of all steps, and that of
    what drafts add to a step. A step with drafts does not tell them apart, so their logarithms have
    variances and a covariance (a Kalman filter): a step corrects the less certain factor most, and
    a step without drafts after many with drafts corrects both."""

    def __init__(self, config: PolicyConfig):
        self.pace = 1.0
        self.drafts = 1.0
        self._pace_variance = config.pace_doubt**2
        self._drafts_variance = config.drafts_doubt**2
        self._covariance = 0.0
        self._surprise = 0
        """1 if the newest step took far longer than expected, -1 if far shorter, else 0."""
        self._had_drafts = True
        """Whether the newest step had drafts."""

    def observe(self, share: float, ratio: float, noise: float, config: PolicyConfig) -> bool:
        """Correct both factors by a step. share: of its expected milliseconds, what drafts add;
        ratio: its milliseconds over those expected; noise: standard deviation of its logarithm from
        other causes. Return whether drafts did not make it far shorter than expected.

        One step that takes far longer or shorter is an outlier and counts as noise. Two in a row
        show that the machine has changed. And drafts directly after a usual step without drafts are
        far cheaper only if they were timed wrongly, since noise makes steps longer."""
        self._pace_variance += config.pace_drift**2
        self._drafts_variance += config.drafts_drift**2
        self._drafts_variance = min(self._drafts_variance, config.drafts_doubt**2)
        error = math.log(ratio)
        limit = config.outlier * math.sqrt(self._variance(share) + noise**2)
        surprise = (error > limit) - (error < -limit)
        if surprise < 0 < share and not (self._had_drafts or self._surprise):
            self._drafts_variance = config.drafts_doubt**2
            self._covariance = 0.0
        elif surprise and surprise == self._surprise:
            self._pace_variance += config.pace_jump**2
        elif surprise:
            error = surprise * config.outlier * noise
        self._surprise = surprise
        self._had_drafts = share > 0.0
        pace = self._pace_variance + share * self._covariance
        drafts = self._covariance + share * self._drafts_variance
        variance = self._variance(share) + noise**2
        self.pace *= math.exp(pace * error / variance)
        self.drafts *= math.exp(drafts * error / variance)
        self._pace_variance -= pace * pace / variance
        self._covariance -= pace * drafts / variance
        self._drafts_variance -= drafts * drafts / variance
        return surprise >= 0 or not self._had_drafts

    def _variance(self, share: float) -> float:
        """Return the variance of the logarithm of a step's expected milliseconds."""
        shared = 2 * share * self._covariance
        return self._pace_variance + shared + share**2 * self._drafts_variance


class StepCosts:
    """Two curves, milliseconds by rows of the drafter's blocks and by rows of the target; the
    rates; and the factors by which steps take longer now than at the start."""

    def __init__(
        self,
        draft: Mapping[float, float],
        verify: Mapping[float, float],
        request: float = 0.0,
        context: float = 0.0,
        **over_context: float,
    ):
        """draft, verify: for two or more numbers of rows each. The others are rates."""
        self._draft = _curve(draft)
        self._verify = _curve(verify)
        self._rates = np.array(Rates(request=request, context=context, **over_context))
        self.factors = StepFactors(PolicyConfig())

    @property
    def pace(self) -> float:
        """The factor by which all steps take longer than at the start."""
        return self.factors.pace

    @property
    def rates(self) -> Rates:
        return Rates(*self._rates.tolist())

    @classmethod
    def fit(
        cls, timed: Sequence[tuple[StepWork, float]], *, lines: bool, has_drafter: bool = True
    ) -> StepCosts | None:
        """Return the costs with the smallest relative errors for these steps and milliseconds, or
        None if there are too few. has_drafter: whether some have rows of a drafter; if these all
        have the same number, its curve is a line through 0. Curves are as straight as these steps
        allow, since steps alone cannot tell a costly drafter from costly rows; lines: they are
        lines, as on a CPU. Rates of which all steps have the same amount are 0, since they
        would take a part of the rows' cost."""
        ms = np.array([ms for _, ms in timed])
        works = np.array([work for work, _ in timed], dtype=np.float64).reshape(-1, 6).T
        rows = [np.unique(n[n > 0]) for n in works[:2]]
        if len(rows[0]) < has_drafter or len(rows[1]) < 2 or len(timed) < 2 + has_drafter:
            return None
        amounts = np.array(Rates.amounts(StepWork(*works)))
        terms = np.concatenate([*map(_shares, works, rows), amounts]) / ms
        weight = (1e2 if lines else 3e-4) / np.median(ms)  # of a bend, against a relative error
        places = (0, len(rows[1]) + len(amounts)), (len(rows[0]), len(amounts))
        bends = [np.pad(_bends(n), ((0, 0), at)) for n, at in zip(rows, places, strict=True)]
        equations = np.concatenate((terms.T, *[weight * bend for bend in bends]))
        results = np.append(np.ones(len(ms)), np.zeros(len(equations) - len(ms)))
        used = np.ones(len(terms), dtype=bool)
        rates = slice(-len(amounts), None)
        contexts = works[3] / works[2]
        drafted = [contexts[amount > 0] for amount in amounts[2:]]
        used[rates] = np.ptp(amounts, axis=1) > 0
        used[-len(drafted) :] = [len(c) > 0 and np.ptp(c) >= _DISTINCT for c in drafted]
        costs = np.zeros(len(terms))
        for _ in range(len(amounts) + 1):
            costs[used] = np.linalg.lstsq(equations[:, used], results, rcond=None)[0]
            used[rates] &= costs[rates] >= 0  # a rate below 0 is noise
            costs[~used] = 0.0
        curves = np.split(np.maximum(costs[: -len(amounts)], 1e-3).tolist(), [len(rows[0])])
        draft = dict(zip(rows[0], curves[0], strict=True)) or {1: 0.0, 2: 0.0}
        if len(draft) == 1:
            draft |= {2 * n: 2 * cost for n, cost in draft.items()}
        verify = dict(zip(rows[1], curves[1], strict=True))
        return cls(draft, verify, **Rates(*costs[rates].tolist())._asdict())

    def ms(self, work: StepWork) -> Floats:
        """Return the milliseconds of such a step."""
        plain, added = self._parts(work)
        return np.asarray(self.factors.pace * (plain + added))

    def _parts(self, work: StepWork) -> tuple[Any, Any]:
        """Return the milliseconds at the pace of the start of a step without its drafts, and those
        that its drafts add."""
        rates = self._rates.tolist()
        amounts = Rates.amounts(work)
        undrafted = np.interp(work.rows - work.drafts, *self._verify)
        plain = undrafted + rates[0] * amounts[0] + rates[1] * amounts[1]
        added = np.interp(work.draft_rows, *self._draft) * (work.draft_rows > 0)
        added += np.interp(work.rows, *self._verify) - undrafted
        added += sum(map(operator.mul, rates[2:], amounts[2:]))
        return plain, self.factors.drafts * added

    def observe(self, work: StepWork, ms: float, config: PolicyConfig) -> bool:
        """Correct the factors and the rates, and by what then remains of the error about a step
        both curves at the nearest numbers of rows. A step that took far too long, as for a capture,
        counts as twice as long as expected. Return whether its drafts did not cost far less than
        expected."""
        plain, added = self._parts(work)
        ratio = min(max(ms / float(self.pace * (plain + added)), 0.5), 2.0)
        self._correct_rates(work, ratio, config)
        is_long = work.context >= config.rate_context * work.requests
        noise = config.context_noise if is_long else config.step_noise
        agrees = self.factors.observe(float(added / (plain + added)), ratio, noise, config)
        remaining = min(max(ms / float(self.ms(work)), 0.5), 2.0)
        for (rows, costs), n in zip((self._draft, self._verify), work[:2], strict=True):
            if n > 0:
                nearest = np.abs(rows - n).argmin()
                costs[nearest] *= 1 + config.table_gain * (remaining - 1)
                # More rows never cost less.
                np.minimum(costs[:nearest], costs[nearest], out=costs[:nearest])
                np.maximum(costs[nearest:], costs[nearest], out=costs[nearest:])
        return agrees

    def _correct_rates(self, work: StepWork, ratio: float, config: PolicyConfig) -> None:
        """Correct the rates over context by a share of a step's error: those most that make up most
        of the step, as if each were as uncertain as it is large. Short contexts say nothing."""
        if work.context < config.rate_context * work.requests:
            return
        ms = float(self.ms(work)) / self.pace
        amounts = np.array(Rates.amounts(work), dtype=np.float64)
        parts = self._rates * amounts
        weights = parts + config.rate_floor * ms * (amounts > 0)
        weights[0] = ms - parts[1:].sum()  # what does not depend on the context
        shares = weights**2 / (weights**2).sum()
        shares[0] = 0.0
        change = config.rate_gain * (ratio - 1) * ms * shares
        self._rates = np.maximum(self._rates + change / np.maximum(amounts, 1.0), 0.0)

    def as_dict(self) -> dict[str, dict[str, float] | float]:
        """Return the curves, without their far ends, and the rates."""
        points = [zip(*map(np.ndarray.tolist, c), strict=True) for c in (self._draft, self._verify)]
        draft, verify = [{str(n): round(ms, 4) for n, ms in list(curve)[:-1]} for curve in points]
        return {"draft": draft, "verify": verify, **self.rates._asdict()}


class PrefillCosts:
    """Milliseconds of a prompt's rows, fitted to the latest steps that were mostly prompts:

        ms = step + row * rows + context * (positions before each row, of all rows together)

    So they are what further rows in a step cost, not what a step costs that has any."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=_PROMPT_STEPS)
        self._rates: tuple[float, float] | None = None

    def observe(self, plan: Plan, result: StepResult) -> None:
        """Learn from a step if more than half of its rows are of prompts."""
        prompts = [span for span in plan.spans if span.num_context_rows > 1]
        rows = sum([span.num_rows for span in prompts])
        if result.seconds is None or 2 * rows <= result.rows:
            return
        seen = sum([span.num_rows * (span.start + span.num_rows / 2) for span in prompts])
        self._steps.append((result.rows, seen, 1e3 * result.seconds))
        self._rates = None

    @property
    def steps(self) -> list[tuple[float, float, float]]:
        """The steps that count: rows, positions before them, and milliseconds of each."""
        return list(self._steps)

    def reset(self) -> None:
        """Forget all steps, as those of a warm-up, which compile and capture."""
        self._steps.clear()
        self._rates = None

    def ms(self, start: int, end: int) -> float:
        """Return the milliseconds to compute a prompt's positions from `start` to `end`; infinite
        before the first step with a prompt."""
        if not self._steps:
            return math.inf
        if self._rates is None:
            self._rates = self._fit()
        row, context = self._rates
        return row * (end - start) + context * (end - start) * (start + end) / 2

    def _fit(self) -> tuple[float, float]:
        """Return the milliseconds of a row, and of each position before a row. If the steps do not
        separate these from what every step takes, all the time of the larger ones counts for their
        rows."""
        steps = np.array(self._steps)
        rows, _, ms = steps.T
        per_row = np.median((ms / rows)[2 * rows >= rows.max()])
        # After a result that was read late, as while kernels compile, the next seems far too early.
        steps = steps[ms >= _MIN_SHARE * per_row * rows]
        rows, seen, ms = steps.T
        is_large = 2 * rows >= rows.max()
        if not is_large.all():
            terms = np.stack([np.ones(len(ms)), rows, seen], axis=1)
            weights = np.sqrt(rows) / ms  # relative errors, by rows
            _, row, context = _non_negative(terms * weights[:, None], ms * weights)
            if row or context:
                return row, context
        return float(np.median((ms / rows)[is_large])), 0.0


def _non_negative(terms: Floats, results: Floats) -> list[float]:
    """Return the rates, none below 0, for which terms [N, R] @ rates are nearest to the results
    [N], by the sum of the squared errors. R is small, since each choice of the rates above 0 is
    tried."""
    num_rates = terms.shape[1]
    best = np.zeros(num_rates)
    smallest = math.inf
    for chosen in itertools.product((False, True), repeat=num_rates):
        used = np.array(chosen)
        rates = np.zeros(num_rates)
        rates[used] = np.linalg.lstsq(terms[:, used], results, rcond=None)[0]
        error = float(((terms @ rates - results) ** 2).sum())
        if (rates >= 0).all() and error < smallest:
            best = rates
            smallest = error
    return best.tolist()


def _curve(points: Mapping[float, float]) -> Curve:
    """Return rows and milliseconds. Fewer milliseconds for more rows are noise."""
    rows = sorted(map(int, points))
    costs = list(itertools.accumulate([float(points[n]) for n in rows], max))
    slope = (costs[-1] - costs[-2]) / (rows[-1] - rows[-2])
    costs.append(costs[-1] + slope * (_MANY_ROWS - rows[-1]))
    return np.array([*rows, _MANY_ROWS]), np.array(costs)


def _shares(rows: Floats, knots: Floats) -> Floats:
    """Return the weight of each knot in the cost of each step's rows [knots, steps]; 0 for no
    rows."""
    shares = [np.interp(rows, knots, unit) * (rows > 0) for unit in np.eye(len(knots))]
    return np.array(shares).reshape(len(knots), len(rows))


def _bends(rows: Floats) -> Floats:
    """Return the distance of each inner point of a curve from the line between its neighbors, as
    weights of the points [N - 2, N]."""
    points = np.eye(len(rows))
    after = (np.diff(rows)[1:] / (rows[2:] - rows[:-2]))[:, None]
    return points[1:-1] - after * points[:-2] - (1 - after) * points[2:]
