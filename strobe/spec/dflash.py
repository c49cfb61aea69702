"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.models.dflash import DFlash
from strobe.runner.batch import Batch
from strobe.runner.runner import ModelRunner
from strobe.sampling.sampler import argmax
from strobe.step import Drafts, Plan, Proposal, Span


class DFlashProposer:
    """Runs the drafter over [tail, MASK x (B - 1)] at the positions the block will take.

    Its context K/V come from the target's features of every token the target ran, on the same
    pages as the target's own; a block's scratch K/V lie where the next true ones will overwrite
    them, and no read reaches beyond a span's own end.
    """

    needs_host_tokens = False

    def __init__(self, model: DFlash, runner: ModelRunner, num_drafts: int):
        self.model, self.runner = model, runner
        self.num_drafts = num_drafts
        self.capture = model.config.capture
        self.block = model.config.block_size
        shape = (runner.state.cursor.shape[0], self.block - 1)
        mask, device = model.config.mask_token_id, runner.state.device
        self._masks = torch.full(shape, mask, dtype=torch.int64, device=device)

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        """The drafter's most probable token at each mask slot; tokens [len(spans), B - 1]."""
        drafts = self.block - 1
        chosen = [plan.spans[i] for i in spans]
        blocks = tuple(
            Span(s.request, s.slot, s.start, s.bound, None, drafts, drafts) for s in chosen
        )
        masks = Proposal(self._masks[: len(blocks)])
        batch = self.runner.prepare(Plan(blocks), masks)
        return Drafts(argmax(self.runner.forward(batch).logits).view(len(blocks), drafts))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        keys, values = self.model.context_kv(hidden, batch.places.positions)
        self.runner.store.write_all(batch.attention.slots, keys, values)
