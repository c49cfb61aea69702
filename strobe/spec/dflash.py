"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.models.dflash import DFlash
from strobe.runner.batch import Batch, Inputs
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.runner import ModelRunner
from strobe.step import Drafts, Plan, Proposal, Span


class DFlashProposer:
    """Runs the drafter over [tail, MASK x (B - 1)] at the positions the block will take.

    Its context K/V come from the target's features of every token the target ran, on the same
    pages as the target's own; a block's scratch K/V lie where the next true ones will overwrite
    them, and no read reaches beyond a span's own end.
    """

    needs_host_tokens = False

    def __init__(self, model: DFlash, runner: ModelRunner, graphs: Graphs | Eager, num_drafts: int):
        self.model, self.runner, self.graphs = model, runner, graphs
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
        inputs = self.runner.arrange(Plan(blocks), wanted=drafts)
        return Drafts(self.graphs.run("draft", inputs, self._draft))

    def _draft(self, inputs: Inputs) -> Tensor:
        """The device's part: tokens [S, B - 1]."""
        masks = Proposal(self._masks[: inputs.layout.num_spans])
        out = self.runner.forward(self.runner.prepare(inputs._replace(proposal=masks)), greedy=True)
        assert out.picks is not None
        return out.picks.view(-1, self.block - 1)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        places = batch.places
        self.model.write_context(hidden, places.positions, places.slots, self.runner.store)
