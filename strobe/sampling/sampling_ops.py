"""The sampler's operations in plain torch, the reference for kernels.

`strobe.runner.step_ops` lists all operations of a step and their forms. Legend: R rows, V
vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from strobe.sampling.candidates import race_candidates
from strobe.sampling.processors import LogitRows, Tables, process
from strobe.sampling.sampler import RowParams, argmax, sample_rows


class SamplingOps:
    """Stateless."""

    takes_mixtures = False
    """Whether `sample_rows` takes rows with and without filters together at no extra cost, so that
    one captured graph serves any mixture of them."""

    def process(
        self,
        logits: Tensor,
        tables: Tables,
        rows: LogitRows,
        masks: Tensor | None,
        *,
        processed: bool,
    ) -> Tensor:
        """Apply bias, penalties, bans and masks: logits [R, V] -> [R, V] float32; see
        `strobe.sampling.processors.process`."""
        return process(logits, tables, rows, masks, processed=processed)

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [R, V] -> [R] int64, each row's first argmax, NO_TOKEN for rows with NaN."""
        return argmax(logits)

    def sample_rows(self, logits: Tensor, rows: RowParams, *, filtered: bool) -> Tensor:
        """logits [R, V] -> tokens [R] int64; see `strobe.sampling.sampler.sample_rows`. filtered:
        whether some row has a filter."""
        return sample_rows(logits, rows, filtered=filtered)

    def race_candidates(
        self, logits: Tensor, rows: RowParams, count: int, tokens: Tensor | None, *, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        """logits [R, V'] -> the tokens that lead the race [R, count]; see
        `strobe.sampling.candidates.race_candidates`."""
        return race_candidates(logits, rows, count, tokens, filtered=filtered)
