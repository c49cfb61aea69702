"""How much of a drafter's work a target accepts, as the pair is and as it might have been meant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import numpy as np

from strobe.engine.build import ResolvedConfig, build
from strobe.engine.engine import Engine
from strobe.models.config import DraftConfig, TargetConfig
from strobe.models.rope import RopeConfig
from strobe.models.target import Target
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.base import Drafts
from strobe.speculation.confidence import Confidence, evidence
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import Plan, Span, StepResult

BASES = (1e4, 1e5, 5e5, 1e6, 1e7)
"""Rope bases that drafters were published with."""


@dataclass(frozen=True)
class Acceptance:
    """steps: verify steps of all answers; made: tokens that they brought; rates[i]: the share of
    steps that accepted draft i. answers: the tokens of each."""

    steps: int
    made: int
    rates: list[float]
    answers: list[list[int]]

    @property
    def per_step(self) -> float:
        """Tokens per verify step, the target's own included."""
        return self.made / self.steps if self.steps else 1.0


def accepted(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> Acceptance:
    """Greedy answers to token ids, drafted and verified."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [engine.add(list(prompt), params) for prompt in prompts]
    while not all(request.finish_reason for request in requests):
        engine.step()
    counts = [request.draft_counts for request in requests]
    steps = sum(count.steps for count in counts)
    width = max((len(count.accepted_per_position) for count in counts), default=0)
    totals = [
        sum(c.accepted_per_position[i] for c in counts if i < len(c.accepted_per_position))
        for i in range(width)
    ]
    return Acceptance(
        steps,
        steps + sum(count.num_accepted for count in counts),
        [total / steps for total in totals] if steps else [],
        [list(request.tokens[request.num_prompt :]) for request in requests],
    )


def matched(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[int]:
    """How many drafts the target's answers would have accepted, had a block begun at each of their
    tokens: one number for each. The engine is one that keeps none and goes on token by token."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = [engine.add(list(prompt), params) for prompt in prompts]
    seen: list[tuple[Request, int, list[int]]] = []
    proposer = engine.proposers.on_device["dflash"]
    propose = proposer.propose

    def noting(spans: Sequence[Span]) -> Drafts:
        drafts = propose(spans)
        assert drafts.tokens is not None
        running = {record.slot: record.request for record in engine.scheduler.running}
        for span, tokens in zip(spans, drafts.tokens.tolist(), strict=False):
            seen.append((running[span.slot], span.start + 1, tokens))
        return drafts

    proposer.propose = noting
    while not all(request.finish_reason for request in requests):
        engine.step()
    return [_leading(tokens, request.tokens[start:]) for request, start, tokens in seen]


def _leading(drafts: Sequence[int], truth: Sequence[int]) -> int:
    pairs = zip(drafts, truth, strict=False)
    return next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(drafts))


def gain(base: Sequence[int], changed: Sequence[int]) -> float:
    """By how many standard errors the mean of `changed` lies above that of `base`, pair by pair."""
    differences = [b - a for a, b in zip(base, changed, strict=True)]
    spread = stdev(differences) if len(differences) > 1 else 0.0
    above = mean(differences)
    if not spread:
        return math.copysign(math.inf, above) if above else 0.0
    return above / (spread / len(differences) ** 0.5)


class Fitting(DraftPolicy):
    """Whole blocks are verified, and their evidence compared with what was right."""

    def __init__(self, places: int):
        self.confidence = Confidence(places)
        self._reached: list[list[tuple[float, bool]]] = [[] for _ in range(places)]

    def observe(self, plan: Plan, result: StepResult) -> None:
        if result.margins is None:
            return
        drafts = np.array([span.num_drafts for span in plan.spans])
        draft_evidence = evidence(np.asarray(result.margins), drafts)
        verified = drafts if result.num_verified is None else np.array(result.num_verified)
        for i, (span, accepted) in enumerate(zip(plan.spans, result.num_accepted, strict=True)):
            if span.method is not None:
                self.confidence.observe(draft_evidence[[i]], verified[[i]], np.array([accepted]))
                for k in range(min(accepted + 1, int(verified[i]))):
                    self._reached[k].append((float(draft_evidence[i, k]), k < accepted))

    def by_place(self) -> list[dict[str, float]]:
        """Of each place that was reached: blocks that did, the share that was right there, slope
        and intercept of the fit, and the quartiles of the evidence with the chances there."""
        self.confidence.fit()
        fits: list[dict[str, float]] = []
        for reached, (slope, intercept) in zip(
            self._reached, self.confidence.weights.tolist(), strict=True
        ):
            if not reached:
                break
            low, high = np.percentile([margin for margin, _ in reached], [25, 75]).tolist()
            chances = [1 / (1 + math.exp(-slope * margin - intercept)) for margin in (low, high)]
            fits.append(
                {
                    "blocks": len(reached),
                    "right": round(mean([float(right) for _, right in reached]), 4),
                    "slope": round(slope, 4),
                    "intercept": round(intercept, 4),
                    "low_evidence": round(low, 2),
                    "high_evidence": round(high, 2),
                    "chance_at_low": round(chances[0], 4),
                    "chance_at_high": round(chances[1], 4),
                }
            )
        return fits


