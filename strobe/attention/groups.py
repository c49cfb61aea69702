"""Spans of similar length, padded to rectangles for backends in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.host.transfer import upload


@dataclass(frozen=True)
class Group:
    """G spans of similar length, padded to Q rows each.

    members: span indices on the host, and `spans` [G] as a tensor. rows [G, Q]: each span's
    rows in the batch, padded with its last row. flat [T']: indices of the rows that are not padding
    in the flattened rectangle; None without padding. target [T']: the same rows in the batch.
    """

    members: tuple[int, ...]
    spans: Tensor
    rows: Tensor
    flat: Tensor | None
    target: Tensor


@functools.lru_cache(64)
def groups_of(row_counts: tuple[int, ...], device: torch.device) -> list[Group]:
    """Group spans by length, so that short ones are not padded to a prefill chunk. Cached, since
    row counts repeat while the same requests decode."""
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
        size = row_counts[i]
        first = firsts[i]
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
