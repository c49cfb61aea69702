"""Cross-entropy and total variation between the drafter's distribution and a mixture of the label
and the target's distribution, and their gradient, in parts, so that the logits of a step are never
in memory at once.

Legend: R slots, T teacher rows, H hidden size, V vocabulary, C candidates, r rank of edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from strobe.kernels import candidates
from strobe.kernels.rowwise import INTERPRETED

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


def normalizers(logits: Tensor) -> Tensor:
    """Return the logsumexp of each row [R] float32."""
    if not on_kernels(logits):
        return logits.float().logsumexp(-1)
    lse = torch.empty(len(logits), device=logits.device)
    _lse_kernel[(len(logits),)](logits, lse, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return lse


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
    lse = normalizers(teacher)
    entropy, loss = (torch.empty(count, device=logits.device) for _ in range(2))
    best = torch.empty(count, dtype=torch.int32, device=logits.device)
    _loss_kernel[(count,)](
        logits, teacher, lse, teacher_rows, labels, shares, entropy, loss, best, variation, size,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    return entropy, loss, best


def _torch_loss(
    logits: Tensor,
    teacher: Tensor,
    teacher_rows: Tensor,
    labels: Tensor,
    shares: Tensor,
    variation: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `mixed_loss` does, in plain torch, for CPUs."""
    with torch.enable_grad():
        x = logits.float().requires_grad_()
        share = shares[:, None]
        wanted = (teacher.float().softmax(-1)[teacher_rows] * share).scatter_add(
            1, labels[:, None], 1.0 - share
        )
        logprobs = x.log_softmax(-1)
        cross = -(wanted * logprobs).sum(-1)
        overlap = torch.minimum(wanted, logprobs.exp()).sum(-1)
        loss = (1.0 - variation) * cross + variation * (1.0 - overlap)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
    entropy = -logprobs.detach().gather(1, labels[:, None])[:, 0]
    best = x.detach().argmax(-1).int()
    logits.copy_(gradient)
    return entropy, loss.detach(), best


def best_of(logits: Tensor, count: int) -> Tensor:
    """Return the ids of each row's largest logits, [R, count]."""
    if logits.is_cuda:
        return candidates.best_of(logits, count)[1]
    return logits.topk(count).indices


class BlockLoss(NamedTuple):
    """total: sum of weights times losses, which has gradients; weight: sum of weights; entropy [R]:
    cross-entropy of the label; best [R]: likeliest tokens; ids [R, C + 1]: the candidates and then
    the label; teacher [R, C + 1]: the target's log-probabilities of them, 0 without candidates."""

    total: Tensor
    weight: Tensor
    entropy: Tensor
    best: Tensor
    ids: Tensor
    teacher: Tensor


@dataclass(frozen=True)
class LossInputs:
    """head [V, H]; teacher_hidden [T, H]: the target's normed residual stream; teacher_rows [R]:
    the row of each slot; labels [R]; shares [R], variation: see `mixed_loss`. Part i of `parts`
    equal ones of the slots uses only part i of the teacher's rows. weigh(entropy, part): weights of
    a part's slots by their cross-entropies. candidates: number of likeliest tokens to return."""

    head: Tensor
    teacher_hidden: Tensor
    teacher_rows: Tensor
    labels: Tensor
    shares: Tensor
    variation: float
    parts: int
    weigh: Callable[[Tensor, slice], Tensor]
    candidates: int = 0


class _BlockLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, left: Tensor, right: Tensor, inputs: LossInputs
    ) -> tuple[Tensor, ...]:
        head = torch.cat([inputs.head, right.to(inputs.head.dtype)], 1)
        rows = torch.cat([x, left.to(x.dtype)], 1)
        gradient = torch.empty_like(rows)
        of_right = torch.zeros(right.shape, dtype=torch.float32, device=right.device)
        results: list[tuple[Tensor, ...]] = []
        step = len(x) // inputs.parts
        teacher_step = len(inputs.teacher_hidden) // inputs.parts
        for i in range(inputs.parts):
            own = slice(i * step, (i + 1) * step)
            teacher_rows = inputs.teacher_hidden[i * teacher_step : (i + 1) * teacher_step]
            of_teacher = inputs.teacher_rows[own] - i * teacher_step
            labels = inputs.labels[own]
            logits = rows[own] @ head.t()
            teacher = teacher_rows @ inputs.head.t()
            ids = labels[:, None]
            known = torch.zeros_like(ids, dtype=torch.float32)
            if inputs.candidates:
                ids = torch.cat([best_of(logits, inputs.candidates), ids], 1)
                known = teacher[of_teacher[:, None], ids].float()
                known -= normalizers(teacher)[of_teacher][:, None]
            loss = mixed_loss if on_kernels(logits) else _torch_loss
            entropy, losses, best = loss(
                logits, teacher, of_teacher, labels, inputs.shares[own], inputs.variation
            )
            weights = inputs.weigh(entropy, own)
            results.append((weights * losses, weights, entropy, best, ids, known))
            torch.mm(logits, head, out=gradient[own])
            gradient[own] *= weights[:, None].to(gradient.dtype)
            if right.shape[1]:
                weighted = rows[own, x.shape[1] :] * weights[:, None].to(rows.dtype)
                of_right += logits.t() @ weighted
        ctx.save_for_backward(gradient, of_right)
        ctx.size = x.shape[1]
        losses, weights, *others = (torch.cat(column) for column in zip(*results, strict=True))
        result = (losses.sum(), weights.sum(), *others)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient, of_right = ctx.saved_tensors
        of_total = gradients[0]
        of_x, of_left = (gradient * of_total.to(gradient.dtype)).split(
            [ctx.size, gradient.shape[1] - ctx.size], 1
        )
        return of_x, of_left, of_right * of_total, None


def on_kernels(x: Tensor) -> bool:
    """Whether the Triton kernels can run: on a GPU, or in their interpreter."""
    return x.is_cuda or bool(INTERPRETED.value)


def block_loss(
    x: Tensor, inputs: LossInputs, edges: tuple[Tensor, Tensor] | None = None
) -> BlockLoss:
    """Return the loss of slots with normed rows x [R, H]. edges: (left [R, r], right [V, r]), whose
    products are added to the logits."""
    left, right = edges or (x.new_empty(len(x), 0), x.new_empty(len(inputs.head), 0))
    return BlockLoss(*_BlockLoss.apply(x, left, right, inputs))
