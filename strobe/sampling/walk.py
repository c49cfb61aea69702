"""The walk through candidates of drafts: draft after draft, each after the one chosen before.

Legend: S spans, K drafts per span, C candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strobe.sampling.noise import gumbel_at
from strobe.sampling.sampler import MIN_TEMPERATURE


class WalkNoise(NamedTuple):
    """The noise that draws drafts like the requests' own tokens: of keys [S] int64, at positions
    [S] int64 of the first draft and the following ones, with temperatures [S] float32."""

    keys: Tensor
    positions: Tensor
    temperatures: Tensor


def walk(edges: Tensor, ids: Tensor, margins: Tensor | None, noise: WalkNoise | None) -> Tensor:
    """edges [S, K, C, C], ids [S, K, C] -> tokens [S, K] int64 of the path: at each slot the best
    candidate after the one chosen before, the first if equal. A NaN counts as -inf.

    noise: score / temperature + noise decides where the temperature is above 0. margins [S, K]
    float32: filled with the chosen candidates' scores minus the largest of the others'."""
    spans, slots, _ = ids.shape
    every = torch.arange(spans, device=ids.device)
    place = torch.zeros_like(every)
    scores = edges.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    chances = None if noise is None else _chances(ids, noise)
    places = list[Tensor]()
    chosen = list[Tensor]()
    for slot in range(slots):
        row = scores[every, slot, place]
        chosen.append(row)
        if noise is not None and chances is not None:
            row = _noisy(row, noise.temperatures[:, None], chances[:, slot])
        place = row.argmax(1)
        places.append(place)
    path = torch.stack(places, 1)[..., None]
    if margins is not None:
        rows = torch.stack(chosen, 1)
        others = rows.scatter(2, path, -torch.inf)
        torch.sub(rows.gather(2, path)[..., 0], others.amax(2), out=margins)
    return ids.gather(2, path)[..., 0]


def _noisy(scores: Tensor, temperatures: Tensor, chances: Tensor) -> Tensor:
    """scores [S, C], temperatures [S, 1], chances [S, C] -> what the race compares [S, C]."""
    relative = scores - scores.amax(1, keepdim=True)
    noisy = relative * temperatures.clamp(min=MIN_TEMPERATURE).reciprocal() + chances
    return torch.where(temperatures > 0, noisy, scores)


def _chances(ids: Tensor, noise: WalkNoise) -> Tensor:
    """Return the noise of candidates ids [S, K, C] at their positions, in the same shape."""
    slots = torch.arange(ids.shape[1], device=ids.device)
    positions = (noise.positions[:, None] + slots).flatten()
    keys = noise.keys[:, None].expand(ids.shape[:2]).flatten()
    return gumbel_at(keys, positions, ids.flatten(0, 1)).view(ids.shape)
