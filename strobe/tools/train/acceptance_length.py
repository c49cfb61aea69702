"""Tokens per verify step, measured on the target's own answers.

Greedy speculation commits the target's greedy answer whatever the drafter proposes. So the accepted
lengths follow from one dense pass that drafts at every position of the answer, and a walk over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.tools.train.capture import capture
from strobe.tools.train.data import Batch
from strobe.tools.train.training_blocks import (
    context_kv,
    draft_hidden,
    every_anchor,
    legal_anchors,
    make_blocks,
)


@dataclass
class Acceptance:
    """Verify steps, their committed tokens, and the number of accepted drafts of each slot.

    An answer's first token comes from the prefill and counts for no step; the last step is cut at
    the answer's end.
    """

    drafts: int
    steps: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.drafts

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens committed per verify step, the bonus token included."""
        return self.tokens / max(1, self.steps)

    def per_position(self) -> list[float]:
        """Return the share of steps that accepted the draft at slot 1, 2, ... K."""
        return [count / max(1, self.steps) for count in self.accepted]

    def add(self, acceptance: Acceptance) -> None:
        self.steps += acceptance.steps
        self.tokens += acceptance.tokens
        self.accepted = [a + b for a, b in zip(self.accepted, acceptance.accepted, strict=True)]

    def walk(self, matched: list[int], first: int, last: int) -> None:
        """Count the steps that decode positions first + 1 .. last. matched[p]: number of matching
        drafts in a row after position p."""
        position = first
        while position < last:
            run = min(matched[position], last - position)
            for slot in range(run):
                self.accepted[slot] += 1
            produced = min(run + 1, last - position)
            self.steps += 1
            self.tokens += produced
            position += produced


@torch.no_grad()
def matched_drafts(draft: DFlash, target: Target, batch: Batch, *, at_once: int = 64) -> Tensor:
    """Return the number of matching drafts in a row for a block at each position, [N, S], 0 where
    no block may start. The target runs in its own dtype, as when serving, without autocast."""
    config = draft.config
    with torch.autocast(batch.ids.device.type, enabled=False):
        features = capture(target, batch.ids, config.capture).features
    keys, values = context_kv(draft, features)
    anchors, live = every_anchor(legal_anchors(batch.supervised))
    blocks = make_blocks(
        batch.ids,
        batch.supervised,
        anchors,
        live,
        size=config.block_size,
        mask_token=config.mask_token_id,
    )
    matched = torch.zeros_like(batch.ids)
    for start in range(0, anchors.shape[1], at_once):
        part = blocks.slice(start, start + at_once)
        hidden = draft_hidden(draft, keys, values, part)
        tokens = draft.head(hidden.flatten(0, 2)).argmax(-1).view(part.labels.shape)
        run = ((tokens == part.labels) & part.valid).int().cumprod(-1).sum(-1)
        matched.scatter_add_(1, part.anchors, run * live[:, start : start + at_once])
    return matched


def answer_spans(supervised: list[bool]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of supervised positions."""
    spans: list[tuple[int, int]] = []
    start: int | None = None
    for i, is_supervised in enumerate([*supervised, False]):
        if is_supervised and start is None:
            start = i
        elif not is_supervised and start is not None:
            spans.append((start, i - 1))
            start = None
    return spans


def batch_acceptance(draft: DFlash, target: Target, batch: Batch) -> list[Acceptance]:
    """Return the acceptance of each sequence of a batch."""
    rows = matched_drafts(draft, target, batch).tolist()
    results: list[Acceptance] = []
    for row, supervised in zip(rows, batch.supervised.tolist(), strict=True):
        result = Acceptance(drafts=draft.config.block_size - 1)
        for first, last in answer_spans(supervised):
            result.walk(row, first, last)
        results.append(result)
    return results
