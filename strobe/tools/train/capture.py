"""The target's dense forward over whole sequences, which yields the drafter's input features.

Legend: N sequences, S positions (right-padded), H hidden size, F = captured layers * H, V
vocabulary, Hq / Hkv query and key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.models.target import Target


@dataclass(frozen=True)
class Captured:
    """features [N, S, F]: concatenated residual streams. hidden [N, S, H]: the last layer's."""

    features: Tensor
    hidden: Tensor


class CausalAttention:
    """An `Attend` over N sequences of S rows each, every row seeing itself and earlier rows.

    Rows after a sequence's end are padding: causality hides them from the true rows, and their own
    results are not used.
    """

    def __init__(self, sequences: int, length: int, masks: tuple[LayerMask, ...]):
        self.shape = (sequences, length)
        self.masks = masks

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.to(v.dtype).unflatten(0, self.shape).transpose(1, 2) for x in (q, k, v))
        window = self.masks[layer].window
        mask = None
        if window is not None and window < self.shape[1]:
            index = torch.arange(self.shape[1], device=q.device)
            distance = index[:, None] - index
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])


@torch.no_grad()
def capture(target: Target, ids: Tensor, layers: tuple[int, ...]) -> Captured:
    """Return the residual streams of ids [N, S] after each of `layers` and after the last layer."""
    count, length = ids.shape
    if target.config.states is not None:
        raise ValueError(
            f"{target.config.architecture} has recurrent layers, whose targets no drafter can be "
            "trained for yet; use a target with attention in every layer."
        )
    if target.config.decoder.sinks:
        raise ValueError(
            f"{target.config.architecture} has attention sinks, whose targets no drafter can be "
            "trained for yet; use a target without them."
        )
    positions = torch.arange(length, device=ids.device).repeat(count)
    attend = CausalAttention(count, length, target.config.decoder.masks)
    hidden, features = target(ids.flatten(), positions, attend, layers)
    return Captured(features.unflatten(0, (count, length)), hidden.unflatten(0, (count, length)))


@torch.no_grad()
def target_choices(target: Target, hidden: Tensor, rows: int = 16384) -> Tensor:
    """Return the target's greedy token for each next position, [N, S]. hidden [N, S, H]."""
    parts = [target.head(x).argmax(-1) for x in hidden.flatten(0, 1).split(rows)]
    return torch.cat(parts).view(hidden.shape[:2])
