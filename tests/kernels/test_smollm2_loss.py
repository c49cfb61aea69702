"""The fused loss of SmolLM2's trainer against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from scripts.smollm2 import fused_loss


@pytest.mark.parametrize("variation", [0.0, 0.7, 1.0])
def test_loss_and_gradient_equal_plain_torch(
    variation: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_loss, "BLOCK", 128)
    generator = torch.Generator().manual_seed(0)
    slots, teachers, hidden, vocabulary, parts = 12, 8, 16, 300, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, head, teacher = normal(slots, hidden), normal(vocabulary, hidden), normal(teachers, hidden)
    x.requires_grad_()
    rows = torch.randint(0, teachers // parts, (slots,), generator=generator)
    rows[slots // parts :] += teachers // parts
    labels = torch.randint(0, vocabulary, (slots,), generator=generator)
    rows, labels, weights = rows.to(device), labels.to(device), normal(slots)
    shares = torch.tensor([0.0, 0.4, 1.0] * (slots // 3), device=device)
    entropy, loss, best = fused_loss.slot_losses(
        x, head, teacher, rows, labels, shares, variation=variation, parts=parts
    )
    (weights * loss).sum().backward()
    gradient = x.grad
    assert gradient is not None
    x.grad = None
    logits = x @ head.t()
    of_label = F.cross_entropy(logits, labels, reduction="none")
    probabilities = (teacher @ head.t()).softmax(-1)[rows]
    wanted = shares[:, None] * probabilities
    wanted = wanted + (1 - shares[:, None]) * F.one_hot(labels, vocabulary)
    soft = -(wanted * logits.log_softmax(-1)).sum(-1)
    overlap = torch.minimum(wanted, logits.softmax(-1)).sum(-1)
    expected = (1 - variation) * soft + variation * (1 - overlap)
    (weights * expected).sum().backward()
    torch.testing.assert_close(entropy, of_label, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, x.grad, rtol=1e-3, atol=1e-4)
    assert torch.equal(best.long(), logits.argmax(-1))
