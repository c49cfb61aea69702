"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strobe.attention.base import Batch
from strobe.models.dflash import DFlash
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.pending import Verdict
from strobe.runner.runner import ModelRunner
from strobe.sampling.state import GREEDY
from strobe.step import TAIL, Span


class DFlashProposer:
    """Runs the drafter over [newest token, MASK x (B - 1)] at the positions the block will take; D
    drafts come of it, B - 1 or, where the first row predicts too, B.

    Its context K/V come from the target's features of every token the target ran, on the same
    pages as the target's own; a block's scratch K/V lie where the next true ones will overwrite
    them, and no read reaches beyond a span's own end.
    """

    def __init__(
        self, model: DFlash, runner: ModelRunner, graphs: Graphs | Eager, *, sampled: bool = False
    ):
        """sampled: drafts are sampled as the request's own tokens are, with the same noise at the
        same positions, so that drafter and target agree as often as their distributions allow
        (Daliri, Musco and Suresh, arXiv 2408.07978); else they are the most probable tokens."""
        self.model, self.runner, self.graphs, self.sampled = model, runner, graphs, sampled
        config = model.config
        self.capture, self.drafts = config.capture, config.drafts
        self.tokens = (TAIL,) + (config.mask_token_id,) * (config.block_size - 1)

    def propose(self, spans: Sequence[Span]) -> Tensor:
        """[n or more, D]"""
        runner = self.runner
        blocks = [Span(s.slot, s.start, s.bound, self.tokens, logits=self.drafts) for s in spans]
        shape, bounds, mode = runner.shape_of(blocks), runner.bounds(blocks), GREEDY
        layout = runner.lay_out(blocks, shape)
        if self.sampled:
            mode = runner.sampling.mode([s.slot for s in spans])
            mode = mode._replace(processed=False, grammar=False, logprobs=None)

        def draft(packed: Tensor) -> Tensor:
            own = layout.over(packed)
            batch = runner.state.place(own, None, bounds)
            # A row's token stands where the row does, or behind it where the first row predicts.
            ahead = int(self.model.config.anchor_first)
            found = runner.sample(runner.forward(batch), own, batch, mode, ahead=ahead)
            return found.tokens.view(-1, self.drafts)

        return self.graphs.run(("draft", mode, shape), draft, layout.packed)

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: Verdict) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        self.model.write_context(hidden, batch.positions, batch.kv_slots, self.runner.store)