class DraftOnly(DraftPolicy):
    """Drafts are made, and none is verified: every step makes one token, the target's own."""

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        return DraftPlan([candidate.max_drafts for candidate in candidates], num_verified=0)


def engine_of(
    resolved: ResolvedConfig, draft: DraftConfig, target: Target | None, budget: DraftPolicy
) -> Engine:
    """An engine whose drafter is read as `draft` says, and gives its drafts' margins. target:
    weights that are there already. budget: how many drafts are verified."""
    config = resolved.config.with_(adaptive=True)
    resolved = replace(resolved, drafts={"dflash": draft}, config=config)
    return Engine(resolved, components=build(resolved, target), draft_policy=budget)


def variants(
    draft: DraftConfig, target: TargetConfig, masks: dict[int, str]
) -> Iterator[tuple[str, str, DraftConfig]]:
    """What a drafter with these tensors may have been meant to be: (kind, what would be different,
    config). masks: ids that its mask slots may have held, with what speaks for each."""
    for offset in (-1, 1):
        capture = tuple(k + offset for k in draft.capture)
        if min(capture) >= 0 and max(capture) <= target.decoder.num_layers:
            side = "before" if offset < 0 else "behind"
            yield (
                "layer offset",
                f"features of one layer {side} those that config.json names",
                replace(draft, capture=capture),
            )
    yield from _masked(draft)
    yield (
        "anchor layout",
        "a first slot that predicts nothing"
        if draft.anchor_first
        else "a first slot that predicts too",
        replace(draft, anchor_first=not draft.anchor_first),
    )
    for mask, why in masks.items():
        if mask != draft.mask_token_id:
            yield "mask token", f"{mask} ({why})", replace(draft, mask_token_id=mask)
    yield from _ropes(draft, target.decoder.rope)


def _masked(draft: DraftConfig) -> Iterator[tuple[str, str, DraftConfig]]:
    """The other causality, for all layers and, where they differ, for some; and no windows."""
    decoder = draft.decoder
    sliding = [mask.window is not None for mask in decoder.masks]

    def flipped(which: Sequence[bool]) -> DraftConfig:
        masks = tuple(
            replace(mask, causal=not mask.causal) if flip else mask
            for mask, flip in zip(decoder.masks, which, strict=True)
        )
        return replace(draft, decoder=replace(decoder, masks=masks))

    def named(which: Sequence[bool]) -> str:
        causal_values = {
            mask.causal for mask, flip in zip(decoder.masks, which, strict=True) if flip
        }
        if len(causal_values) > 1:
            return "the other causality in every"
        return "bidirectional" if causal_values == {True} else "causal"

    everything = [True] * len(sliding)
    yield "causality", f"{named(everything)} layers", flipped(everything)
    if any(sliding) and not all(sliding):
        full = [not is_sliding for is_sliding in sliding]
        yield "causality", f"{named(sliding)} sliding layers", flipped(sliding)
        yield "causality", f"{named(full)} full layers", flipped(full)
    if any(sliding):
        masks = tuple(replace(mask, window=None) for mask in decoder.masks)
        yield (
            "window",
            "layers without windows",
            replace(draft, decoder=replace(decoder, masks=masks)),
        )


def _ropes(draft: DraftConfig, target: RopeConfig) -> Iterator[tuple[str, str, DraftConfig]]:
    own_rope, decoder = draft.decoder.rope, draft.decoder
    for theta in sorted({*BASES, target.theta} - {own_rope.theta}):
        rope = replace(own_rope, theta=theta)
        yield (
            "rope",
            f"rope with base {theta:g}",
            replace(draft, decoder=replace(decoder, rope=rope)),
        )
    if own_rope.kind != "default":
        rope = RopeConfig(own_rope.theta)
        yield (
            "rope",
            "rope that is not stretched",
            replace(draft, decoder=replace(decoder, rope=rope)),
        )
    if target.kind != "default" and target != own_rope:
        yield "rope", "the target's own rope", replace(draft, decoder=replace(decoder, rope=target))
