"""Models run by kernels against the same models in plain torch, over a cache of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_draft, make_target
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from strobe.kernels.linear import Products
from strobe.models.load import load_draft, load_target
from strobe.models.registry import load_draft_config, load_target_config


class Cache:
    """Keys and values of one sequence from its start, with attention over all of it."""

    def __init__(self, layers: int, rows: int, heads: int, width: int, device: torch.device):
        self.data = torch.zeros(layers, rows, 2, heads, width, device=device)
        self.slots = torch.arange(rows, device=device)

    def kv(self, layer: int) -> Tensor:
        return self.data[layer]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.data[layer, :, 0], self.data[layer, :, 1] = k, v
        return self.over(layer, q, sinks)

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        keys, values = self.data[layer].repeat_interleave(q.shape[1] // 2, 2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / total, values).flatten(1)


def contiguous(model: torch.nn.Module) -> None:
    """Loading lays parameters out for a CPU's products."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


@pytest.mark.parametrize("family", [Qwen3ForCausalLM, LlamaForCausalLM])
def test_kernels_compute_what_the_layers_say(tmp_path: Path, device: torch.device, family: Any):
    """With and without norms of queries and keys."""
    make_target(tmp_path, family, head_dim=64, num_hidden_layers=2, hidden_size=64)
    config = load_target_config(tmp_path)
    model = load_target(tmp_path, config, max_positions=16, dtype=torch.float32, device=device)
    ids = torch.tensor([3, 1, 4, 1, 5], device=device)
    places = torch.arange(5, device=device)
    plain, fused = (Cache(2, 5, 2, 64, device) for _ in range(2))
    x, features = model(ids, places, plain, (0, 1, 2))
    logits = model.head(x)
    contiguous(model)
    model.fuse(Products(device, torch.float32))
    y, seen = model(ids, places, fused, (0, 1, 2))
    assert features is not None
    assert seen is not None
    torch.testing.assert_close(seen, features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.data, plain.data, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(y), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sinks", [False, True])
def test_kernels_compute_what_a_drafters_layers_say(
    tmp_path: Path, device: torch.device, sinks: bool
):
    place: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": device}
    make_target(tmp_path / "target", head_dim=64)
    target = load_target(tmp_path / "target", load_target_config(tmp_path / "target"), **place)
    path = make_draft(tmp_path / "draft", width=64, sinks=sinks)
    contiguous(target)
    model = load_draft(path, load_draft_config(path), target, **place)
    ids, places = (torch.tensor(x, device=device) for x in ([3, 1, 4, 1, 5], [4, 5, 6, 7, 8]))
    plain, fused = (Cache(2, 5, 2, 64, device) for _ in range(2))
    x, _ = model(ids, places, plain)
    contiguous(model)
    model.fuse(Products(device, torch.float32))
    y, _ = model(ids, places, fused)
    torch.testing.assert_close(y, x, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.data, plain.data, atol=1e-4, rtol=1e-4)
