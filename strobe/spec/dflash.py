"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.models.dflash import DFlash
from strobe.runner.batch import Batch
from strobe.runner.runner import ModelRunner
from strobe.step import Plan, Proposal, Span


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
        self._masks: dict[int, Proposal] = {}

    def propose(self, plan: Plan, spans: Sequence[int]) -> Proposal:
        """The drafter's most probable token at each mask slot; tokens [len(spans), B - 1]."""
        drafts = self.block - 1
        blocks = tuple(
            plan.spans[i]._replace(tokens=None, drafts=drafts, rows=drafts) for i in spans
        )
        batch = self.runner.prepare(Plan(blocks), self._mask_proposal(blocks))
        logits = self.runner.forward(batch).logits
        tokens = logits.argmax(-1).view(len(blocks), drafts)
        return Proposal(tokens, self._mask_proposal(blocks).lengths)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        keys, values = self.model.context_kv(hidden, batch.positions)
        self.runner.store.write_all(batch.attention.slots, keys, values)

    def _mask_proposal(self, blocks: Sequence[Span]) -> Proposal:
        count, drafts = len(blocks), self.block - 1
        if count not in self._masks:
            device = self.runner.state.device
            tokens = torch.full((count, drafts), self.model.config.mask_token_id, device=device)
            self._masks[count] = Proposal(tokens, torch.full((count,), drafts, device=device))
        return self._masks[count]
