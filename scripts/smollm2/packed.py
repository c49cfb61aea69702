"""Several answers packed in each row, and the drafter's attention over all their blocks at once.

Legend: N rows, S positions of a row, A anchors of a row, B slots of a block, K = B - 1 drafts,
H hidden size, Hq / Hkv query and key-value heads, D head size. Answers are numbered in their row;
0 is padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)

from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.tools.train.training_blocks import Blocks, make_blocks, random_anchors

OPEN_ROWS = 64
"""Rows that an answer may still be added to while packing."""


@dataclass(frozen=True)
class PackedRows:
    """ids, positions, numbers [N, S] int64; supervised, sampled [N, S] bool. A token's position
    counts from the start of its own sequence. sampled: its answer is not greedy."""

    ids: Tensor
    positions: Tensor
    numbers: Tensor
    supervised: Tensor
    sampled: Tensor


def pack(
    sequences: Sequence[tuple[list[int], int, bool]], length: int, seed: int
) -> dict[str, NDArray[Any]]:
    """Pack sequences of (ids, prompt length, sampled) in rows of `length`, each in the fullest row
    where it fits; return the arrays of `PackedRows` with small types."""
    order = list(range(len(sequences)))
    random.Random(seed).shuffle(order)
    done: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # tokens, indices
    for i in order:
        size = len(sequences[i][0])
        fitting = [j for j, (used, _) in enumerate(rows) if used + size <= length]
        if fitting:
            j = max(fitting, key=lambda j: rows[j][0])
            rows[j] = rows[j][0] + size, [*rows[j][1], i]
        else:
            if len(rows) == OPEN_ROWS:
                fullest = max(range(OPEN_ROWS), key=lambda j: rows[j][0])
                done.append(rows.pop(fullest)[1])
            rows.append((size, [i]))
    done += [indices for _, indices in rows]
    shape = (len(done), length)
    ids, positions = np.zeros(shape, np.uint16), np.zeros(shape, np.int16)
    numbers = np.zeros(shape, np.uint8)
    supervised, sampled = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for row, indices in enumerate(done):
        start = 0
        for number, i in enumerate(indices, start=1):
            tokens, prompt, is_sampled = sequences[i]
            end = start + len(tokens)
            ids[row, start:end], numbers[row, start:end] = tokens, number
            positions[row, start:end] = np.arange(len(tokens))
            supervised[row, start + prompt : end], sampled[row, start:end] = True, is_sampled
            start = end
    return {
        "ids": ids,
        "positions": positions,
        "numbers": numbers,
        "supervised": supervised,
        "sampled": sampled,
    }


class Rows:
    """All packed rows on the device, drawn in another order in each epoch."""

    def __init__(self, arrays: dict[str, NDArray[Any]], device: torch.device):
        kinds = {"ids": np.int32, "positions": np.int16, "numbers": np.uint8}
        self._tensors = {
            name: torch.from_numpy(array.astype(kinds.get(name, array.dtype))).to(device)
            for name, array in arrays.items()
        }
        self.count = len(arrays["ids"])

    def batch(self, step: int, size: int, seed: int) -> PackedRows:
        """Return the rows of a step."""
        per_epoch = max(1, self.count // size)
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(self.count, generator=generator)
        rows = order[place * size : (place + 1) * size].to(self._tensors["ids"].device)
        names = "ids", "positions", "numbers", "supervised", "sampled"
        ids, positions, numbers, supervised, sampled = (self._tensors[n][rows] for n in names)
        return PackedRows(ids.long(), positions.long(), numbers.long(), supervised, sampled)


@torch.no_grad()
def target_rows(
    target: Target, rows: PackedRows, capture: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return the features [N, S, n * H] and the last residual stream [N, S, H] of packed rows."""
    count, length = rows.ids.shape
    place = torch.arange(length, device=rows.ids.device)
    same = rows.numbers[:, :, None] == rows.numbers[:, None]
    visible = (same & (place[:, None] >= place))[:, None]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return out.transpose(1, 2).reshape(count * length, -1)

    hidden, features = target(rows.ids.flatten(), rows.positions.flatten(), attend, capture)
    shape = (count, length)
    return features.unflatten(0, shape), hidden.unflatten(0, shape)


