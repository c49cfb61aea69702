"""Loss and metrics of a block.

Legend: R blocks (rows), K drafts per block, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strobe.tools.train.edges import Edges, best_candidates, candidate_logprobs
from strobe.tools.train.train_settings import Objective

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}


def default_gamma(block_size: int) -> float:
    """Return the DFlash paper's decay constant (arXiv 2602.06036); for other block sizes, one in
    proportion."""
    return _GAMMA.get(block_size, max(1.0, 0.45 * block_size))


def decay_weights(drafts: int, gamma: float, device: torch.device | None = None) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for k = 1 .. K (arXiv 2602.06036, section 4)."""
    return torch.exp(-torch.arange(drafts, dtype=torch.float32, device=device) / gamma)


def dpace_weights(cross_entropy: Tensor, valid: Tensor, alpha: float) -> Tensor:
    """Return D-PACE weights (arXiv 2605.18810): each position's share in the accepted length.

    q_k = exp(-CE_k), s_k = (1 - alpha) q_k + alpha, P_k = prod_{j<=k} s_j,
    w_k = sum_{j>=k} P_j, over the valid slots only and without a gradient. [R, K] -> [R, K].
    """
    smooth = (1.0 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    prefix = (smooth * valid).cumprod(-1)
    return prefix.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True)
class Slots:
    """Per slot [R, K]: cross_entropy, kl (zeros unless used), and correct (bool). unary: the same
    of the logits that choose the candidates, if a head chooses among some."""

    cross_entropy: Tensor
    kl: Tensor
    correct: Tensor
    unary: Slots | None = None

    @staticmethod
    def join(parts: Sequence[Slots], shape: torch.Size) -> Slots:
        """Return flat parts as one of this shape."""
        unary = [part.unary for part in parts if part.unary is not None]
        return Slots(
            cross_entropy=torch.cat([part.cross_entropy for part in parts]).view(shape),
            kl=torch.cat([part.kl for part in parts]).view(shape),
            correct=torch.cat([part.correct for part in parts]).view(shape),
            unary=Slots.join(unary, shape) if unary else None,
        )


def _measure(
    head: Callable[[Tensor], Tensor],
    x: Tensor,
    labels: Tensor,
    teacher: Tensor | None,
    edges: Edges | None,
    left: Tensor | None,
) -> Slots:
    """Measure flat slots: x [N, H], labels [N], teacher logits [N, V] or None. left [N, r]: of the
    edges."""
    logits = head(x).float()
    if edges is None or left is None:
        return _compare(logits, labels, teacher)
    if edges.candidates is None:
        return _compare(logits + F.linear(left.float(), edges.right.float()), labels, teacher)
    ids = torch.cat([logits.topk(edges.candidates).indices, labels[:, None]], 1)
    scores = edges.scores(logits.gather(1, ids), left, ids)
    logprobs, is_label, repeated = candidate_logprobs(scores, ids)
    kl = torch.zeros_like(logprobs[:, 0])
    if teacher is not None:
        wanted = teacher.float().log_softmax(-1).gather(1, ids)
        kl = (wanted.exp() * (wanted - logprobs)).masked_fill(repeated, 0.0).sum(-1)
    return Slots(
        cross_entropy=-(logprobs * is_label).sum(-1),
        kl=kl,
        correct=best_candidates(scores, ids) == labels,
        unary=_compare(logits, labels, teacher),
    )


def _compare(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Slots:
    """Measure the distribution of logits [N, V]."""
    ce = F.cross_entropy(logits, labels, reduction="none")
    kl = torch.zeros_like(ce)
    if teacher is not None:
        target_logprobs, draft_logprobs = (F.log_softmax(x.float(), -1) for x in (teacher, logits))
        kl = F.kl_div(draft_logprobs, target_logprobs, reduction="none", log_target=True).sum(-1)
    return Slots(cross_entropy=ce, kl=kl, correct=logits.argmax(-1) == labels)


def measure_slots(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    teacher: Tensor | None = None,
    *,
    rows: int | None = None,
    edges: Edges | None = None,
    left: Tensor | None = None,
) -> Slots:
    """Measure slots: hidden [R, K, H], labels [R, K], teacher logits [R, K, V] or None; with the
    left vectors [R * K, r] of a head's edges, if it has some.

    The logits are the largest tensor. With `rows` the head processes this many slots at a time, and
    runs again in the backward pass instead of keeping its logits.
    """
    x = hidden.flatten(0, 1)
    flat = labels.flatten()
    probs = None if teacher is None else teacher.flatten(0, 1)
    if rows is None or rows >= x.shape[0]:
        parts = [_measure(head, x, labels=flat, teacher=probs, edges=edges, left=left)]
    else:
        parts = [
            checkpoint(
                _measure,
                head,
                x=x[i : i + rows],
                labels=flat[i : i + rows],
                teacher=None if probs is None else probs[i : i + rows],
                edges=edges,
                left=None if left is None else left[i : i + rows],
                use_reentrant=False,
            )
            for i in range(0, x.shape[0], rows)
        ]
    return Slots.join(parts, labels.shape)


def block_loss(slots: Slots, valid: Tensor, objective: Objective) -> Tensor:
    """Return the weighted mean over valid slots of cross entropy + kl * KL; 0 without any. The
    logits that choose candidates have a share in it."""
    loss = _mean_loss(slots, valid, objective)
    if slots.unary is None:
        return loss
    return torch.lerp(loss, _mean_loss(slots.unary, valid, objective), objective.unary_share)


def _mean_loss(slots: Slots, valid: Tensor, objective: Objective) -> Tensor:
    drafts = valid.shape[-1]
    if objective.weighting == "dpace":
        weights = dpace_weights(slots.cross_entropy, valid, objective.alpha)
    else:
        gamma = objective.gamma or default_gamma(drafts + 1)
        weights = decay_weights(drafts, gamma, valid.device)
    weights = weights * valid
    value = slots.cross_entropy
    if objective.kl:
        value = value + objective.kl * slots.kl
    return (weights * value).sum() / weights.sum().clamp(min=1e-6)


@dataclass(frozen=True)
class Accuracy:
    """Per position of the block [K]: the number of labels and of correct predictions."""

    correct: Tensor
    count: Tensor

    @staticmethod
    def of(slots: Slots, valid: Tensor) -> Accuracy:
        return Accuracy((slots.correct & valid).sum(0), valid.sum(0))

    def __add__(self, other: Accuracy) -> Accuracy:
        return Accuracy(self.correct + other.correct, self.count + other.count)

    def per_position(self) -> list[float]:
        return [float(x) for x in self.correct / self.count.clamp(min=1)]

    def expected_length(self) -> float:
        """Return 1 + EAL with EAL = sum_k prod_{j<=k} acc_j: the expected tokens per verify step if
        slots were independent."""
        return 1.0 + float((self.correct / self.count.clamp(min=1)).cumprod(0).sum())
