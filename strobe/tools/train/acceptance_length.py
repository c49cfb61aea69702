"""Tokens per verify step, measured on the target's own answers.

Speculation commits the target's own answer whatever the drafter proposes. So the accepted lengths
follow from one dense pass that drafts at every position of the answer, and a walk over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.tools.train.capture import capture
from strobe.tools.train.data import Batch
from strobe.tools.train.edges import choose, previous_tokens
from strobe.tools.train.training_blocks import (
    Blocks,
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
def matched_drafts(
    draft: DFlash,
    target: Target,
    batch: Batch,
    *,
    at_once: int = 64,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the number of matching drafts in a row for a block at each position, [N, S], 0 where
    no block may start. The target runs in its own dtype, as when serving, without autocast.

    Each draft is chosen after the true tokens before it, which are the drafts themselves as long as
    all match. generator: the answers are the target's at temperature 1, and drafts are drawn with
    the noise with which it drew them.
    """
    config = draft.config
    device = batch.ids.device
    with torch.autocast(device.type, enabled=False):
        captured = capture(target, batch.ids, config.capture)
    keys, values = context_kv(draft, captured.features)
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
        hidden = draft_hidden(draft, keys, values, part).flatten(0, 2)
        noise = None
        if generator is not None:
            with torch.autocast(device.type, enabled=False):
                logits = target_logits(target, captured.hidden, part)
            noise = noise_of_choices(logits, part.labels.flatten(), generator)
        tokens = choose(draft, hidden, previous_tokens(part).flatten(), noise)
        tokens = tokens.view(part.labels.shape)
        run = ((tokens == part.labels) & part.valid).int().cumprod(-1).sum(-1)
        matched.scatter_add_(1, part.anchors, run * live[:, start : start + at_once])
    return matched


def target_logits(target: Target, hidden: Tensor, blocks: Blocks) -> Tensor:
    """Return the target's logits for each drafting slot, [N * A * K, V] float32. hidden [N, S, H]:
    its last residual stream."""
    rows = (blocks.positions[..., 1:] - 1).clamp(max=hidden.shape[1] - 1).flatten(1)
    index = rows[..., None].expand(-1, -1, hidden.shape[-1])
    return target.head(hidden.gather(1, index).flatten(0, 1)).float()


def noise_of_choices(logits: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Draw Gumbel noise [R, V] with which tokens [R] win the race logits + noise, distributed as if
    it had been drawn first. logits [R, V].

    The largest sum has the location logsumexp(logits); the others are below it.
    """
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    gumbel = -(-uniform.clamp(1e-20, 1.0 - 1e-7).log()).log()
    chosen = tokens[:, None]
    best = logits.logsumexp(-1, keepdim=True) + gumbel.gather(1, chosen)
    sums = -torch.logaddexp(-best, -(logits + gumbel))
    return sums.scatter(1, chosen, best) - logits


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


def batch_acceptance(
    draft: DFlash, target: Target, batch: Batch, generator: torch.Generator | None = None
) -> list[Acceptance]:
    """Return the acceptance of each sequence of a batch. generator: see `matched_drafts`."""
    rows = matched_drafts(draft, target, batch, generator=generator).tolist()
    results: list[Acceptance] = []
    for row, supervised in zip(rows, batch.supervised.tolist(), strict=True):
        result = Acceptance(drafts=draft.config.block_size - 1)
        for first, last in answer_spans(supervised):
            result.walk(row, first, last)
        results.append(result)
    return results
