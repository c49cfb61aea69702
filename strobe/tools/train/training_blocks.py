"""Training blocks: their anchors, their contents, and the keys that each slot may see.

Legend: N sequences, S positions, A anchors per sequence, B slots per block, K = B - 1 drafts,
L drafter layers, Hq / Hkv query and key-value heads, D head size.

              context (true tokens, as features)      block of anchor p
    position  0 ... p-1                                p      p+1 ... p+K
    holds     features of the tokens                   token  MASK ... MASK
    label     -                                        -      token at p+1 ... p+K
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.attention.mask import LayerMask
from strobe.models.dflash_drafter import DFlash


@dataclass(frozen=True)
class Blocks:
    """anchors [N, A]; ids and positions [N, A, B]; labels and valid [N, A, K].

    valid: the slot's label and all earlier ones of its block are supervised.
    """

    anchors: Tensor
    ids: Tensor
    positions: Tensor
    labels: Tensor
    valid: Tensor

    def slice(self, start: int, stop: int) -> Blocks:
        """Return the blocks of anchors [start, stop) of each sequence."""
        parts = (self.anchors, self.ids, self.positions, self.labels, self.valid)
        return Blocks(*(part[:, start:stop] for part in parts))


def legal_anchors(supervised: Tensor) -> Tensor:
    """Return the positions where a block may start, [N, S]: this token and the next one are
    supervised. supervised [N, S]."""
    return supervised & F.pad(supervised[:, 1:], (0, 1))


def random_anchors(legal: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` distinct anchors per sequence, sorted: (anchors [N, A], live [N, A]).

    If a sequence has fewer legal positions, the rest of its anchors are not live.
    """
    score = torch.rand(legal.shape, generator=generator, device=legal.device)
    score, anchors = score.masked_fill(~legal, -1.0).topk(min(count, legal.shape[1]), dim=1)
    return _sorted(anchors, score >= 0)


def every_anchor(legal: Tensor) -> tuple[Tensor, Tensor]:
    """Return all legal positions, sorted: (anchors [N, A], live [N, A]), A the maximum over the
    sequences."""
    max_anchors = max(1, int(legal.sum(1).max()))
    live, anchors = legal.int().topk(max_anchors, dim=1)
    return _sorted(anchors, live.bool())


def _sorted(anchors: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
    anchors, order = anchors.sort(dim=1)
    return anchors, live.gather(1, order)


def make_blocks(
    ids: Tensor, supervised: Tensor, anchors: Tensor, live: Tensor, *, size: int, mask_token: int
) -> Blocks:
    """Make blocks of `size` slots at the anchors. ids, supervised [N, S]; anchors, live [N, A]."""
    length = ids.shape[1]
    positions = anchors[..., None] + torch.arange(size, device=ids.device)
    inside = positions < length
    clamped = positions.clamp(max=length - 1).flatten(1)
    tokens = ids.gather(1, clamped).view(positions.shape)
    is_known = supervised.gather(1, clamped).view(positions.shape) & inside & live[..., None]
    block = torch.full_like(tokens, mask_token)
    block[..., 0] = tokens[..., 0]
    valid = is_known[..., 1:].int().cumprod(-1).bool()
    return Blocks(
        anchors=anchors, ids=block, positions=positions, labels=tokens[..., 1:], valid=valid
    )


def visible(mask: LayerMask, anchors: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return the attention mask of a group of blocks, [N, 1, A * B, length + A * B].

    A slot at position p in the block of anchor a sees context keys j < a and the slots of its own
    block; in a causal layer only keys j <= p, with a window W only keys with |p - j| < W.
    """
    count, blocks, size = positions.shape
    rows = positions.view(count, -1, 1)
    start = anchors[..., None].expand(-1, -1, size).reshape(count, -1, 1)
    context = torch.arange(length, device=positions.device)
    see_context = context < start
    owner = torch.arange(blocks, device=positions.device).repeat_interleave(size)
    see_block = (owner[:, None] == owner).expand(count, -1, -1)
    columns = rows.transpose(1, 2)
    if mask.causal:
        see_block = see_block & (columns <= rows)
    if mask.window is not None:
        see_context = see_context & (rows - context < mask.window)
        see_block = see_block & ((rows - columns).abs() < mask.window)
    return torch.cat([see_context, see_block], -1)[:, None]


class BlockAttention:
    """An `Attend` for all blocks of N sequences over the drafter's context keys and values.

    keys, values [N, S, L, Hkv, D]. Runs `group` blocks at a time, since attention is computed
    between all slots of a group although each sees only its own block.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        blocks: Blocks,
        masks: tuple[LayerMask, ...],
        group: int = 16,
    ):
        self.keys = keys
        self.values = values
        self.blocks = blocks
        self.masks = masks
        self.group = group
        self._masks: dict[tuple[LayerMask, int], Tensor] = {}

    def _visible(self, layer: int, start: int) -> Tensor:
        mask = self.masks[layer]
        if (mask, start) not in self._masks:
            part = self.blocks.slice(start, start + self.group)
            self._masks[mask, start] = visible(
                mask, part.anchors, part.positions, self.keys.shape[1]
            )
        return self._masks[mask, start]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, blocks, size = self.blocks.positions.shape
        q, k, v = (x.to(v.dtype).view(count, blocks, size, *x.shape[1:]) for x in (q, k, v))
        context_k = self.keys[:, :, layer].to(v.dtype)
        context_v = self.values[:, :, layer]
        repeat = q.shape[3] // k.shape[3]
        outs: list[Tensor] = []
        for start in range(0, blocks, self.group):
            stop = start + self.group
            own_q, own_k, own_v = (x[:, start:stop].flatten(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                own_q.transpose(1, 2),
                _joined(context_k, own_k, repeat),
                _joined(context_v.to(v.dtype), own_v, repeat),
                attn_mask=self._visible(layer, start),
            )
            outs.append(out.transpose(1, 2))
        return torch.cat(outs, 1).reshape(count * blocks * size, -1)


def context_kv(draft: DFlash, features: Tensor) -> tuple[Tensor, Tensor]:
    """features [N, S, F] -> context keys and values [N, S, L, Hkv, D]."""
    count, length, _ = features.shape
    positions = torch.arange(length, device=features.device).repeat(count)
    keys, values = draft.context_kv(features.flatten(0, 1), positions)
    shape = (count, length)
    return keys.unflatten(0, shape), values.unflatten(0, shape)


def draft_hidden(draft: DFlash, keys: Tensor, values: Tensor, blocks: Blocks) -> Tensor:
    """Return the residual stream of the slots that draft, [N, A, K, H]."""
    attend = BlockAttention(keys, values, blocks, draft.config.decoder.masks)
    offsets = (blocks.positions - blocks.anchors[..., None]).flatten()
    ids = blocks.ids.flatten()
    hidden, _ = draft(ids, blocks.positions.flatten(), attend, offsets=offsets)
    return hidden.view(*blocks.ids.shape, -1)[:, :, 1:]


def _joined(context: Tensor, own: Tensor, repeat: int) -> Tensor:
    """Join keys or values [N, S, Hkv, D] of the context and of blocks, for Hq = repeat * Hkv query
    heads -> [N, Hq, S, D]."""
    return torch.cat((context, own), 1).repeat_interleave(repeat, 2).transpose(1, 2)
