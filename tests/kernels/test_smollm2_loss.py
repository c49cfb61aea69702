"""The fused loss of SmolLM2's trainer against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from scripts.smollm2 import fused_loss


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("variation", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kernels", [True, False])
def test_loss_and_gradients_equal_plain_torch(
    variation: float,
    rank: int,
    kernels: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(fused_loss, "BLOCK", 128)
    if not kernels:
        monkeypatch.setattr(fused_loss, "on_kernels", lambda x: False)
    generator = torch.Generator().manual_seed(0)
    slots, teachers, hidden, vocabulary, parts = 12, 8, 16, 300, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, head, teacher = normal(slots, hidden), normal(vocabulary, hidden), normal(teachers, hidden)
    left, right = normal(slots, rank), normal(vocabulary, rank)
    inputs = (x, left, right)
    for tensor in inputs:
        tensor.requires_grad_()
    rows = torch.randint(0, teachers // parts, (slots,), generator=generator)
    rows[slots // parts :] += teachers // parts
    labels = torch.randint(0, vocabulary, (slots,), generator=generator)
    rows, labels, factors = rows.to(device), labels.to(device), normal(slots).abs()
    shares = torch.tensor([0.0, 0.4, 1.0] * (slots // 3), device=device)
    result = fused_loss.block_loss(
        x,
        fused_loss.LossInputs(
            head=head,
            teacher_hidden=teacher,
            teacher_rows=rows,
            labels=labels,
            shares=shares,
            variation=variation,
            parts=parts,
            weigh=lambda entropy, part: factors[part] * entropy,
            candidates=5,
        ),
        (left, right),
    )
    (2.0 * result.total).backward()
    gradients = [tensor.grad for tensor in inputs]
    for tensor in inputs:
        tensor.grad = None
    logits = x @ head.t() + left @ right.t()
    of_label = F.cross_entropy(logits, labels, reduction="none")
    logprobs = (teacher @ head.t()).log_softmax(-1)[rows]
    wanted = shares[:, None] * logprobs.exp()
    wanted = wanted + (1 - shares[:, None]) * F.one_hot(labels, vocabulary)
    soft = -(wanted * logits.log_softmax(-1)).sum(-1)
    overlap = torch.minimum(wanted, logits.softmax(-1)).sum(-1)
    weights = factors * of_label.detach()
    expected = (weights * ((1 - variation) * soft + variation * (1 - overlap))).sum()
    (2.0 * expected).backward()
    torch.testing.assert_close(result.entropy, of_label, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.total, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(result.weight, weights.sum(), rtol=1e-4, atol=1e-4)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(gradient, tensor.grad, rtol=1e-3, atol=1e-3)
    assert torch.equal(result.best.long(), logits.argmax(-1))
    assert torch.equal(result.ids[:, :5], logits.topk(5).indices)
    assert torch.equal(result.ids[:, 5], labels)
    torch.testing.assert_close(result.teacher, logprobs.gather(1, result.ids), rtol=1e-3, atol=1e-3)
