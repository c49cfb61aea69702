"""Spans of like length laid out as rectangles, for backends in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.transfer import upload


@dataclass(frozen=True)
class Group:
    """Spans of like length, laid out as a rectangle of rows.

    members: which spans, as host integers, and `spans` [G] as a tensor. rows [G, Q]: each span's
    rows in the batch, its last one repeated to fill up. flat [T']: where in the flattened rectangle
    the group's true rows lie; None when all do. target [T']: the same rows in the batch.
    """

    members: tuple[int, ...]
    spans: Tensor
    rows: Tensor
    flat: Tensor | None
    target: Tensor


@functools.lru_cache(64)
def groups_of(row_counts: tuple[int, ...], device: torch.device) -> list[Group]:
    """Spans of like length together, so that short ones are not padded to a prefill chunk. Kept
    while the same requests go on decoding."""
    buckets: dict[int, list[int]] = {}
    for i, size in enumerate(row_counts):
        buckets.setdefault(max(size - 1, 15).bit_length(), []).append(i)
    firsts = [0]
    for size in row_counts:
        firsts.append(firsts[-1] + size)
    return [_group(members, row_counts, firsts, device) for members in buckets.values()]


def _group(
    members: Sequence[int], row_counts: Sequence[int], firsts: Sequence[int], device: torch.device
) -> Group:
    longest = max(row_counts[i] for i in members)
    rows: list[list[int]] = []
    flat: list[int] = []
    target: list[int] = []
    for g, i in enumerate(members):
        size, first = row_counts[i], firsts[i]
        rows.append([first + min(j, size - 1) for j in range(longest)])
        flat += range(g * longest, g * longest + size)
        target += range(first, first + size)
    return Group(
        members=tuple(members),
        spans=upload(members, device),
        rows=upload(rows, device),
        flat=None if len(flat) == len(members) * longest else upload(flat, device),
        target=upload(target, device),
    )
