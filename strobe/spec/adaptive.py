"""Rows by what they bring and cost: how wide to draft and how many drafts to verify, so that a step
brings most tokens a second. Imports no torch.

    tokens a second = (requests + sum of the verified drafts' chances) / milliseconds

Chances come of margins (`confidence.py`) of steps that are done. They differ from those of the step
that is planned, but their distribution changes slowly: so the host decides how many drafts are
verified by the newest steps' chances, and the device which ones by the step's own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strobe.request import Request
from strobe.spec.budget import Allotment, Budget, Candidate, Load
from strobe.spec.confidence import Confidence
from strobe.spec.costs import Costs
from strobe.step import Plan, StepResult

POINTS = 4  # of a curve, for each draft of a block
MEMORY = 32.0  # blocks that curves remember
TAKEN_IN = 16, 16  # blocks or steps after which what was observed is taken in
FITTED = 64  # ticks of the clock after which chances are fitted anew
HALVED = 64, 8  # ticks or steps after which what was observed weighs half
FEW = 16  # requests that are looked at one by one
LATEST, FIRST = 0.4, 0.1  # what a block weighs among its request's, and first ones among all
HELD = 8  # steps for which a choice is held while as many requests decode
BETTER = 1.005  # what another width must bring, and
FEWER = 1.01  # fewer drafts than all of a width
PROBES, OTHERS = 0.006, 0.001  # of the time: probes while drafting rests, and of other widths
SOONEST = 16  # steps between two probes


class Choice(NamedTuple):
    """width: which of the block's widths, -1 for no drafts; most: drafts of a request at most;
    drafts: of all together, None for all."""

    width: int = -1
    most: int = 0
    drafts: int | None = None


class Option(NamedTuple):
    """A choice, the tokens a millisecond that it promises, and the milliseconds of its step."""

    worth: float
    choice: Choice
    ms: float


class Track:
    """What is known of one width.

    curve [X]: of x drafts verified per request, how many count. beyond: by narrower width, what
    its chances, stretched, are to be multiplied by behind its own drafts. age: steps since it was
    used; seen: its blocks; fitted: when its confidence was, by the clock.
    """

    def __init__(self, width: int, xs: Any):
        self.width, self.confidence, self.xs = width, Confidence(width), xs
        self.curve = self.curve_of(self.confidence.chances(np.zeros((1, width))))
        self.beyond: dict[int, float] = {}
        self.age = self.seen = self.fitted = 0
        self.blocks: list[tuple[Sequence[float], int, int]] = []
        """Margins, drafts verified and drafts accepted, of blocks that are not yet taken in."""

    def whole(self, margins: Sequence[float]) -> list[float]:
        """The block's margins: where less is verified than drafted, only the first may be there."""
        return [*margins, *[margins[-1]] * self.width][: self.width]

    def curve_of(self, chances: Any) -> Any:
        """chances [n, K] -> [X]: the most likely ones of all n requests are verified."""
        n = len(chances)
        reached = np.concatenate(([0.0], np.cumsum(-np.sort(-chances, axis=None))))
        return np.interp(self.xs * n, np.arange(len(reached)), reached) / n

    def gain(self, requests: int, drafts: Any, few: Any = None) -> Any:
        """How many of so many drafts count, all requests together. few [requests, K]: the chances
        of each, where they are known."""
        curve = self.curve if few is None else self.curve_of(few[:, : self.width])
        return requests * np.interp(np.asarray(drafts) / requests, self.xs, curve)


def stretch(chances: Any, width: int, factor: float = 1.0) -> Any:
    """chances [n, K] -> [n, width]: further drafts go on being right as the last one was, and their
    chances are multiplied by a factor."""
    most = chances.shape[1]
    if width <= most:
        return chances[:, :width]
    last = chances[:, -1:]
    rate = last / np.maximum(chances[:, -2:-1], 1e-6) if most > 1 else last
    more = last * rate ** np.arange(1, width - most + 1) * factor
    return np.concatenate((chances, np.minimum(more, last)), 1)


