"""Scores of which token follows which, as DFlash2's selector and DSpark's Markov head add them.

Both add left . right to a slot's logits: `left` is a vector of the token before and, in DFlash2, of
the slot's own row; `right` is a vector of each token. In training the token before is the true one.

Legend: R slots, C candidates, H hidden size, V vocabulary, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.dflash_drafter import DFlash
from strobe.models.heads.dflash2 import SelectorConfig
from strobe.models.heads.dspark import MarkovConfig
from strobe.tools.train.training_blocks import Blocks

SELECTOR = "candidate_selector."
MARKOV = "markov_head."
CONFIDENCE = "confidence_head.proj."


@dataclass(frozen=True)
class Edges:
    """A drafter's edges. before [V, r]: vectors of tokens that precede; right [V, r]: of tokens
    that follow; projection [r, H]: of the row, None in DSpark. candidates: number of best tokens of
    a slot that edges are added to, None for all. confidence: weight [1, H + r] and bias [1] of the
    confidence head."""

    before: nn.Parameter
    right: nn.Parameter
    projection: nn.Parameter | None
    candidates: int | None
    confidence: tuple[nn.Parameter, nn.Parameter] | None = None

    @property
    def rank(self) -> int:
        """The size of the vectors."""
        return self.right.shape[1]

    def strongest(self, count: int) -> Tensor:
        """Return the components [count] with the largest product of the norms of their columns."""
        strength = self.before.norm(dim=0) * self.right.norm(dim=0)
        if self.projection is not None:
            strength = strength * self.projection.norm(dim=1)
        return strength.topk(count).indices.sort().values

    def left(self, rows: Tensor, previous: Tensor) -> Tensor:
        """Return the left vectors [R, r] of slots with normed rows [R, H] after tokens [R]."""
        vectors = F.embedding(previous, self.before)
        if self.projection is None:
            return vectors
        return vectors * F.linear(rows.to(self.projection.dtype), self.projection)

    def scores(self, logits: Tensor, left: Tensor, ids: Tensor) -> Tensor:
        """Return the scores [R, C] float32 of tokens ids [R, C] with these logits [R, C]."""
        right = F.embedding(ids, self.right)
        return logits.float() + (left[:, None].float() * right.float()).sum(-1)


def edges_of(draft: DFlash) -> Edges | None:
    """Return the edges of the drafter's head; None if its drafts do not depend on each other."""
    tensors = dict(draft.draft_head.named_parameters())
    config = draft.config.head
    if isinstance(config, SelectorConfig):
        return Edges(
            before=tensors[f"{SELECTOR}predecessor_codebook"],
            right=tensors[f"{SELECTOR}successor_codebook"],
            projection=tensors[f"{SELECTOR}hidden_projection.weight"],
            candidates=config.selector_top_k,
        )
    if not isinstance(config, MarkovConfig):
        return None
    confidence = None
    if config.confidence:
        confidence = tensors[f"{CONFIDENCE}weight"], tensors[f"{CONFIDENCE}bias"]
    return Edges(
        before=tensors[f"{MARKOV}markov_w1.weight"],
        right=tensors[f"{MARKOV}markov_w2.weight"],
        projection=None,
        candidates=config.draft_topk,
        confidence=confidence,
    )


@torch.no_grad()
def reset_edges(edges: Edges, generator: torch.Generator) -> None:
    """Give a new head random vectors for what precedes, and none for what follows, so that the
    drafts equal a drafter's without it."""
    rank = edges.before.shape[1]
    edges.before.normal_(0.0, rank**-0.5, generator=generator)
    edges.right.zero_()
    if edges.projection is not None:
        hidden = edges.projection.shape[1]
        edges.projection.normal_(0.0, hidden**-0.5, generator=generator)
    for parameter in edges.confidence or ():
        parameter.zero_()


def previous_tokens(blocks: Blocks) -> Tensor:
    """Return the true token before each slot that drafts, [N, A, K]."""
    return torch.cat([blocks.ids[..., :1], blocks.labels[..., :-1]], -1)


