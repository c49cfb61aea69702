"""The sampler's state: each slot's parameters, and sampling for any rows of logits.

The tables are on the device and written at admission only, so captured graphs read new requests'
parameters at the same addresses. A SamplingMode is what the host needs to choose a graph.

    logits --> processors --> filters, argmax of noisy logits --> tokens
       |    (bias, penalties,                                       |
       |     bans, grammar)                                         v
       +--------------------------------------------------------> scores of the unprocessed logits

Legend: N slots, R rows of logits, S spans, K drafts per span, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from strobe.host.transfer import upload
from strobe.sampling.candidates import Candidates, HeadOutputs
from strobe.sampling.logprobs import Scores, score
from strobe.sampling.noise import noise_key
from strobe.sampling.processors import ENDS, IN_PROMPT, PROCESSED, STRUCTURED, Tables
from strobe.sampling.processors import LogitRows as LogitRows
from strobe.sampling.sampler import RowParams, best_two
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.walk import WalkNoise
from strobe.sampling_params import MAX_NAMED, OPTIONS, PENALTIES
from strobe.step import Admission

TOP_SIZES = (0, 1, 5, 20)
"""Numbers of top log probabilities are rounded up to these, since each needs its own graph; larger
numbers are used as they are."""

FLOATS = tuple(option.name for option in OPTIONS if option.facts.column is float)
INTS = (*(option.name for option in OPTIONS if option.facts.column is int), "key")
"""Columns of the per-slot tables, named as in RowParams."""


class SamplingMode(NamedTuple):
    """The operations of a step's sampling; part of a captured graph's key.

    sampled: some row is not greedy. filtered: some row has a filter. processed: some slot has a
    bias, penalties or min_tokens. grammar: some slot has a grammar. logprobs: number of top log
    probabilities to compute, None for no scores. margins: compute each row's margin of the largest
    logit over the second largest, for drafts.
    """

    sampled: bool = False
    filtered: bool = False
    processed: bool = False
    grammar: bool = False
    logprobs: int | None = None
    margins: bool = False

    @property
    def greedy(self) -> bool:
        """Whether only the argmax is needed."""
        return not (self.sampled or self.processed or self.grammar or self.logprobs is not None)


GREEDY = SamplingMode()


class Sampled(NamedTuple):
    """tokens [R] int64; scores: log probabilities of all R rows, if the mode has them; margins [R]
    float32, if the mode has them."""

    tokens: Tensor
    scores: Scores | None = None
    margins: Tensor | None = None

    def select(self, layout: Any) -> Sampled:
        """Select a layout's rows with logits from results of all its rows."""
        scores = self.scores and Scores(*map(layout.select, self.scores))
        return Sampled(layout.select(self.tokens), scores)


SampleRows: TypeAlias = Callable[[Tensor, LogitRows, SamplingMode, Tensor | None], Sampled]
"""`SamplingState.sample` for rows of one rank."""

FindCandidates: TypeAlias = Callable[[HeadOutputs, LogitRows], Candidates]
"""`SamplingState.candidates` for rows of one rank."""


class SharesRows(Protocol):
    """Divides rows of logits between several ranks."""

    def sample(
        self,
        sample: SampleRows,
        logits: Tensor,
        rows: LogitRows,
        mode: SamplingMode,
        masks: Tensor | None,
    ) -> Sampled:
        """Return the results of all rows; `sample` samples this rank's rows."""
        ...

    def candidates(self, find: FindCandidates, outputs: HeadOutputs, rows: LogitRows) -> Candidates:
        """Return the candidates of all rows; `find` finds the candidates of this rank's rows."""
        ...


