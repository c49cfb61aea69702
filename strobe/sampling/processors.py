"""Logits processors over per-slot tables: bias, penalties, bans and grammar masks, applied to each
row by its slot's settings and history.

They run in this order, which is vLLM's except that vLLM masks first; masks commute with the others
unless no token is left:

    bias        logit_bias (OpenAI), and -inf outside allowed_token_ids
    penalties   repetition (Keskar et al., arXiv 1909.05858) over prompt and answer, then OpenAI's
                logit - count * frequency - (count > 0) * presence over the answer
    bans        -inf for tokens that end the answer before min_tokens
    grammar     -inf for tokens outside the mask

Legend: N slots, R rows, S spans, K drafts per span, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PROCESSED = 1
STRUCTURED = 2
"""Flags of a slot: it has a bias, penalties or min_tokens; it has a grammar."""

IN_PROMPT = 1
ENDS = 2
"""Flags of a token in a slot: it is in the prompt; it ends the answer, so min_tokens may ban it."""

FLOOR = -1e30
"""Replaces -inf for tokens that a grammar allows: if no other token is left, they are equally
likely; otherwise their probability stays 0."""


class LogitRows(NamedTuple):
    """Origins of R rows of logits, all int64: slots [R]; positions [R] of the next tokens; drafts
    [S, K], of which the row follows the first rank [R] in row span [R]; the last three are None if
    no slot is PROCESSED."""

    slots: Tensor
    positions: Tensor
    drafts: Tensor | None = None
    span: Tensor | None = None
    rank: Tensor | None = None

    def select(self, index: slice) -> LogitRows:
        """Return the origins of some rows."""
        return LogitRows(
            slots=self.slots[index],
            positions=self.positions[index],
            drafts=self.drafts,
            span=None if self.span is None else self.span[index],
            rank=None if self.rank is None else self.rank[index],
        )


class Tables(NamedTuple):
    """The processors' tables, one row per slot.

    kinds [N] int32: PROCESSED and STRUCTURED; the other tables are valid only for PROCESSED slots.
    bias [N, V] float32. counts [N, V] int32: occurrences of each token in the answer, including the
    newest token. flags [N, V] uint8: IN_PROMPT and ENDS. strengths [N, 3] float32: presence,
    frequency, repetition. min_end_position [N] int64: the first position where ENDS tokens may be.
    """

    kinds: Tensor
    bias: Tensor
    counts: Tensor
    flags: Tensor
    strengths: Tensor
    min_end_position: Tensor

    @staticmethod
    def make(num_slots: int, vocab_size: int, device: torch.device) -> Tables:
        per_token = (num_slots, vocab_size)
        return Tables(
            kinds=torch.zeros(num_slots, dtype=torch.int32, device=device),
            bias=torch.zeros(per_token, dtype=torch.float32, device=device),
            counts=torch.zeros(per_token, dtype=torch.int32, device=device),
            flags=torch.zeros(per_token, dtype=torch.uint8, device=device),
            strengths=torch.zeros(num_slots, 3, dtype=torch.float32, device=device),
            min_end_position=torch.zeros(num_slots, dtype=torch.int64, device=device),
        )


def process(
    logits: Tensor, tables: Tables, rows: LogitRows, masks: Tensor | None, *, processed: bool
) -> Tensor:
    """logits [R, V] -> new logits [R, V] float32; rows of slots without processors are unchanged,
    bit for bit.

    masks [R, ceil(V / 32)] int32: a bit for each allowed token, lowest first, read for STRUCTURED
    slots only; None without any. processed: whether some slot is PROCESSED. The twin of
    `strobe.kernels.processors.process`.
    """
    kinds = tables.kinds.index_select(0, rows.slots)
    if logits.device.type == "cpu":
        index = torch.from_numpy(np.flatnonzero(kinds.numpy()))
        if len(index) < len(kinds):
            subset = LogitRows(
                slots=rows.slots[index], positions=rows.positions[index], drafts=rows.drafts
            )
            if rows.span is not None and rows.rank is not None:
                subset = subset._replace(span=rows.span[index], rank=rows.rank[index])
            subset_masks = None if masks is None else masks[index]
            result = process(logits[index], tables, subset, subset_masks, processed=processed)
            return logits.float().index_copy(0, index, result)
    x = logits.float()
    kinds = kinds[:, None]
    if processed:
        x = torch.where(kinds & PROCESSED > 0, _processed(x, tables, rows), x)
    if masks is not None:
        floored = torch.where(x == float("-inf"), FLOOR, x)
        constrained = floored.masked_fill_(~unpack(masks, x.shape[1]), float("-inf"))
        x = torch.where(kinds & STRUCTURED > 0, constrained, x)
    return x


def _processed(x: Tensor, tables: Tables, rows: LogitRows) -> Tensor:
    """Apply bias, penalties and bans to logits [R, V]."""
    slots = rows.slots
    drafts, span, rank = (part for part in rows[2:] if part is not None)
    x = x + tables.bias.index_select(0, slots)
    before = torch.arange(drafts.shape[1], device=x.device) < rank[:, None]
    counts = tables.counts.index_select(0, slots)
    counts.scatter_add_(1, drafts.index_select(0, span), before.to(torch.int32))
    flags = tables.flags.index_select(0, slots)
    presence, frequency, repetition = tables.strengths.index_select(0, slots).split(1, 1)
    seen = counts > 0
    scaled = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(seen | (flags & IN_PROMPT > 0), scaled, x)
    x = x - counts * frequency - seen * presence
    early = rows.positions < tables.min_end_position.index_select(0, slots)
    return x.masked_fill_((flags & ENDS > 0) & early[:, None], float("-inf"))


def unpack(words: Tensor, size: int) -> Tensor:
    """words [A, W] int32, 32 tokens each, lowest bit first -> [A, size] bool."""
    if words.device.type == "cpu":
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return unpack_by_shifts(words, size)


def unpack_by_shifts(words: Tensor, size: int) -> Tensor:
    """`unpack` in torch only. On a CPU NumPy takes 12 us for 8 x 2,048 bits, and this 182 us."""
    places = torch.arange(size, device=words.device)
    return (words[:, places >> 5] >> (places & 31)) & 1 > 0
