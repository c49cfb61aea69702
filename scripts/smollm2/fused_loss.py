"""Cross-entropy and total variation between the drafter's distribution and a mixture of the label
and the target's distribution, and their gradient, in parts, so that the logits of a step are never
in memory at once.

Legend: R slots, T teacher rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Vocabulary entries that a program reads at once."""


@triton.jit
def _lse_kernel(logits, lse, size: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cells = tl.arange(0, BLOCK)
    peak, total = float("-inf"), 0.0
    for start in range(0, size, BLOCK):
        inside = start + cells < size
        x = tl.load(logits + row * size + start + cells, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(x - new), 0)
        peak = new
    tl.store(lse + row, peak + tl.log(total))


@triton.jit
def _distributions(of_logits, of_teacher, at, size, lse, normalizer, share, label):
    """Return the drafter's distribution and the mixture at the tokens `at`, 0 beyond `size`."""
    x = tl.load(of_logits + at, mask=at < size, other=float("-inf")).to(tl.float32)
    t = tl.load(of_teacher + at, mask=at < size, other=float("-inf")).to(tl.float32)
    p = share * tl.exp(t - normalizer) + tl.where(at == label, 1.0 - share, 0.0)
    return tl.exp(x - lse), p


@triton.jit
def _loss_kernel(
    logits, teacher, teacher_lse, teacher_rows, labels, shares, entropy, loss, best,
    variation, size: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(shares + row)
    source = tl.load(teacher_rows + row)
    label = tl.load(labels + row)
    normalizer = tl.load(teacher_lse + source)
    of_logits, of_teacher = logits + row * size, teacher + source * size
    cells = tl.arange(0, BLOCK)
    peak, total, cross, top = float("-inf"), 0.0, 0.0, 0
    for start in range(0, size, BLOCK):
        inside = start + cells < size
        x = tl.load(of_logits + start + cells, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(of_teacher + start + cells, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(t - normalizer)
        cross += tl.sum(p * tl.where(inside, x, 0.0), 0)
        here = tl.max(x, 0)
        top = tl.where(here > peak, start + tl.argmax(x, 0), top)
        new = tl.maximum(peak, here)
        total = total * tl.exp(peak - new) + tl.sum(tl.exp(x - new), 0)
        peak = new
    lse = peak + tl.log(total)
    of_label = tl.load(of_logits + label).to(tl.float32)
    tl.store(entropy + row, lse - of_label)
    tl.store(best + row, top)
    overlap, below = 0.0, 0.0  # sum of min(p, q), and the drafter's mass where it is below p
    for start in range(0, size, BLOCK):
        at = start + cells
        q, p = _distributions(of_logits, of_teacher, at, size, lse, normalizer, share, label)
        overlap += tl.sum(tl.minimum(p, q), 0)
        below += tl.sum(tl.where(q < p, q, 0.0), 0)
    soft = lse - share * cross - (1.0 - share) * of_label
    tl.store(loss + row, (1.0 - variation) * soft + variation * (1.0 - overlap))
    for start in range(0, size, BLOCK):
        at = start + cells
        q, p = _distributions(of_logits, of_teacher, at, size, lse, normalizer, share, label)
        gradient = (1.0 - variation) * (q - p)
        gradient += variation * q * (below - tl.where(q < p, 1.0, 0.0))
        tl.store(of_logits + at, gradient.to(logits.dtype.element_ty), mask=at < size)


def mixed_loss(
    logits: Tensor,
    teacher: Tensor,
    teacher_rows: Tensor,
    labels: Tensor,
    shares: Tensor,
    variation: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return per slot [R] the cross-entropy of the label, the loss, and the drafter's best token.

    The loss compares the drafter's distribution q with the mixture p, which has a share of the
    teacher's distribution and the rest on the label: `variation` times their total variation, plus
    1 - `variation` times the cross-entropy. Overwrites logits [R, V] with its gradient. teacher
    [T, V]: logits; teacher_rows, labels, shares [R].
    """
    count, size = logits.shape
    lse = torch.empty(len(teacher), device=logits.device)
    _lse_kernel[(len(teacher),)](teacher, lse, size, BLOCK=BLOCK, num_warps=8)
    entropy, loss = (torch.empty(count, device=logits.device) for _ in range(2))
    best = torch.empty(count, dtype=torch.int32, device=logits.device)
    _loss_kernel[(count,)](
        logits, teacher, lse, teacher_rows, labels, shares, entropy, loss, best, variation, size,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return entropy, loss, best


class _MixedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_rows: Tensor,
        labels: Tensor,
        shares: Tensor,
        variation: float,
        parts: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(x)
        results: list[tuple[Tensor, Tensor, Tensor]] = []
        step, teacher_step = len(x) // parts, len(teacher_hidden) // parts
        for i in range(parts):
            own = slice(i * step, (i + 1) * step)
            logits = x[own] @ head.t()
            teacher = teacher_hidden[i * teacher_step : (i + 1) * teacher_step] @ head.t()
            results.append(
                mixed_loss(
                    logits,
                    teacher,
                    teacher_rows[own] - i * teacher_step,
                    labels[own],
                    shares[own],
                    variation,
                )
            )
            torch.mm(logits, head, out=gradient[own])
        ctx.save_for_backward(gradient)
        entropy, loss, best = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.mark_non_differentiable(entropy, best)
        return entropy, loss, best

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        of_loss = gradients[1][:, None].to(gradient.dtype)
        return gradient * of_loss, None, None, None, None, None, None, None


def slot_losses(
    x: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    teacher_rows: Tensor,
    labels: Tensor,
    shares: Tensor,
    *,
    variation: float,
    parts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `mixed_loss` returns, with a gradient of the loss with respect to x [R, H].

    head [V, H]; teacher_hidden [T, H]: the target's normed residual stream. Part i of `parts` equal
    ones of the slots uses only part i of the teacher's rows.
    """
    return _MixedLoss.apply(x, head, teacher_hidden, teacher_rows, labels, shares, variation, parts)
