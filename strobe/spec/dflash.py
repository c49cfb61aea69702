"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strobe.models.dflash import DFlash
from strobe.runner.batch import Batch, Inputs
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.picking import GREEDY, How, PickingState
from strobe.runner.runner import ModelRunner
from strobe.sampling.noise import DRAFTS
from strobe.sampling.sampler import draw, probabilities
from strobe.step import Drafts, Plan, Proposal, Span


class DFlashProposer:
    """Runs the drafter over [tail, MASK x (B - 1)] at the positions the block will take; D drafts
    come of it, B - 1 or, where the tail's row predicts too, B.

    Its context K/V come from the target's features of every token the target ran, on the same
    pages as the target's own; a block's scratch K/V lie where the next true ones will overwrite
    them, and no read reaches beyond a span's own end.
    """

    needs_host_tokens = False

    def __init__(
        self,
        model: DFlash,
        runner: ModelRunner,
        graphs: Graphs | Eager,
        num_drafts: int,
        picking: PickingState | None = None,
    ):
        """picking: how requests pick their tokens, for drafts to be drawn in the same way; None:
        drafts are the most probable tokens."""
        self.model, self.runner, self.graphs, self.picking = model, runner, graphs, picking
        self.num_drafts = num_drafts
        self.capture = model.config.capture
        self.drafts = model.config.drafts
        shape = (runner.state.cursor.shape[0], model.config.block_size - 1)
        mask, device = model.config.mask_token_id, runner.state.device
        self._masks = torch.full(shape, mask, dtype=torch.int64, device=device)

    def propose(self, plan: Plan, spans: Sequence[int]) -> Drafts:
        """The drafter's token at each row; tokens [len(spans), D], with probs where drafts are
        drawn for some span."""
        masks, drafts = self._masks.shape[1], self.drafts
        chosen = [plan.spans[i] for i in spans]
        blocks = tuple(
            Span(s.request, s.slot, s.start, s.bound, None, masks, drafts) for s in chosen
        )
        inputs = self.runner.arrange(Plan(blocks), wanted=drafts)
        how = GREEDY if self.picking is None else self.picking.how(Plan(blocks))
        how = how._replace(by_host=False) if how.drawn else GREEDY
        return self.graphs.run(("draft", how), inputs, lambda inputs: self._draft(inputs, how))

    def _draft(self, inputs: Inputs, how: How) -> Drafts:
        """The device's part: tokens [S, D]."""
        masks = Proposal(self._masks[: inputs.layout.num_spans])
        batch = self.runner.prepare(inputs._replace(proposal=masks))
        out = self.runner.forward(batch, greedy=not how.drawn)
        if out.picks is not None:
            return Drafts(out.picks.view(-1, self.drafts))
        assert out.logits is not None
        assert self.picking is not None
        position = batch.wanted.of(batch.places.positions) + self.model.config.anchor_first
        rows = self.picking.draws(batch, how, position, DRAFTS)
        probs = probabilities(out.logits, rows)
        tokens = draw(probs, out.logits, rows).view(-1, self.drafts)
        return Drafts(tokens, probs=probs.view(*tokens.shape, -1))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        places = batch.places
        self.model.write_context(hidden, places.positions, places.slots, self.runner.store)
