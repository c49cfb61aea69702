"""The walk through candidates of drafts: draft after draft, each after the one chosen before.

Legend: S spans, K drafts per span, C candidates.
"""

from __future__ import annotations

from itertools import accumulate
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
    scores = edges.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    raced = scores if noise is None else _noisy(scores, _chances(ids, noise), noise.temperatures)
    path = _path(raced.argmax(3))
    chosen = path[:, 1:, None]
    if margins is not None:
        before = path[:, :-1, None, None].expand(-1, -1, -1, ids.shape[2])
        rows = scores.gather(2, before)[:, :, 0]
        others = rows.scatter(2, chosen, -torch.inf)
        torch.sub(rows.gather(2, chosen)[..., 0], others.amax(2), out=margins)
    return ids.gather(2, chosen)[..., 0]


def _path(following: Tensor) -> Tensor:
    """following [S, K, C]: the candidate of each slot after each of the slot before -> the path
    [S, K + 1], which starts at 0."""
    if following.device.type == "cpu":
        paths = [accumulate(span, _follow, initial=0) for span in following.tolist()]
        return torch.tensor([list(path) for path in paths])
    spans, slots, _ = following.shape
    every = torch.arange(spans, device=following.device)
    place = torch.zeros_like(every)
    places = [place]
    for slot in range(slots):
        place = following[every, slot, place]
        places.append(place)
    return torch.stack(places, 1)


def _follow(place: int, following: list[int]) -> int:
    return following[place]


def _noisy(scores: Tensor, chances: Tensor, temperatures: Tensor) -> Tensor:
    """scores [S, K, C, C], chances [S, K, C], temperatures [S] -> what the race compares, in the
    shape of scores."""
    temperatures = temperatures[:, None, None, None]
    relative = scores - scores.amax(3, keepdim=True)
    noisy = relative * temperatures.clamp(min=MIN_TEMPERATURE).reciprocal() + chances[:, :, None]
    return torch.where(temperatures > 0, noisy, scores)


def _chances(ids: Tensor, noise: WalkNoise) -> Tensor:
    """Return the noise of candidates ids [S, K, C] at their positions, in the same shape."""
    slots = torch.arange(ids.shape[1], device=ids.device)
    positions = (noise.positions[:, None] + slots).flatten()
    keys = noise.keys[:, None].expand(ids.shape[:2]).flatten()
    return gumbel_at(keys, positions, ids.flatten(0, 1)).view(ids.shape)