class SamplingState:
    """Sampling parameters and processors' tables of each slot, and of one spare slot at the end,
    which is greedy without processors."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        ops: SamplingOps,
        *,
        ranks: SharesRows | None = None,
    ):
        """ops: the operations on logits. ranks: divides rows between the ranks, if there are
        several."""
        num_slots += 1
        self.device = device
        self.vocab_size = vocab_size
        self.ops = ops
        self._ranks = ranks
        self.tables = Tables.make(num_slots, vocab_size, device)
        self.floats = torch.zeros(len(FLOATS), num_slots, dtype=torch.float32, device=device)
        self.ints = torch.zeros(len(INTS), num_slots, dtype=torch.int64, device=device)
        self.named = torch.zeros(num_slots, MAX_NAMED, dtype=torch.int64, device=device)
        self._modes = [GREEDY] * num_slots
        self._score_columns: list[slice | None] = [None] * num_slots

    @staticmethod
    def num_bytes(num_slots: int, vocab_size: int) -> int:
        """Return the device memory of all tables in bytes."""
        tables = Tables.make(1, vocab_size, torch.device("meta"))
        columns = 4 * len(FLOATS) + 8 * len(INTS) + 8 * MAX_NAMED
        return (num_slots + 1) * (sum(table.nbytes for table in tables) + columns)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Write new requests' parameters to their slots."""
        if not admissions:
            return
        ints: list[tuple[int, ...]] = []
        floats: list[tuple[float, ...]] = []
        for a in admissions:
            s = a.sampling
            ids = s.logprob_token_ids
            top = s.logprobs
            columns = None if top is None else slice(MAX_NAMED, MAX_NAMED + top)
            if ids:
                self.named[a.slot, : len(ids)] = upload(ids, self.device)
                columns = slice(len(ids))
                top = 0
            self._score_columns[a.slot] = columns
            mode = SamplingMode(
                sampled=s.temperature > 0,
                filtered=s.filters,
                processed=s.processes,
                grammar=s.structured_outputs is not None,
                logprobs=top,
            )
            self._modes[a.slot] = mode
            kind = PROCESSED * mode.processed + STRUCTURED * mode.grammar
            key = noise_key(a.seed, a.sibling)
            ints.append((a.slot, *(getattr(s, name) for name in INTS[:-1]), key, kind))
            floats.append(tuple(getattr(s, name) for name in FLOATS))
            if mode.processed:
                self._fill(a)
        slots, *rest, kinds = upload(ints, self.device).unbind(1)
        self.ints.index_copy_(1, slots, torch.stack(rest))
        self.floats.index_copy_(1, slots, upload(floats, self.device, torch.float32).T)
        self.tables.kinds.index_copy_(0, slots, kinds.to(torch.int32))

    def _fill(self, admission: Admission) -> None:
        """Write a slot's rows of the processors' tables."""
        slot = admission.slot
        s = admission.sampling
        tables = self.tables
        bias = tables.bias[slot]
        flags = tables.flags[slot]
        bias.fill_(0.0 if s.allowed_token_ids is None else float("-inf"))
        if s.allowed_token_ids is not None:
            bias.index_fill_(0, upload(s.allowed_token_ids, self.device), 0.0)
        if s.logit_bias:
            values = upload(list(s.logit_bias.values()), self.device, torch.float32)
            bias.index_add_(0, upload(list(s.logit_bias), self.device), values)
        prompt, answer = upload(admission.tokens, self.device).tensor_split([admission.num_prompt])
        ones = torch.ones_like(answer, dtype=torch.int32)
        tables.counts[slot].zero_().index_add_(0, answer, ones)
        flags.zero_().index_fill_(0, prompt, IN_PROMPT)
        ends = upload(sorted(admission.stop_ids), self.device)
        flags.index_copy_(0, ends, flags[ends] | ENDS)
        strengths = [getattr(s, penalty.name) for penalty in PENALTIES]
        tables.strengths[slot] = upload(strengths, self.device, torch.float32)
        tables.min_end_position[slot] = admission.num_prompt + s.min_tokens if s.min_tokens else 0

    def mode(self, slots: Sequence[int]) -> SamplingMode:
        """Return the mode for sampling rows of these slots together."""
        modes = {self._modes[slot] for slot in slots}
        sampled = any(mode.sampled for mode in modes)
        tops = [mode.logprobs for mode in modes if mode.logprobs is not None]
        return SamplingMode(
            sampled=sampled,
            filtered=sampled and (self.ops.takes_mixtures or any(m.filtered for m in modes)),
            processed=any(mode.processed for mode in modes),
            grammar=any(mode.grammar for mode in modes),
            logprobs=next((n for n in TOP_SIZES if n >= max(tops)), max(tops)) if tops else None,
        )

    def score_columns(self, slots: Sequence[int]) -> dict[int, slice]:
        """Return the columns of `Scores` to report by index of slots that request any."""
        columns = [self._score_columns[slot] for slot in slots]
        return {i: part for i, part in enumerate(columns) if part is not None}

    def sample(
        self, logits: Tensor, rows: LogitRows, mode: SamplingMode, masks: Tensor | None = None
    ) -> Sampled:
        """Sample tokens from logits [R, V]. masks [R, ceil(V / 32)] int32: tokens that grammars
        allow, if the mode has any; rows of slots without a grammar are not read. Of several ranks
        each gets the results of all rows; logits may be its columns only."""
        if self._ranks is not None:
            return self._ranks.sample(self._sample, logits, rows, mode, masks)
        return self._sample(logits, rows, mode, masks)

    def _sample(
        self, logits: Tensor, rows: LogitRows, mode: SamplingMode, masks: Tensor | None
    ) -> Sampled:
        processed = logits
        if mode.processed or mode.grammar:
            processed = self.ops.process(logits, self.tables, rows, masks, processed=mode.processed)
        tokens = self._race(processed, rows, mode) if mode.sampled else self.ops.argmax(processed)
        top = mode.logprobs
        scores = None if top is None else score(logits, tokens, top, self.named[rows.slots])
        margins = best_two(logits)[1] if mode.margins else None
        return Sampled(tokens, scores, margins)

    def walk_noise(self, rows: LogitRows) -> WalkNoise:
        """Return what draws tokens at these rows' slots, from their positions on, among candidates
        as `sample` does, but without filters."""
        temperatures = self.floats[FLOATS.index("temperature")]
        keys = self.ints[INTS.index("key")]
        return WalkNoise(keys[rows.slots], rows.positions, temperatures[rows.slots])

    def candidates(
        self, outputs: HeadOutputs, rows: LogitRows, mode: SamplingMode, count: int
    ) -> Candidates:
        """Return the `count` tokens of each row that lead the race in which `sample` draws, for
        drafters that choose among few. Of several ranks each gets the candidates of all rows."""
        find = functools.partial(self._candidates, mode=mode, count=count)
        if self._ranks is not None:
            return self._ranks.candidates(find, outputs, rows)
        return find(outputs, rows)

    def _candidates(
        self, outputs: HeadOutputs, rows: LogitRows, *, mode: SamplingMode, count: int
    ) -> Candidates:
        params = self._row_params(rows)
        places, joins = self.ops.race_candidates(
            outputs.logits(), params, count, outputs.tokens, filtered=mode.filtered
        )
        values = outputs.raw.gather(1, places).float()
        return Candidates(values.masked_fill_(~joins, torch.nan), places)

    def _race(self, logits: Tensor, rows: LogitRows, mode: SamplingMode) -> Tensor:
        return self.ops.sample_rows(logits, self._row_params(rows), filtered=mode.filtered)

    def _row_params(self, rows: LogitRows) -> RowParams:
        floats = zip(FLOATS, self.floats.index_select(1, rows.slots).unbind(), strict=True)
        ints = zip(INTS, self.ints.index_select(1, rows.slots).unbind(), strict=True)
        return RowParams(**dict(floats), **dict(ints), position=rows.positions)

    def count_tokens(self, slots: Tensor, tokens: Tensor, accepted: Tensor, active: Tensor) -> None:
        """Count the tokens that a step committed, for penalties: the first accepted [S] + 1 of
        tokens [S, K + 1] in spans that are active [S] (bool or 0 and 1: those with logits). Needed
        only if the mode is processed."""
        committed = torch.arange(tokens.shape[1], device=self.device) <= accepted[:, None]
        committed &= active[:, None] > 0
        cells = slots[:, None] * self.vocab_size + tokens.clamp(min=0)
        counts = self.tables.counts
        counts.view(-1).index_add_(0, cells.view(-1), committed.view(-1).to(torch.int32))
