"""Logits processors over per-slot tables: bias, penalties, bans and grammar masks, for each row by
its own slot's settings and history.

In this order, which is vLLM's but for the mask, which comes first there; masks commute with the
rest, except where nothing would be left:

    bias        logit_bias (OpenAI), and -inf outside allowed_token_ids
    penalties   repetition (Keskar et al., arXiv 1909.05858) over prompt and answer, then OpenAI's
                logit - count * frequency - (count > 0) * presence over the answer
    bans        -inf for tokens that end the answer before min_tokens
    grammar     -inf for what the mask does not allow

Legend: N slots, R rows, S spans, K drafts per span, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PROCESSED, STRUCTURED = 1, 2
"""What a slot asks for: a bias, penalties or a minimum of tokens; a grammar."""

IN_PROMPT, ENDS = 1, 2
"""What a token is to a slot: part of its prompt; an end that must not come early."""

FLOOR = -1e30
"""In place of -inf for what a grammar allows: where nothing else is left, the grammar wins and all
it allows is equally likely; anywhere else its probability is 0 as before."""


class LogitRows(NamedTuple):
    """Where R rows of logits belong: slots [R]; positions [R], where the row's token will stand;
    drafts [S, K], of whose row span [R] the first rank [R] stand before it: None where no slot is
    PROCESSED. All int64."""

    slots: Tensor
    positions: Tensor
    drafts: Tensor | None = None
    span: Tensor | None = None
    rank: Tensor | None = None


class Tables(NamedTuple):
    """What the processors know of each slot.

    kinds [N] int32: PROCESSED and STRUCTURED; a slot's other entries count only where it is
    PROCESSED. bias [N, V] float32. counts [N, V] int32: how often the answer has each token, the
    newest included. flags [N, V] uint8: IN_PROMPT and ENDS. strengths [N, 3] float32: presence,
    frequency, repetition. min_end_position [N] int64: the first position at which ENDS may stand.
    """

    kinds: Tensor
    bias: Tensor
    counts: Tensor
    flags: Tensor
    strengths: Tensor
    min_end_position: Tensor

    @staticmethod
    def make(num_slots: int, vocab_size: int, device: torch.device) -> Tables:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return Tables(
            kinds=zeros((), torch.int32),
            bias=zeros((vocab_size,), torch.float32),
            counts=zeros((vocab_size,), torch.int32),
            flags=zeros((vocab_size,), torch.uint8),
            strengths=zeros((3,), torch.float32),
            min_end_position=zeros((), torch.int64),
        )


def process(
    logits: Tensor, tables: Tables, rows: LogitRows, masks: Tensor | None, *, processed: bool
) -> Tensor:
    """logits [R, V] -> [R, V] float32, the input left as it was; rows of slots that ask for nothing
    come through to the bit.

    masks [R, ceil(V / 32)] int32: a bit for every token that may come, lowest first; only read for
    STRUCTURED slots, None where there are none. processed: some slot is PROCESSED. The twin of
    `strobe.kernels.processors.process`.
    """
    kinds = tables.kinds.index_select(0, rows.slots)
    if logits.device.type == "cpu":
        index = torch.from_numpy(np.flatnonzero(kinds.numpy()))
        if len(index) < len(kinds):
            subset = LogitRows(rows.slots[index], rows.positions[index], rows.drafts)
            if rows.span is not None and rows.rank is not None:
                subset = subset._replace(span=rows.span[index], rank=rows.rank[index])
            subset_masks = None if masks is None else masks[index]
            result = process(logits[index], tables, subset, subset_masks, processed=processed)
            return logits.float().index_copy(0, index, result)
    x, kinds = logits.float(), kinds[:, None]
    if processed:
        x = torch.where(kinds & PROCESSED > 0, _processed(x, tables, rows), x)
    if masks is not None:
        floored = torch.where(x == float("-inf"), FLOOR, x)
        constrained = floored.masked_fill_(~unpack(masks, x.shape[1]), float("-inf"))
        x = torch.where(kinds & STRUCTURED > 0, constrained, x)
    return x


def _processed(x: Tensor, tables: Tables, rows: LogitRows) -> Tensor:
    """Rows [R, V] with bias, penalties and bans."""
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
    """The same with torch alone; NumPy's takes a fifteenth of the time on a CPU (8 x 2,048: 12
    against 182 us)."""
    places = torch.arange(size, device=words.device)
    return (words[:, places >> 5] >> (places & 31)) & 1 > 0
