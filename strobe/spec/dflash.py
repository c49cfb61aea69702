"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strobe.attention.base import Batch
from strobe.models.config import DraftConfig
from strobe.models.dflash import DFlash
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.pending import Verdict
from strobe.runner.runner import ModelRunner
from strobe.sampling.state import GREEDY
from strobe.spec.base import Drafts
from strobe.step import TAIL, Span

WIDTHS = (4, 8)  # rows of blocks beside those trained on: they cost less, and see fewer masks


def block_widths(config: DraftConfig) -> list[int]:
    """Rows of the blocks there are, ascending."""
    return [*[width for width in WIDTHS if width < config.block_size], config.block_size]


class DFlashProposer:
    """Runs the drafter over [newest token, MASK x (B - 1)] at the positions the block will take; D
    drafts come of it, B - 1 or, where the first row predicts too, B.

    Its context K/V come from the target's features of every token the target ran, on the same
    pages as the target's own; a block's scratch K/V lie where the next true ones will overwrite
    them, and no read reaches beyond a span's own end.
    """

    def __init__(
        self,
        model: DFlash,
        runner: ModelRunner,
        graphs: Graphs | Eager,
        *,
        sampled: bool = False,
        margins: bool = False,
    ):
        """sampled: drafts are sampled as the request's own tokens are, with the same noise at the
        same positions, so that drafter and target agree as often as their distributions allow
        (Daliri, Musco and Suresh, arXiv 2408.07978); else they are the most probable tokens.
        margins: give those of the drafts, too."""
        self.model, self.runner, self.graphs = model, runner, graphs
        self.sampled, self.margins = sampled, margins
        config = model.config
        self.capture, self.drafts = config.capture, config.drafts
        self.tokens = (TAIL,) + (config.mask_token_id,) * (config.block_size - 1)
        self.widths = block_widths(config)

    def widths_for(self, most: int) -> tuple[list[int], list[int]]:
        """Drafts and rows of the blocks there are for `most` drafts at most, the longest last."""
        unused = len(self.tokens) - self.drafts
        rows = [n for n in self.widths if n - unused < min(most, self.drafts)]
        rows.append(self.widths[len(rows)])
        return [min(n - unused, most) for n in rows], rows

    def propose(self, spans: Sequence[Span]) -> Drafts:
        """As many drafts each as the shortest block brings that has what all spans verify."""
        runner, most = self.runner, max([span.drafts for span in spans])
        unused = len(self.tokens) - self.drafts  # rows that predict nothing: 1, or 0
        width = next(width for width in self.widths if width - unused >= min(most, self.drafts))
        tokens, drafts = self.tokens[:width], width - unused
        blocks = [Span(s.slot, s.start, s.bound, tokens, logits=drafts) for s in spans]
        shape, bounds, mode = runner.shape_of(blocks), runner.bounds(blocks), GREEDY
        layout = runner.lay_out(blocks, shape)
        if self.sampled:
            mode = runner.sampling.mode([s.slot for s in spans])
            mode = mode._replace(processed=False, grammar=False, logprobs=None)
        mode = mode._replace(margins=self.margins)

        def draft(packed: Tensor) -> Drafts:
            own = layout.over(packed)
            batch = runner.state.place(own, None, bounds)
            # A row's token stands where the row does, or behind it where the first row predicts.
            ahead = int(self.model.config.anchor_first)
            found = runner.sample(runner.forward(batch), own, batch, mode, ahead=ahead)
            margins = None if found.margins is None else found.margins.view(-1, drafts)
            return Drafts(found.tokens.view(-1, drafts), margins)

        return self.graphs.run(("draft", mode, shape), draft, layout.packed)

    def observe(self, batch: Batch, hidden: Tensor | None, verdict: Verdict) -> None:
        """Write the context K/V of every row, rejected ones included: they are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        self.model.write_context(hidden, batch.positions, batch.kv_slots, self.runner.store)
