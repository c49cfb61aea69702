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
    in the flattened rectangle; None without padding. target [T']: the same rows in the batch. run:
    these rows as a slice, if they follow one another without padding.
    """

    members: tuple[int, ...]
    spans: Tensor
    rows: Tensor
    flat: Tensor | None
    target: Tensor
    run: slice | None


@functools.lru_cache(64)
def groups_of(
    row_counts: tuple[int, ...], device: torch.device, max_spans: int | None = None
) -> list[Group]:
    """Group spans by length, so that short ones are not padded to a prefill chunk. Cached, since
    row counts repeat while the same requests decode. max_spans: of a group."""
    buckets: dict[int, list[int]] = {}
    for i, size in enumerate(row_counts):
        buckets.setdefault(max(size - 1, 15).bit_length(), []).append(i)
    firsts = [0]
    for size in row_counts:
        firsts.append(firsts[-1] + size)
    groups = list[Group]()
    for members in buckets.values():
        step = max_spans or len(members)
        for first in range(0, len(members), step):
            groups.append(_group(members[first : first + step], row_counts, firsts, device))
    return groups


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
    padded = len(flat) < len(members) * longest
    consecutive = target == list(range(target[0], target[0] + len(target)))
    return Group(
        members=tuple(members),
        spans=upload(members, device),
        rows=upload(rows, device),
        flat=upload(flat, device) if padded else None,
        target=upload(target, device),
        run=slice(target[0], target[-1] + 1) if consecutive and not padded else None,
    )
