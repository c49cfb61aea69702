"""Rows by what they bring and cost: who drafts, how wide, and how many drafts are verified, so that
a step brings most tokens a second. Imports no torch.

    tokens a second = (requests + sum of the verified drafts' chances) / milliseconds

Chances come of margins (`confidence.py`) of steps that are done: those of each request's newest
blocks stand for its next one. So the host decides who drafts and how many drafts are verified, and
the device, by the step's own margins, which ones.
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

MEMORY = 32.0  # blocks that are remembered of how widths compare
TAKEN_IN = 16, 16  # blocks or steps after which what was observed is taken in
FITTED = 64  # ticks of the clock after which chances are fitted anew
HALVED = 64, 8  # ticks or steps after which what was observed weighs half
LATEST, FIRST = 0.4, 0.05  # what a block weighs among its request's, and a first one among those
TURNS, SELDOM = 0.1, 0.01  # how likely a request turns in a step to be like a new one, at first
TOLD, GAP = 0.02, 0.5  # what a block weighs in that, and the drafts by which requests must differ
FEW = 16  # requests whose next blocks are taken to be like their mean, not like their newest
HELD = 2, 8  # steps for which a choice is held: for few requests, and for more
BETTER = 1.005  # what another width must bring, and
FEWER = 1.01  # fewer drafts, or fewer requests that draft, than all of a width
PROBES = 0.004  # of the time: probes while drafting rests
EVERYONE, OTHERS = 0.004, 0.001  # and else all drafts of all requests, and other widths
SOONEST = 4  # steps from one of these to the next


class Choice(NamedTuple):
    """width: which of the block's widths, -1 for no drafts; most: drafts of a request at most;
    drafts: of all together, None for all; requests: how many draft, None for all."""

    width: int = -1
    most: int = 0
    drafts: int | None = None
    requests: int | None = None


class Option(NamedTuple):
    """A choice, the tokens a millisecond that it promises, and the milliseconds of its step."""

    worth: float
    choice: Choice
    ms: float


class Track:
    """What is known of one width. beyond: by narrower width, what its chances, stretched, are to be
    multiplied by behind its own drafts; age: steps since it was used; seen: its blocks; fitted:
    when its confidence was, by the clock."""

    def __init__(self, width: int, narrower: Sequence[int]):
        self.width, self.confidence = width, Confidence(width)
        self.beyond = dict.fromkeys(narrower, 1.0)
        self.age = self.seen = self.fitted = 0
        self.blocks: list[tuple[Sequence[float], int, int]] = []
        """Margins, drafts verified and drafts accepted, of blocks that are not yet taken in."""

    def whole(self, margins: Sequence[float]) -> list[float]:
        """The block's margins: where less is verified than drafted, only the first may be there."""
        return [*margins, *[margins[-1]] * self.width][: self.width]


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
    """The best choice by what was seen. Until costs are known, and some blocks of the drafter, all
    requests verify as many drafts as they may."""

    def __init__(
        self,
        widths: Sequence[int],
        slots: Sequence[int],
        rows: Callable[[int, int, int], Sequence[tuple[int, int]]],
        most_rows: int,
    ):
        """widths: drafts of the drafter's blocks, ascending; slots: their rows; rows(requests,
        those of them that draft, drafts of each at most) -> the steps there are for them, each by
        drafts of all together and rows; most_rows: of prompts beside requests that decode."""
        self.widths, self.slots, self.rows = tuple(widths), tuple(slots), rows
        self.most_rows = most_rows
        self.costs: Costs | None = None
        self.tracks = [Track(width, widths[:i]) for i, width in enumerate(self.widths)]
        self.clock, self._half = 0, HALVED[0]
        """Ticks for each request in each step, whether it drafts or not."""
        self.choice, self._for, self._left = Choice(), (0, 0), 0
        self._requests: dict[int, Request] = {}
        self._own: dict[int, tuple[Any, int]] = {}
        """By slot three rows of chances [K], the mean of its request's blocks, the mean before the
        newest and the newest, and the step of that one."""
        self._fresh = self.tracks[-1].confidence.chances(np.zeros((1, self.widths[-1])))[0]
        """Those of blocks that are their request's first, or its first after others rested."""
        self._turns = TURNS
        self._steps = self._blocks = self._since = self._context = self._partly = 0
        self._took: dict[tuple[int, int], list[tuple[int, float]]] = {}

    def allot(self, candidates: Sequence[Candidate], load: Load) -> Allotment:
        at = [i for i, one in enumerate(candidates) if one.on_device]
        if not at or self.costs is None or self.tracks[-1].seen < FITTED:
            return super().allot(candidates, load)
        self._context = load.context
        beside = len(candidates) - len(at) + min(load.prompt_rows, self.most_rows)
        order, chances = self._chances_of([candidates[i] for i in at])
        choice = self._held(chances, beside)
        most = [0 if one.on_device else one.most for one in candidates]
        for i in order[: choice.requests]:
            most[at[i]] = min(candidates[at[i]].most, choice.most)
        if choice.drafts is None or choice.drafts >= sum([most[i] for i in at]):
            return Allotment(most)
        weights = self.tracks[choice.width].confidence.weights.tolist()
        return Allotment(most, choice.drafts, tuple([(a, b) for a, b in weights]))

    def _chances_of(self, candidates: Sequence[Candidate]) -> tuple[Any, Any]:
        """The candidates in the order of what their drafts promise; and chances [n, K] of n such
        requests in such an order, by which a choice is made.

        Of few requests these are the means of their blocks. Of many the newest blocks' own, in the
        order of the means before: so they differ as blocks do, and the first ones are no better
        than those that stood first have turned out to be.
        """
        few, size = len(candidates) <= FEW, (len(candidates), self.widths[-1])
        found, since = np.empty((3, *size)), np.empty((size[0], 1))
        for i, one in enumerate(candidates):
            if self._requests.get(one.slot) is not one.request:
                self._requests[one.slot] = one.request
                self._own.pop(one.slot, None)
                self._left = min(self._left, 0 if few else HELD[0])
            found[:, i], when = self._own.get(one.slot, (self._fresh, self._steps))
            since[i] = self._steps - when + few
        if not few:
            found[2] = np.where(since > 0, found[0], found[2])
        # What a new request promises, as far as it may have turned into one like it.
        found += self._turned(since) * (self._fresh - found).clip(0)
        mean, before, newest = found
        order = np.argsort(-mean.sum(1), kind="stable")
        return order, mean[order] if few else newest[np.argsort(-before.sum(1), kind="stable")]

    def _turned(self, since: Any) -> Any:
        """How likely a request is like a new one so many steps after its last block."""
        return 1 - (1 - self._turns) ** since

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
        self._steps += 1
        if made and result.margins is not None:
            track, drafted = self.tracks[width], result.drafted
            for i in made:
                verified = spans[i].drafts if drafted is None else drafted[i]
                track.blocks.append((result.margins[i], verified, result.accepted[i]))
            track.age = 0
            self._look_at(track, [spans[i].slot for i in made])
        self.clock += len(spans)
        self._half = max(HALVED[0], HALVED[1] * len(spans))
        self._blocks, self._since = self._blocks + len(made), self._since + 1
        if self._blocks >= TAKEN_IN[0] or self._since >= TAKEN_IN[1]:
            self._take_in()

    def _look_at(self, track: Track, slots: Sequence[int]) -> None:
        """Take in the chances of single requests at once."""
        margins = [track.whole(row) for row, _, _ in track.blocks[-len(slots) :]]
        chances = track.confidence.chances(np.array(margins))
        widest = self.tracks[-1]
        chances = stretch(chances, widest.width, widest.beyond.get(track.width, 1.0))
        for slot, new in zip(slots, chances, strict=True):
            own, when = self._own.get(slot, ((new, self._fresh), -(10**9)))
            since, gap = self._steps - when, float((self._fresh - own[0]).sum())
            if slot in self._own and gap > GAP:
                turned = min(max(float((new - own[0]).sum()) / gap, 0.0), 1.0) / since
                self._turns = max(self._turns + TOLD * (turned - self._turns), SELDOM)
            self._own[slot] = (own[0] + LATEST * (new - own[0]), own[0], new), self._steps
            self._fresh = self._fresh + FIRST * self._turned(since) * (new - self._fresh)

    def _take_in(self) -> None:
        """Learn from the steps since the last time."""
        self._blocks = self._since = 0
        for (draft, rows), took in self._took.items():
            if self.costs is not None:
                context, ms = np.median(took, 0)
                self.costs.observe(draft, rows, int(context), float(ms), len(took))
        self._took.clear()
        for track in self.tracks:
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
            for narrower, factor in track.beyond.items():
                further = stretch(chances[:, :narrower], track.width)[:, narrower:].sum()
                found = chances[:, narrower:].sum() / max(further, 1e-6)
                track.beyond[narrower] = keep * factor + (1 - keep) * found

    def _held(self, chances: Any, beside: int) -> Choice:
        """The choice for requests of these chances [n, K], the most promising first; made anew
        after some steps and where other requests decode."""
        self._left -= 1
        self._partly += 1
        for track in self.tracks:
            track.age += 1
        count = len(chances)
        if self._for == (count, beside) and self._left > 0:
            return self.choice
        self._for, self._left = (count, beside), HELD[count > FEW]
        assert self.costs is not None
        ms = float(self.costs.ms(0, count + beside, self._context))
        plain = Option(count / ms, Choice(), ms)
        pairs = [self._options(width, chances, beside) for width in range(len(self.widths))]
        options, whole = [best for best, _ in pairs], pairs[-1][1]
        best = max([plain, *options], key=lambda one: one.worth)
        if self.choice.width >= 0 and best.worth < BETTER * options[self.choice.width].worth:
            best = options[self.choice.width]
        self.choice = best.choice
        if best is plain:  # drafting rests: a probe tells whether it pays again
            tried = [(options[0], PROBES, self.tracks[0].age)]
        else:
            others = [one for one in options if one is not best]
            tried = [(one, OTHERS, self.tracks[one.choice.width].age) for one in others]
            if count <= FEW:
                tried.append((whole, EVERYONE, self._partly))
        for one, share, age in tried:
            lost = one.ms * (1 - one.worth / best.worth) / best.ms  # steps like the best one
            if age > max(lost / share, SOONEST):
                self.tracks[one.choice.width].age = self._left = 0
                best = one
                break
        if best.choice == whole.choice:
            self._partly = 0
        return best.choice

    def _options(self, width: int, chances: Any, beside: int) -> tuple[Option, Option]:
        """The best of a width, and all drafts of all requests, which is the best where fewer hardly
        promise more."""
        assert self.costs is not None
        count, most, found, whole = len(chances), self.widths[width], list[Option](), None
        for some in sorted({-(-count * share // 8) for share in (1, 2, 4, 6, 8)}):
            drafts, rows = np.array(self.rows(count, some, most)).T
            reached = np.cumsum(-np.sort(-chances[:some, :most], axis=None))
            ms = self.costs.ms(some * self.slots[width], rows + beside, self._context)
            worth = (count + reached[drafts - 1]) / ms
            last, at = len(worth) - 1, int(worth.argmax())
            if worth[at] <= FEWER * worth[last]:
                at = last
            few = int(drafts[at]) if at < last else None
            choice = Choice(width, most, few, some if some < count else None)
            found.append(Option(float(worth[at]), choice, float(ms[at])))
            whole = Option(float(worth[last]), Choice(width, most), float(ms[last]))
        assert whole is not None
        best = max(found, key=lambda one: one.worth)
        return (best if best.worth > FEWER * found[-1].worth else found[-1]), whole
