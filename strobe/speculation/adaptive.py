"""Rows by what they bring and cost: who drafts, how wide, and how many drafts are verified, so that
a step brings most tokens a second. Imports no torch.

    tokens a second = (requests + sum of the verified drafts' chances) / milliseconds

Chances come of margins (`confidence.py`) of steps that are done: those of a request's blocks tell
what its next one promises (`outlook.py`). So the host decides who drafts and how many drafts are
verified, and the device, by the step's own margins, which ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from strobe.speculation.confidence import Confidence, evidence
from strobe.speculation.costs import Costs, Work
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.speculation.lookup import Lookup
from strobe.speculation.outlook import FEW, Outlook
from strobe.step import Plan, StepResult

TAKEN_IN = 16, 32  # blocks or steps after which what was observed is taken in
FITTED = 64, 16  # ticks of the clock and steps after which chances are fitted anew
HALVED = 512, 32  # ticks or steps after which what was observed weighs half
LIFTED = 16  # times as fast as that, chances follow what was observed, all places alike
HELD = 2, 8  # steps for which a choice is held: of few that draft, and of more or none
BETTER = 1.04  # what another width must bring, and
FEWER = 1.01  # fewer drafts, or fewer requests that draft, than all of a width
PROBES = 0.004  # of the time: probes while drafting rests
EVERYONE, OTHERS = 0.004, 0.001  # and else all drafts of all requests, and other widths
NEXT = 8  # rows over which the cost of one more is taken
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
    """What is known of one width. age: steps since it was used; seen: its blocks; fitted: when its
    confidence was, by clock and steps."""

    def __init__(self, width: int):
        self.width, self.confidence = width, Confidence(width)
        self.age, self.seen, self.fitted = 0, 0, (-FITTED[0], -FITTED[1])
        self.blocks: list[tuple[Any, Any, Any]] = []
        """Evidence [n, K], drafts verified and accepted [n] of steps that are not yet taken in."""

    def whole(self, found: Any) -> Any:
        """Evidence of whole blocks [n, K]: where less is verified than drafted, only the first may
        be there."""
        more = [found[:, -1:]] * max(self.width - found.shape[1], 0)
        return np.concatenate((found[:, : self.width], *more), 1)


def stretch(chances: Any, width: int) -> Any:
    """chances [n, K] -> [n, width]: further drafts go on being right as the last one was."""
    most = chances.shape[1]
    if width <= most:
        return chances[:, :width]
    last = chances[:, -1:]
    rate = last / np.maximum(chances[:, -2:-1], 1e-6) if most > 1 else last
    return np.concatenate((chances, last * rate ** np.arange(1, width - most + 1)), 1)


class AdaptiveDraftPolicy(DraftPolicy):
    """The best choice by what was seen. Until costs are known, and some blocks of the drafter, all
    requests verify as many drafts as they may."""

    def __init__(
        self,
        widths: Sequence[int],
        slots: Sequence[int],
        rows: Callable[[int, int, int], Sequence[tuple[int, int]]],
        most_rows: int,
        requests: int,
    ):
        """widths: drafts of the drafter's blocks, ascending; slots: their rows; rows(requests,
        those of them that draft, drafts of each at most) -> the steps there are for them, each by
        drafts of all together and rows; most_rows: of prompts beside requests that decode;
        requests: the most at once."""
        self.widths, self.slots, self.rows = tuple(widths), tuple(slots), rows
        self.most_rows = most_rows
        self.costs: Costs | None = None
        self.tracks = [Track(width) for width in self.widths]
        self.clock, self._half = 0, HALVED[0]
        """Ticks for each request in each step, whether it drafts or not."""
        self.choice, self._for, self._left = Choice(), (0, 0), 0
        first = self.tracks[-1].confidence.chances(np.zeros((1, self.widths[-1])))[0]
        self.outlook, self.lookup = Outlook(requests, first), Lookup(self.widths[-1])
        self._matches: dict[int, int] = {}
        """By slot, how many tokens its newest chain was found by."""
        self._rate: dict[int, float] = {}  # tokens a millisecond with so many requests, the newest
        self._blocks = self._since = self._partly = 0
        self._known: dict[tuple[int, int], tuple[list[tuple[int, Any]], Any, Any, Any]] = {}
        self._took: dict[tuple[int, int, int], list[tuple[int, float]]] = {}

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        matches = {one.slot: one.chain.match_length for one in candidates if one.chain.tokens}
        self._matches.update(matches)
        if self.costs is None:
            return super().plan(candidates, load)
        most = self._of_chains(candidates, load) if matches else [0] * len(candidates)
        chained = [n > 0 for n in most]
        at = [i for i, one in enumerate(candidates) if one.on_device and not chained[i]]
        if sum([track.seen for track in self.tracks]) < FITTED[0]:  # the drafter is to be known
            self.outlook.meet([candidates[i] for i in at])
            most = [
                c.max_drafts if c.on_device else n for c, n in zip(candidates, most, strict=True)
            ]
            chained = [n > 0 and not one.on_device for one, n in zip(candidates, most, strict=True)]
            return DraftPlan(most, use_chain=chained if matches else None)
        if not at:
            return DraftPlan(most, use_chain=chained if matches else None)
        beside = sum(most) + len(candidates) - len(at) + min(load.prompt_rows, self.most_rows)
        plain = Work(0, len(at), len(candidates), load.context_tokens, beside)
        asked = [candidates[i] for i in at]
        if self.outlook.meet(asked):
            self._left = min(self._left, HELD[0] * (len(asked) > FEW))
        self._left -= 1
        self._partly += 1
        for track in self.tracks:
            track.age += 1
        choice, who = self.choice, range(len(at))
        anew = self._left <= 0 or self._for != (len(at), beside)
        if anew or choice.requests is not None:
            slots, limits = np.array([(one.slot, one.max_drafts) for one in asked]).T
            who, chances = self.outlook.of(slots, limits)
            choice = self._choose(chances, plain) if anew else choice
        made = 0
        for i in who[: choice.requests]:
            most[at[i]] = min(candidates[at[i]].max_drafts, choice.most)
            made += most[at[i]]
        if choice.drafts is None or choice.drafts >= made:
            return DraftPlan(most, use_chain=chained if matches else None)
        width = bisect_left(self.widths, max([most[i] for i in at]))
        weights = self.tracks[width].confidence.weights.tolist()
        return DraftPlan(most, choice.drafts, tuple([(a, b) for a, b in weights]), chained)

    def _of_chains(self, candidates: Sequence[Candidate], load: BatchLoad) -> list[int]:
        """How many drafts of its chain each candidate verifies: those that promise more than a row
        costs, where they promise more together than what the device would make."""
        assert self.costs is not None
        count = len(candidates)
        work = Work(0, np.array([count, count + NEXT]), count, load.context_tokens)
        now, more = self.costs.ms(work)
        price = max(self._rate.get(count, 0.0), count / now) * (more - now) / NEXT
        if self.outlook.meet([one for one in candidates if one.on_device]):
            self._left = 0
        found: list[int] = []
        for one in candidates:
            chances = self.lookup.chances(one.chain, self.outlook.steps)
            other = self.outlook.promise(one.slot) if one.on_device else 0.0
            found.append(int((chances > price).sum()) if chances.sum() > other else 0)
        return found

    @property
    def confidence_by_place(self) -> tuple[tuple[int, int, float, float], ...]:
        found = [(t.width, t.confidence.weights.tolist()) for t in self.tracks]
        return tuple([(n, k, a, b) for n, rows in found for k, (a, b) in enumerate(rows)])

    def observe(self, plan: Plan, result: StepResult) -> None:
        spans = plan.spans
        made = [i for i, span in enumerate(spans) if span.method is not None]
        width = bisect_left(self.widths, max([spans[i].num_drafts for i in made])) if made else -1
        decoding = all(s.num_logits and s.num_context_rows == 1 for s in spans)
        if result.seconds is not None and decoding:
            draft = len(made) * self.slots[width] if made else 0
            context = sum([span.start for span in spans])
            took = self._took.setdefault((draft, result.rows, len(spans)), [])
            took.append((context, 1e3 * result.seconds))
        self.outlook.steps += 1
        drafted = result.num_verified or [span.num_drafts for span in spans]
        for span, verified, accepted in zip(spans, drafted, result.num_accepted, strict=False):
            if span.method is None and verified and span.slot in self._matches:
                given = self._matches[span.slot], verified, accepted
                self.lookup.observe(*given, self.outlook.steps)
        if made and result.margins is not None:
            track, drafts = self.tracks[width], np.array([spans[i].num_drafts for i in made])
            found = track.whole(evidence(np.asarray(result.margins)[made], drafts))
            counts = np.array(drafted)[made], np.array(result.num_accepted)[made]
            track.blocks.append((found, *counts))
            track.age = 0
            chances = stretch(track.confidence.chances(found), self.widths[-1])
            self.outlook.take(np.array([spans[i].slot for i in made]), chances)
        self.clock += len(spans)
        self._half = max(HALVED[0], HALVED[1] * len(spans))
        self._blocks, self._since = self._blocks + len(made), self._since + 1
        if self._blocks >= TAKEN_IN[0] or self._since >= TAKEN_IN[1]:
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the steps since the last time."""
        self._blocks = self._since = 0
        for step, took in self._took.items():
            if self.costs is not None:
                context, ms = np.median(took, 0)
                self.costs.observe(Work(*step, int(context)), float(ms), len(took))
        self._took.clear()
        for track in self.tracks:
            if not track.blocks:
                continue
            parts = zip(*track.blocks, strict=True)
            found, verified, accepted = [np.concatenate(part) for part in parts]
            track.blocks.clear()
            track.seen += len(found)
            track.confidence.observe(found, verified, accepted, self.clock)
            clock, step = track.fitted
            if self.clock >= clock + FITTED[0] and self.outlook.steps >= step + FITTED[1]:
                track.fitted = self.clock, self.outlook.steps
                track.confidence.fit(self.clock, self._half)
            track.confidence.lift(self.clock, self._half / LIFTED)

    def _choose(self, chances: Any, work: Work) -> Choice:
        """The choice for requests of these chances [n, K], the most promising first, for the steps
        to come. work: a step without drafts."""
        count = len(chances)
        self._for = count, work.beside
        assert self.costs is not None
        ms = float(self.costs.ms(work))
        plain = Option(work.requests / ms, Choice(), ms)
        options, whole = self._options(chances, work)
        best = max([plain, *options], key=lambda one: one.worth)
        if self.choice.width >= 0 and best.worth < BETTER * options[self.choice.width].worth:
            best = options[self.choice.width]
        self.choice, self._rate = best.choice, {work.requests: best.worth}
        self._left = HELD[count > FEW or best is plain]
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

    def _options(self, chances: Any, work: Work) -> tuple[list[Option], Option]:
        """The best of each width, and all drafts of all requests of the widest; where fewer hardly
        promise more than these, they are the best."""
        assert self.costs is not None
        count, best = len(chances), list[Option]()
        for width, most in enumerate(self.widths):
            found = list[Option]()
            parts, draft, rows, ends = self._steps(count, width)
            every = self.costs.ms(work._replace(draft=draft, rows=rows))
            for (some, drafts), ms in zip(parts, np.split(every, ends), strict=True):
                likeliest = -np.sort(-chances[:some, :most], axis=None)
                worth = (work.requests + np.cumsum(likeliest)[drafts - 1]) / ms
                at = int(worth.argmax())
                at = at if worth[at] > FEWER * worth[-1] else len(drafts) - 1
                fewer = int(drafts[at]) if at < len(drafts) - 1 else None
                choice = Choice(width, most, fewer, some if some < count else None)
                found.append(Option(float(worth[at]), choice, float(ms[at])))
                whole = Option(float(worth[-1]), Choice(width, most), float(ms[-1]))
            one = max(found, key=lambda one: one.worth)
            best.append(one if one.worth > FEWER * found[-1].worth else found[-1])
        return best, whole  # pyright: ignore[reportPossiblyUnboundVariable]

    def _steps(self, count: int, width: int) -> tuple[list[tuple[int, Any]], Any, Any, Any]:
        """What there is for so many requests: some that draft, at the end all of them, each with
        numbers of their drafts; of all these one behind the other the drafter's rows and all rows;
        and where each but the last ends."""
        if (count, width) not in self._known:
            shares, most = {-(-count * share // 8) for share in (1, 2, 4, 6, 8)}, self.widths[width]
            found = [(some, np.array(self.rows(count, some, most)).T) for some in sorted(shares)]
            draft = [np.full(steps.shape[1], some * self.slots[width]) for some, steps in found]
            rows = np.concatenate([steps[1] for _, steps in found])
            ends = np.cumsum([len(one) for one in draft])[:-1]
            parts = [(some, steps[0]) for some, steps in found]
            self._known[count, width] = parts, np.concatenate(draft), rows, ends
        return self._known[count, width]