class AdaptiveBudget(Budget):
    """The best choice by what was seen, for all requests together. Until costs are known, and some
    blocks of the drafter, every request verifies as many drafts as it may."""

    def __init__(
        self,
        widths: Sequence[int],
        slots: Sequence[int],
        rows: Callable[[int, int], Sequence[tuple[int, int]]],
        most_rows: int,
    ):
        """widths: drafts of the drafter's blocks, ascending; slots: their rows; rows(requests,
        drafts of each at most) -> the steps there are for them, each by drafts of all together and
        rows; most_rows: of prompts beside requests that decode."""
        self.widths, self.slots, self.rows = tuple(widths), tuple(slots), rows
        self.most_rows = most_rows
        self.costs: Costs | None = None
        xs = np.linspace(0.0, self.widths[-1], POINTS * self.widths[-1] + 1)
        self.tracks = [Track(width, xs) for width in self.widths]
        for track in self.tracks:
            track.beyond = {width: 1.0 for width in self.widths if width < track.width}
        self.clock, self._half = 0, HALVED[0]
        """Ticks for each request in each step, whether it drafts or not."""
        self.choice, self._for, self._left = Choice(), (0, 0), 0
        self._requests: dict[int, Request] = {}
        self._own: dict[int, Any] = {}
        """By slot, the chances [K] of its request's newest blocks, where there are few requests."""
        self._fresh = self.tracks[-1].confidence.chances(np.zeros((1, self.widths[-1])))[0]
        """Those of requests' first blocks."""
        self._blocks = self._steps = self._context = 0
        self._took: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def allot(self, candidates: Sequence[Candidate], load: Load) -> Allotment:
        count = sum([one.on_device for one in candidates])
        if not count or self.costs is None or self.tracks[-1].seen < FITTED:
            return super().allot(candidates, load)
        beside = len(candidates) - count + min(load.prompt_rows, self.most_rows)
        self._context = load.context
        few = None
        if count <= FEW:
            asked = [one for one in candidates if one.on_device]
            few = np.array([self._chances_of(one) for one in asked])
        choice = self._held(count, beside, few)
        most = [min(one.most, choice.most) if one.on_device else one.most for one in candidates]
        made = sum([n for n, one in zip(most, candidates, strict=True) if one.on_device])
        if choice.drafts is None or choice.drafts >= made:
            return Allotment(most)
        weights = self.tracks[choice.width].confidence.weights.tolist()
        return Allotment(most, choice.drafts, tuple([(a, b) for a, b in weights]))

    def _chances_of(self, one: Candidate) -> Any:
        """A request's chances: those of first blocks, until it has one of its own."""
        if self._requests.get(one.slot) is not one.request:
            self._requests[one.slot] = one.request
            self._own.pop(one.slot, None)
            self._left = 0
        return self._own.get(one.slot, self._fresh)

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        found = [(t.width, t.confidence.weights.tolist()) for t in self.tracks]
        return tuple([(n, k, a, b) for n, rows in found for k, (a, b) in enumerate(rows)])

    def observe(self, plan: Plan, result: StepResult) -> None:
        spans = plan.spans
        made = [i for i, span in enumerate(spans) if span.method is not None]
        width = bisect_left(self.widths, max([spans[i].drafts for i in made])) if made else -1
        if result.seconds is not None and all(s.logits and s.num_certain == 1 for s in spans):
            draft = len(made) * self.slots[width] if made else 0
            context = sum([span.start for span in spans])
            took = self._took.setdefault((draft, result.rows), [])
            took.append((context, 1e3 * result.seconds))
        if made and result.margins is not None:
            track, drafted = self.tracks[width], result.drafted
            for i in made:
                verified = spans[i].drafts if drafted is None else drafted[i]
                track.blocks.append((result.margins[i], verified, result.accepted[i]))
            track.age = 0
            self._blocks += len(made)
            if len(made) <= FEW:
                self._look_at(track, [(spans[i].slot, result.margins[i]) for i in made])
        self.clock += len(spans)
        self._half = max(HALVED[0], HALVED[1] * len(spans))
        self._steps += 1
        if self._blocks >= TAKEN_IN[0] or self._steps >= TAKEN_IN[1]:
            self._take_in()

    def _look_at(self, track: Track, blocks: Sequence[tuple[int, Sequence[float]]]) -> None:
        """Take in the chances of single requests at once."""
        chances = track.confidence.chances(np.array([track.whole(row) for _, row in blocks]))
        widest = self.tracks[-1]
        chances = stretch(chances, widest.width, widest.beyond.get(track.width, 1.0))
        for (slot, _), new in zip(blocks, chances, strict=True):
            if slot in self._own:
                self._own[slot] = (1 - LATEST) * self._own[slot] + LATEST * new
            else:
                self._own[slot] = new
                self._fresh = (1 - FIRST) * self._fresh + FIRST * new

    def _take_in(self) -> None:
        """Learn from the steps since the last time."""
        self._blocks = self._steps = 0
        for (draft, rows), took in self._took.items():
            if self.costs is not None:
                context, ms = np.median(took, 0)
                self.costs.observe(draft, rows, int(context), float(ms), len(took))
        self._took.clear()
        for width, track in enumerate(self.tracks):
            if not track.blocks:
                continue
            given, verified, accepted = zip(*track.blocks, strict=True)
            verified, accepted = np.array(verified), np.array(accepted)
            margins = np.array([track.whole(row) for row in given])
            track.blocks.clear()
            track.seen += len(margins)
            track.confidence.observe(margins, verified, accepted, self.clock)
            if self.clock - track.fitted >= FITTED:
                track.fitted = self.clock
                track.confidence.fit(self.clock, self._half)
            chances, keep = track.confidence.chances(margins), np.exp(-len(margins) / MEMORY)
            for other in self.tracks[:width]:
                further = stretch(chances[:, : other.width], track.width)[:, other.width :].sum()
                found = chances[:, other.width :].sum() / max(further, 1e-6)
                track.beyond[other.width] = keep * track.beyond[other.width] + (1 - keep) * found
            for other in self.tracks:
                # A wider block's first drafts stand for a narrower one's; a narrower one's last
                # ones for what would follow in a wider one, as it was when that was seen last.
                part = stretch(chances, other.width, other.beyond.get(track.width, 1.0))
                other.curve = keep * other.curve + (1 - keep) * other.curve_of(part)

    def _held(self, count: int, beside: int, few: Any) -> Choice:
        """The choice, made anew after some steps and where other requests decode."""
        self._left -= 1
        for track in self.tracks:
            track.age += 1
        if self._for == (count, beside) and self._left > 0:
            return self.choice
        self._for, self._left = (count, beside), HELD if few is None else 2
        assert self.costs is not None
        ms = float(self.costs.ms(0, count + beside, self._context))
        plain = Option(count / ms, Choice(), ms)
        every = [self._options(track, count, beside, few) for track in self.tracks]
        options = [_best(found) for found in every]
        best = max([plain, *options], key=lambda one: one.worth)
        if self.choice.width >= 0 and best.worth < BETTER * options[self.choice.width].worth:
            best = options[self.choice.width]
        self.choice = best.choice
        if best is plain:  # drafting rests: a draft of each request tells whether it pays again
            tried = next(
                (one for one in every[0] if (one.choice.drafts or 0) >= count), every[0][-1]
            )
            others, share = [tried], PROBES
        else:
            others, share = [one for one in options if one is not best], OTHERS
        for one in others:
            track = self.tracks[one.choice.width]
            lost = one.ms * (1 - one.worth / best.worth) / best.ms  # steps like the best one
            if track.age > max(lost / share, SOONEST):
                track.age = self._left = 0
                return one.choice
        return best.choice

    def _options(self, track: Track, count: int, beside: int, few: Any) -> list[Option]:
        """By the number of drafts, all of the width's at the end."""
        assert self.costs is not None
        width = self.widths.index(track.width)
        drafts, rows = np.array(self.rows(count, track.width)).T
        ms = self.costs.ms(count * self.slots[width], rows + beside, self._context)
        worth = (count + track.gain(count, drafts, few)) / ms
        found = zip(worth.tolist(), drafts.tolist(), ms.tolist(), strict=True)
        made = [Option(w, Choice(width, track.width, n), t) for w, n, t in found]
        whole = made[-1]._replace(choice=Choice(width, track.width))
        return [*made[:-1], whole]


def _best(options: Sequence[Option]) -> Option:
    """All drafts of a width, but where fewer promise more."""
    found = max(options, key=lambda one: one.worth)
    return found if found.worth > FEWER * options[-1].worth else options[-1]
