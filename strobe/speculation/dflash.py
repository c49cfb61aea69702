"""Block-diffusion drafting: one drafter pass proposes a whole block per request."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from strobe.attention.backend import Batch
from strobe.config import EngineConfig
from strobe.models.dflash_drafter import DFlash
from strobe.models.heads.head import BlockRows, Drafts
from strobe.models.model_config import DraftConfig
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.layout import Layout
from strobe.runner.model_runner import ModelRunner
from strobe.sampling.candidates import Candidates, HeadOutputs
from strobe.sampling.sampling_state import GREEDY, LogitRows, SamplingMode
from strobe.sampling.walk import WalkNoise
from strobe.speculation.proposer import PlacedRows
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
        self.model = model
        self.runner = runner
        self.graphs = graphs
        self.sampled = config.draft_sample_method == "probabilistic"
        self.margins = config.adaptive
        draft = model.config
        self.capture = draft.capture
        self.num_drafts = draft.block_drafts
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
        runner = self.runner
        block_rows = self.widths_for(max([span.num_drafts for span in spans]))[1][-1]
        blocks = [
            Span(
                slot=span.slot,
                start=span.start,
                max_start=span.max_start,
                tokens=self.tokens[:block_rows],
                num_logits=block_rows - self.unused,
            )
            for span in spans
        ]
        shape = runner.shape_of(blocks)
        layout = runner.lay_out(blocks, shape)
        mode = GREEDY
        if self.sampled:
            mode = runner.sampling.mode([span.slot for span in spans])
            mode = mode._replace(processed=False, grammar=False, logprobs=None)
        mode = mode._replace(margins=self.margins)
        body = functools.partial(
            self._draft, layout=layout, mode=mode, bounds=runner.bounds(blocks)
        )
        return self.graphs.run(("draft", self, mode, shape), body, layout.packed)

    def _draft(
        self,
        packed: Tensor,
        _: Tensor | None,
        *,
        layout: Layout,
        mode: SamplingMode,
        bounds: Sequence[int],
    ) -> Drafts:
        """Run the drafter over the blocks, and its head over their rows that predict."""
        layout = layout.with_packed(packed)
        state = self.runner.state
        batch = state.make_batch(layout, state.place(layout, None), bounds)
        residual, _ = self.runner.forward(batch)
        num_drafts = layout.spans[0].num_logits
        head = self.model.draft_head
        block = BlockRows(
            hidden=layout.select(residual).unflatten(0, (-1, num_drafts)),
            anchor=batch.ids[layout.row_starts],
            anchor_hidden=residual[layout.row_starts] if head.reads_anchor else None,
            greedy=mode.greedy,
            margins=mode.margins,
            choose=functools.partial(self._choose, layout=layout, batch=batch, mode=mode),
            noise=self._noise(layout, batch, mode),
            lead=functools.partial(self._lead, layout=layout, batch=batch, mode=mode)
            if mode.sampled
            else None,
        )
        return head(self.model, block)

    def _choose(
        self, logits: Tensor, first: int, *, layout: Layout, batch: Batch, mode: SamplingMode
    ) -> Drafts:
        """Choose the blocks' drafts from the `first` one on by their logits [S, n, V]."""
        shape = logits.shape[:2]
        rows = self._rows(layout, batch, slice(first, first + shape[1]))
        sampled = self.runner.sampling.sample(logits.flatten(0, 1), rows, mode)
        margins = None if sampled.margins is None else sampled.margins.view(shape)
        return Drafts(sampled.tokens.view(shape), margins)

    def _lead(
        self, outputs: HeadOutputs, count: int, *, layout: Layout, batch: Batch, mode: SamplingMode
    ) -> Candidates:
        """Return the tokens of each draft's row that lead the race in which drafts are drawn."""
        rows = self._rows(layout, batch, slice(None))
        return self.runner.sampling.candidates(outputs, rows, mode, count)

    def _noise(self, layout: Layout, batch: Batch, mode: SamplingMode) -> WalkNoise | None:
        """Return the noise that draws the blocks' drafts among candidates; None if greedy."""
        if not mode.sampled:
            return None
        return self.runner.sampling.walk_noise(self._rows(layout, batch, slice(1)))

    def _rows(self, layout: Layout, batch: Batch, drafts: slice) -> LogitRows:
        """Return the slots and positions of some of each block's drafts."""
        num_drafts = layout.spans[0].num_logits
        positions = layout.select(batch.positions).view(-1, num_drafts)[:, drafts]
        slots = layout.slots[:, None].expand_as(positions)
        # A token stands at its row's own position, or after it if the first row predicts.
        positions = positions.flatten() + int(self.model.config.anchor_first)
        return LogitRows(slots=slots.flatten(), positions=positions)

    def observe(self, batch: PlacedRows, hidden: Tensor | None) -> None:
        """Write the context K/V of every row, including rejected ones, which are never read."""
        assert hidden is not None, "the target's runner captures nothing"
        store = self.runner.store
        slots = batch.kv_slots[store.spec.group_of(0)]  # all its layers are in one group
        self.model.write_context(hidden, batch.positions, slots, store)
