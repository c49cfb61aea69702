"""Targets run by kernels against the same targets in plain torch, over a cache of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import make_target
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

from strobe.kernels.linear import Products
from strobe.models.load import load_target
from strobe.models.registry import load_target_config


class Cache:
    """Keys and values of one sequence from its start, with attention over all of it."""

    def __init__(self, layers: int, rows: int, heads: int, width: int, device: torch.device):
        self.data = torch.zeros(layers, rows, 2, heads, width, device=device)
        self.slots = torch.arange(rows, device=device)

    def kv(self, layer: int) -> Tensor:
        return self.data[layer]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.data[layer, :, 0], self.data[layer, :, 1] = k, v
        return self.over(layer, q)

    def over(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.data[layer].permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys, values, is_causal=True, enable_gqa=True
        )
        return out.transpose(0, 1).flatten(1)


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
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # loading lays them out for a CPU's products
    model.fuse(Products(device, torch.float32))
    y, seen = model(ids, places, fused, (0, 1, 2))
    assert features is not None
    assert seen is not None
    torch.testing.assert_close(seen, features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.data, plain.data, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.head(y), logits, atol=1e-4, rtol=1e-4)