class CandidateLoss(NamedTuple):
    """Per slot [R]: the cross-entropy of the label, the loss, and the best candidate."""

    entropy: Tensor
    loss: Tensor
    best: Tensor


def candidate_loss(
    scores: Tensor, ids: Tensor, teacher: Tensor, shares: Tensor, variation: float
) -> CandidateLoss:
    """Compare the distribution of scores over candidates with a mixture of the target's
    distribution, with a share of [R], and the label: `variation` times their total variation, plus
    1 - `variation` times their cross-entropy.

    scores, ids [R, C + 1]: of the candidates, and then of the label, which may be one of them;
    teacher [R, C + 1]: the target's log-probabilities.
    """
    logprobs, is_label, repeated = candidate_logprobs(scores, ids)
    share = shares[:, None]
    wanted = (share * teacher.exp()).masked_fill(repeated, 0.0) + (1.0 - share) * is_label
    probabilities = logprobs.exp().masked_fill(repeated, 0.0)
    cross = -(wanted * logprobs).sum(-1)
    overlap = torch.minimum(probabilities, wanted).sum(-1)
    return CandidateLoss(
        entropy=-(logprobs * is_label).sum(-1),
        loss=(1.0 - variation) * cross + variation * (1.0 - overlap),
        best=best_candidates(scores, ids),
    )


def candidate_logprobs(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities [R, C + 1] of candidates and then the label, where the label is,
    and where it stands a second time, with log-probability 0. scores, ids [R, C + 1]."""
    is_label = ids == ids[:, -1:]
    repeated = torch.zeros_like(is_label)
    repeated[:, -1] = is_label[:, :-1].any(-1)
    logprobs = scores.masked_fill(repeated, -torch.inf).log_softmax(-1)
    return logprobs.masked_fill(repeated, 0.0), is_label & ~repeated, repeated


def best_candidates(scores: Tensor, ids: Tensor) -> Tensor:
    """Return the candidates [R] with the largest scores. scores, ids [R, C + 1]: of the candidates,
    and then of the label, which does not count."""
    return ids.gather(1, scores[:, :-1].argmax(-1, keepdim=True))[:, 0]


def confidence_loss(
    edges: Edges, rows: Tensor, left: Tensor, correct: Tensor, weights: Tensor
) -> Tensor:
    """Return the weighted mean of the confidence head's cross-entropies, 0 without one; it alone
    gets a gradient. rows [R, H]: normed; left [R, r]; correct, weights [R]."""
    if edges.confidence is None:
        return weights.new_zeros(())
    inputs = torch.cat([rows.float(), left.float()], 1).detach()
    logits = F.linear(inputs, *edges.confidence)[:, 0].float()
    errors = F.binary_cross_entropy_with_logits(logits, correct.float(), reduction="none")
    return (weights * errors).sum() / weights.sum().clamp(min=1e-6)


def choose(draft: DFlash, hidden: Tensor, previous: Tensor, noise: Tensor | None = None) -> Tensor:
    """Return the drafts [R] of slots with a residual stream hidden [R, H] after tokens `previous`
    [R]: the argmax, or with noise [R, V] the winner of the race at temperature 1, whose candidates
    are its leaders."""
    logits = draft.head(hidden).float()
    edges = edges_of(draft)
    if edges is None:
        return (logits if noise is None else logits + noise).argmax(-1)
    left = edges.left(draft.norm(hidden), previous)
    if edges.candidates is None:
        logits += F.linear(left.float(), edges.right.float())
        return (logits if noise is None else logits + noise).argmax(-1)
    race = logits if noise is None else logits + noise
    ids = race.topk(edges.candidates).indices
    scores = edges.scores(logits.gather(1, ids), left, ids)
    if noise is not None:
        scores = scores + noise.gather(1, ids)
    return ids.gather(1, scores.argmax(-1, keepdim=True))[:, 0]
