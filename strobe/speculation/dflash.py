"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strobe.attention.base import Batch
from strobe.config import EngineConfig
from strobe.models.config import DraftConfig
from strobe.models.dflash import DFlash
from strobe.models.heads.base import BlockRows, Drafts
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.runner import ModelRunner
from strobe.sampling.state import GREEDY, LogitRows
from strobe.step import TAIL, Span

EXTRA_BLOCK_SIZES = 4, 8  # besides the one trained on: they cost less, and see fewer masks


def block_sizes(config: DraftConfig) -> list[int]:
    """Return the available block sizes in rows, ascending."""
    return [*[width for width in EXTRA_BLOCK_SIZES if width < config.block_size], config.block_size]


class DFlashProposer:
    """Runs the drafter over [newest token, MASK x (B - 1)] at the block's positions, for D drafts:
    B - 1, or B if the first row predicts too.

    Its context K/V are computed from the target's features of every token that the target ran, on
    the same pages as the target's own. A block's scratch K/V go where the next context K/V will
    overwrite them, and no read goes beyond a span's own end.
    """

    def __init__(
        self, model: DFlash, runner: ModelRunner, graphs: Graphs | Eager, config: EngineConfig
    ):
        """config: draft_sample_method probabilistic samples drafts as the request's own tokens are
        sampled, with the same noise at the same positions, so that drafter and target agree as
        often as their distributions allow (Daliri, Musco and Suresh, arXiv 2408.07978); greedy
        takes argmax tokens. adaptive returns the drafts' margins, too."""
        self.model, self.runner, self.graphs = model, runner, graphs
        self.sampled = config.draft_sample_method == "probabilistic"
        self.margins = config.adaptive
        draft = model.config
        self.capture, self.num_drafts = draft.capture, draft.block_drafts
        self.tokens = (TAIL,) + (draft.mask_token_id,) * (draft.block_size - 1)
        self.block_sizes = block_sizes(draft)
        self.unused = draft.block_size - draft.block_drafts  # rows that predict nothing: 1, or 0

    def widths_for(self, max_drafts: int) -> tuple[list[int], list[int]]:
        """Return drafts and rows of the blocks that serve up to `max_drafts` drafts, ascending."""
        rows = [n for n in self.block_sizes if n - self.unused < min(max_drafts, self.num_drafts)]
        rows.append(self.block_sizes[len(rows)])
        return [min(n - self.unused, max_drafts) for n in rows], rows

    def propose(self, spans: Sequence[Span]) -> Drafts:
        """Propose drafts with the smallest block that has as many as any span verifies."""
        runner, max_drafts = self.runner, max([span.num_drafts for span in spans])
        width = self.widths_for(max_drafts)[1][-1]
        tokens, drafts = self.tokens[:width], width - self.unused
        blocks = [Span(s.slot, s.start, s.max_start, tokens, num_logits=drafts) for s in spans]
        shape, bounds, mode = runner.shape_of(blocks), runner.bounds(blocks), GREEDY
        layout = runner.lay_out(blocks, shape)
        if self.sampled:
            mode = runner.sampling.mode([s.slot for s in spans])
            mode = mode._replace(processed=False, grammar=False, logprobs=None)
        mode = mode._replace(margins=self.margins)

        def draft(packed: Tensor) -> Drafts:
            here = layout.with_packed(packed)
            batch = runner.state.make_batch(here, runner.state.place(here, None), bounds)
            residual, _ = runner.forward(batch)

            def choose(logits: Tensor, first: int) -> Drafts:
                shape = logits.shape[:2]
                positions = here.select(batch.positions).view(-1, drafts)[:, first:][:, : shape[1]]
                # A token stands at its row's own position, or after it if the first row predicts.
                positions = positions.flatten() + int(self.model.config.anchor_first)
                slots = here.slots[:, None].expand(shape).flatten()
                rows = logits.flatten(0, 1), LogitRows(slots, positions)
                sampled = runner.sampling.sample(*rows, mode)
                margins = None if sampled.margins is None else sampled.margins.view(shape)
                return Drafts(sampled.tokens.view(shape), margins)

            hidden = here.select(residual).unflatten(0, (-1, drafts))
            anchor = batch.ids[here.row_starts]
            block = BlockRows(hidden, anchor, mode.greedy, mode.margins, choose)
            return self.model.draft_head(self.model, block)

        return self.graphs.run(("draft", mode, shape), draft, layout.packed)

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, including rejected ones, which are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        self.model.write_context(hidden, batch.positions, batch.kv_slots, self.runner.store)