@dataclass(frozen=True)
class PackedBlocks:
    """blocks: `anchors` are columns of the row. positions [N, A, B] count within the sequence.
    mask: of the blocks' attention."""

    blocks: Blocks
    positions: Tensor
    mask: BlockMask


def draw_blocks(
    rows: PackedRows,
    count: int,
    *,
    size: int,
    mask_token: int,
    generator: torch.Generator,
    make_mask: Callable[..., BlockMask] = create_block_mask,
) -> PackedBlocks:
    """Draw `count` anchors per row, fewer if a row has fewer places, and make their blocks."""
    numbers, supervised, length = rows.numbers, rows.supervised, rows.ids.shape[1]
    same_next = F.pad(numbers[:, 1:] == numbers[:, :-1], (0, 1))
    legal = supervised & same_next & F.pad(supervised[:, 1:], (0, 1))
    anchors, live = random_anchors(legal, count, generator)
    blocks = make_blocks(rows.ids, supervised, anchors, live, size=size, mask_token=mask_token)
    offsets = torch.arange(size, device=anchors.device)
    columns = (anchors[..., None] + offsets).clamp(max=length - 1)
    own = numbers.gather(1, anchors)
    inside = numbers.gather(1, columns.flatten(1)).view(columns.shape) == own[..., None]
    valid = (blocks.valid & inside[..., 1:]).int().cumprod(-1).bool()
    blocks = Blocks(anchors, blocks.ids, blocks.positions, blocks.labels, valid)
    positions = rows.positions.gather(1, anchors)[..., None] + offsets

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // size
        column = key.clamp(max=length - 1)
        context = (numbers[row, column] == own[row, block]) & (key < anchors[row, block])
        return torch.where(key < length, context, (key - length) // size == block)

    queries = anchors.shape[1] * size
    mask = make_mask(
        visible, len(anchors), None, queries, length + queries, device=str(anchors.device)
    )
    return PackedBlocks(blocks, positions, mask)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask) -> Tensor:
    """Return what `flex_attention` returns, which has no gradients on a CPU."""
    shape = q.shape[0], 1, q.shape[2], k.shape[2]
    mask = create_mask(block_mask.mask_mod, *shape, device=str(q.device))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def block_hidden(
    draft: DFlash,
    features: Tensor,
    context_positions: Tensor,
    ids: Tensor,
    positions: Tensor,
    mask: BlockMask,
    attention: Callable[..., Tensor] = flex_attention,
) -> Tensor:
    """Return the residual stream of the drafting slots, [N, A, K, H]. ids, positions [N, A, B];
    features [N, S, n * H]; context_positions [N, S]."""
    count, length = context_positions.shape
    keys, values = draft.context_kv(features.flatten(0, 1), context_positions.flatten())
    keys, values = (x.unflatten(0, (count, length)) for x in (keys, values))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.to(v.dtype).unflatten(0, (count, -1)) for x in (q, k, v))
        k = torch.cat([keys[:, :, layer].to(v.dtype), k], 1).transpose(1, 2)
        v = torch.cat([values[:, :, layer].to(v.dtype), v], 1).transpose(1, 2)
        q = q.transpose(1, 2).contiguous()
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        out = attention(q, k, v, block_mask=mask)
        return out.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])

    offsets = torch.arange(ids.shape[2], device=ids.device).repeat(ids.shape[0] * ids.shape[1])
    hidden, _ = draft(ids.flatten(), positions.flatten(), attend, offsets=offsets)
    return hidden.view(*ids.shape, -1)[:, :, 1:]
